"""Which backend keeps what was stored there (responses, conversations, files), and whose it is."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from ctxreuse.errors import FormatError
from ctxreuse.recent import keep_newest
from ctxreuse.store.journal import Journal

__all__ = ["FILE", "StoredObjects", "id_of_answer", "is_public", "stored_id"]

#: In the folder of the cloud's store.
FILE = "stored.journal"

_MAX, _LIMIT, _DIGEST = 1 << 16, 8 << 20, 16
#: Collections whose objects are kept by the backend that made them.
_COLLECTIONS = (
    "assistants", "batches", "containers", "conversations", "evals", "files", "fine_tuning/jobs", "messages/batches",
    "responses", "threads", "uploads", "vector_stores", "videos",
)  # fmt: skip
#: Routes that stand where an id would.
_ROUTES = ("compact", "input_tokens", "runs")
_STORED = re.compile(rf"/v1/({'|'.join(_COLLECTIONS)})(?:/(?!(?:{'|'.join(_ROUTES)})(?:/|\Z))([^/]+))?(?:/.*)?")
#: What a tenant may read that is no object of its own: nothing of others is in it.
_PUBLIC = ("/api/ps", "/api/tags", "/api/version")


class _Named(msgspec.Struct):
    id: str = ""


class _Answer(msgspec.Struct):
    id: str = ""
    response: _Named | None = None


_answer = msgspec.json.Decoder(_Answer)


def stored_id(path: str) -> tuple[str, str]:
    """Return the collection and the id in a path such as ``/v1/responses/ID/cancel``; "" where there is none."""
    found = _STORED.fullmatch(path)
    return (found[1], found[2] or "") if found is not None else ("", "")


def is_public(path: str) -> bool:
    """Return True if reading a path reveals nothing of other tenants."""
    return path in _PUBLIC


def id_of_answer(data: bytes) -> str:
    """Return the id of what an answer says that it stored, from its JSON or the first event of its stream; ""."""
    if data.startswith((b"data:", b"event:")):
        data = next((line[5:] for line in data.splitlines() if line.startswith(b"data:")), b"")
    try:
        found = _answer.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return found.response.id if found.response is not None else found.id


class StoredObjects:
    """The last 65,536 objects, by hashes of their ids and tenants; for one event loop.

    ``file``: journal that keeps them over restarts."""

    def __init__(self, file: Path | None = None) -> None:
        self._places: dict[bytes, str] = {}
        lost = "backends of stored responses are not known any more"
        self._journal = Journal(file, _LIMIT, lost=lost) if file is not None else None
        if self._journal is not None:
            self._journal.open(self._recall)

    def note(self, identity: str, tenant: str, backend: str) -> None:
        """Note that a backend stored an object for a tenant."""
        key = _digest(identity, tenant)
        if self._places.get(key) == backend:
            return
        self._put(key, backend)
        if self._journal is not None:
            self._journal.append(key + backend.encode())

    def find(self, identity: str, tenant: str) -> str | None:
        """Return the name of the backend with an object of a tenant; None if it is not known."""
        return self._places.get(_digest(identity, tenant))

    def _put(self, key: bytes, backend: str) -> None:
        self._places.pop(key, None)
        self._places[key] = backend
        self._places = keep_newest(self._places, _MAX)

    def _recall(self, raw: bytes) -> None:
        try:
            self._put(raw[:_DIGEST], raw[_DIGEST:].decode())
        except UnicodeDecodeError as error:
            raise FormatError(f"not a record of a stored object: {error}") from None

    def close(self) -> None:
        """Stop writing. Idempotent."""
        if self._journal is not None:
            self._journal.close()


def _digest(identity: str, tenant: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{identity}".encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()
