"""Which headers pass through: all but those of one hop, of the connection, and of who asks."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

__all__ = ["REQUEST_ID", "RawHeaders", "answer_headers", "request_headers", "request_id"]

RawHeaders = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# RFC 9110, 7.6.1, and the older names that are still sent.
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer".split()
) | {b"transfer-encoding", b"upgrade"}
# The caller's key is for this node; bodies may be rewritten; compressed answers could not be passed on piece by piece.
_MINE = frozenset(b"host content-length expect authorization cookie accept-encoding api-key x-api-key".split())
_THEIRS = frozenset(b"server date set-cookie".split()) | {REQUEST_ID}


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Headers that a ``Connection`` header declares to be of this hop."""
    return {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}


def request_id(given: bytes | None) -> str:
    """The caller's request id if it is one that may stand in logs and headers, else a new one."""
    text = given.decode("latin-1") if given else ""
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex


def request_headers(raw: Iterable[tuple[bytes, bytes]], identity: str, key: str) -> list[tuple[str, str]]:
    """Headers for the backend: the caller's without those of the hop, with the request id and the backend's ``key``.

    Names of ``raw`` are lower case, as ASGI gives them. ``traceparent`` and ``tracestate`` pass like any other.
    """
    raw = list(raw)
    drop = _HOP | _MINE | _named_by_connection(raw) | {REQUEST_ID}
    out = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw if name not in drop]
    out += [("accept-encoding", "identity"), ("x-request-id", identity)]
    if key:
        out.append(("authorization", f"Bearer {key}"))
    return out


def answer_headers(raw: Iterable[tuple[bytes, bytes]], identity: str) -> RawHeaders:
    """Headers for the caller: the backend's without those of the hop, with the request id."""
    lower = [(name.lower(), value) for name, value in raw]
    drop = _HOP | _THEIRS | _named_by_connection(lower)
    return [(name, value) for name, value in lower if name not in drop] + [(REQUEST_ID, identity.encode())]
