"""What clouds are still to delete for a device: kept until each of them has answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ctxreuse.bus.protocol.base import Link
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.private import write_private

__all__ = ["CloudDeletions"]

log = logging.getLogger(__name__)

#: Keys that wait for one cloud, at most: the oldest are given up first.
_MOST = 1 << 17
_PERIOD, _TIMEOUT = 1.0, 30.0


class _State(msgspec.Struct):
    salts: dict[str, bytes] = {}
    waiting: dict[str, bytes] = {}


class CloudDeletions:
    """Deletions for the clouds of ``links``, in ``file``. Any thread may call; close it.

    The file also has the salts of the clouds, so that what a cloud that is away has to delete can be named.
    """

    def __init__(self, links: Sequence[Link], file: Path) -> None:
        self._links, self._file = list(links), file
        self._lock = threading.Lock()
        self._state = self._read()
        self._end, self._more = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-deletions", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def salts(self) -> Mapping[str, bytes]:
        """Return the salt of each cloud that was ever connected, by its name."""
        self._learn()
        return dict(self._state.salts)

    def add(self, keys: Mapping[str, bytes]) -> None:
        """Have these blocks deleted, each key under its cloud's salt. On disk when it returns. Raises OSError."""
        with self._lock:
            for name, row in keys.items():
                before = self._state.waiting.get(name, b"")
                fresh = [key for key in _cut(row) if key not in set(_cut(before))]
                self._state.waiting[name] = (before + b"".join(fresh))[-_MOST * KEY_BYTES :]
            if keys:
                self._write()
        self._more.set()

    def waiting(self) -> dict[str, int]:
        """Return how many keys wait for each cloud."""
        with self._lock:
            return {name: len(row) // KEY_BYTES for name, row in self._state.waiting.items() if row}

    def close(self) -> None:
        """End the sending; what waits is sent next time. The links must be closed."""
        self._end.set()
        self._more.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self._more.clear()
            try:
                self._learn()
                for link in self._links:
                    self._send(link)
            except OSError as error:
                log.warning("what clouds are to delete cannot be noted: %s", error)
            except Exception:
                log.exception("a deletion could not be sent; it is tried again")
            self._more.wait(_PERIOD)

    def _learn(self) -> None:
        with self._lock:
            known = {link.name: link.welcome.salt for link in self._links if link.welcome is not None}
            if any(self._state.salts.get(name) != salt for name, salt in known.items()):
                self._state.salts |= known
                self._write()

    def _send(self, link: Link) -> None:
        with self._lock:
            row = self._state.waiting.get(link.name, b"")
        if not row or link.state != "up" or self._end.is_set():
            return
        done = _cut(row)
        if link.forget(done, _TIMEOUT) is None:
            return
        with self._lock:
            left = [key for key in _cut(self._state.waiting.get(link.name, b"")) if key not in set(done)]
            self._state.waiting[link.name] = b"".join(left)
            self._write()
        log.info("a cloud deleted blocks", extra={"cloud": link.name, "blocks": len(done)})

    def _write(self) -> None:
        write_private(self._file, msgspec.msgpack.encode(self._state))

    def _read(self) -> _State:
        try:
            return msgspec.msgpack.decode(self._file.read_bytes(), type=_State)
        except FileNotFoundError:
            return _State()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("what clouds are to delete cannot be read: %s", error, extra={"file": str(self._file)})
            return _State()


def _cut(row: bytes) -> list[bytes]:
    return [row[at : at + KEY_BYTES] for at in range(0, len(row), KEY_BYTES)]
