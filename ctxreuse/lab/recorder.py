"""Records one's own traffic as a trace: hashes and counts, in files of bounded size, never in a request's way."""

from __future__ import annotations

import errno
import io
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.lab.recording import FORMAT, VERSION, Ended, Head, Prompted
from ctxreuse.private import make_private_folder

__all__ = ["Recorded", "Recorder", "open_recorder"]

#: Anything with the buffer protocol.
Buffer: TypeAlias = Any

log = logging.getLogger(__name__)

_HASH_BYTES = 8
_FILES = 4
_QUEUE = 1024
#: Blocks remembered as written, about 100 bytes each. One that is forgotten is written once more.
_KNOWN = 1 << 18
#: Bytes of text counted as one token where tokens are unknown.
_BYTES_PER_TOKEN = 4


def open_recorder(
    file: str, nbytes: int, *, block_tokens: int = 64, token_bytes: int = 0, unit: Literal["tokens", "bytes"] = "tokens"
) -> Recorder:
    """Return a recorder for a daemon's settings, of ``nbytes`` for all files. Raises ConfigError as `Recorder`."""
    path = Path(file).expanduser()
    limit = max(nbytes // _FILES, 1)
    return Recorder(path, block_tokens=block_tokens, token_bytes=token_bytes, unit=unit, limit=limit, files=_FILES)


class Recorded(msgspec.Struct, frozen=True):
    """A recorder's own figures: requests written, requests left out (the writer was behind, or one
    alone is larger than a file may be), and errors of the disk."""

    written: int
    dropped: int
    errors: int


class Recorder:
    """Writes to ``path``; what was there becomes ``path.1`` and so on, as does a file that reaches ``limit`` bytes.

    At most ``files`` files stay, so at most ``files · limit`` bytes. Any thread may call; a call costs microseconds,
    since a thread of its own hashes and writes, and it never raises: what cannot be written is counted (``figures``)
    and logged once. ``token_bytes``: KV of a token. ``unit``: see `ctxreuse.lab.recording`. Raises ConfigError
    if the file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 64,
        token_bytes: int = 0,
        unit: Literal["tokens", "bytes"] = "tokens",
        limit: int = 256 << 20,
        files: int = _FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._limit, self._files, self._clock = path, limit, max(files, 1), clock
        self._head = Head(FORMAT, VERSION, block_tokens, token_bytes, unit)
        self._encode = msgspec.json.Encoder().encode
        self._queue: queue.Queue[_Prompt | _End | _Mark | None] = queue.Queue(_QUEUE)
        self._lock = threading.Lock()
        self._numbers = self._refused = self._written = self._oversize = self._errors = 0
        #: Lines that could not be written since the last one that could.
        self._lost = 0
        self._file: io.FileIO | None = None
        self._closed = False
        self._began: float | None = None
        try:
            make_private_folder(path.parent)
            self._begin()
        except OSError as error:
            raise ConfigError(
                f"the recording cannot be written: {error.strerror or error}", where=str(path), fix="Name another file"
            ) from error
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def prompt(self, keys: Sequence[bytes], tokens: int) -> int:
        """Record a prompt of ``tokens`` tokens; ``keys``: of its whole blocks. Returns its number for `ended`."""
        return self._put(tokens, keys=keys)

    def text(self, parts: Sequence[Buffer], scope: bytes = b"") -> int:
        """Record a prompt of which only the text is known: ``parts`` in the order in which the model reads them, which
        must not change. ``scope``: what else must be equal for a prefix to be shared, such as tenant and model."""
        size = sum(memoryview(part).nbytes for part in parts)
        return self._put(-(-size // _BYTES_PER_TOKEN), parts=parts, scope=scope)

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """Record that the context of these keys paused for the reason ``label`` (`ctxreuse.pauses`)."""
        self._offer(_Mark(keys, label))

    def ended(self, number: int, *, output: int = 0, busy: float = 0.0) -> None:
        """Record that the prompt ``number`` was answered: tokens of the answer, and seconds that it took."""
        if number >= 0:
            self._offer(_End(number, output, busy))

    @property
    def figures(self) -> Recorded:
        """What became of the prompts so far."""
        return Recorded(self._written, self._refused + self._oversize, self._errors)

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, at most ``timeout`` seconds long, and end. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            log.warning("the recording ends without its last requests", extra={"file": str(self._path)})
            return
        self._thread.join(timeout)

    def _put(self, tokens: int, *, keys: Sequence[bytes] = (), parts: Sequence[Buffer] = (), scope: bytes = b"") -> int:
        with self._lock:
            number = self._numbers
            if self._offer(_Prompt(number, self._clock(), tokens, keys, parts, scope)):
                self._numbers += 1
                return number
            self._refused += 1
        return -1

    def _offer(self, item: _Prompt | _End | _Mark) -> bool:
        try:
            if not self._closed:
                self._queue.put_nowait(item)
                return True
        except queue.Full:
            pass
        return False

    # ---- The thread's own: nothing below is touched by others.

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(item)
            except OSError as error:
                self._failed(error)
        if self._file is not None:
            self._file.close()

    def _failed(self, error: OSError) -> None:
        if not self._lost:
            log.warning("requests are not recorded: %s", error, extra={"file": str(self._path)})
        self._lost += 1
        self._errors += 1

    def _begin(self) -> None:
        """A new file with a secret of its own, so that hashes of two files cannot be compared.

        The older ones move on when it has its first line: a full disk must not push them out.
        """
        fresh, head = self._path.with_name(self._path.name + ".new"), self._encode(self._head) + b"\n"
        # Private: when a model was used is not other users' business.
        file = open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0)  # noqa: SIM115
        try:
            _append(file, 0, head)
            for n in range(self._files - 1, 0, -1):
                older = self._path if n == 1 else self._numbered(n - 1)
                if older.exists():
                    os.replace(older, self._numbered(n))
            os.replace(fresh, self._path)
        except OSError:
            file.close()
            fresh.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        self._size, self._secret = len(head), os.urandom(16)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        # Of the last requests: their place in this file, by number and by their last block.
        self._places: OrderedDict[int, int] = OrderedDict()
        self._tips: OrderedDict[bytes, int] = OrderedDict()
        self._rows, self._began, self._last = 0, None, 0.0

    def _numbered(self, n: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{n}")

    def _write(self, item: _Prompt | _End | _Mark) -> None:
        if self._file is None or (self._size >= self._limit and isinstance(item, _Prompt)):
            self._begin()
        if isinstance(item, _End):
            place = self._places.pop(item.number, None)
            if place is not None:
                self._line(Ended(place, 0, item.output, round(max(item.busy, 0.0), 4)))
            return
        if isinstance(item, _Mark):
            hashes = [_hash(key, self._secret) for key in item.keys]
            place = next((self._tips[name] for name in reversed(hashes) if name in self._tips), None)
            if place is not None:
                self._line(Ended(place, item.label))
            return
        hashes = self._hashes(item)
        line = self._prompted(item, hashes)
        if self._rows and self._size + len(line) > self._limit:
            self._begin()
            hashes = self._hashes(item)
            line = self._prompted(item, hashes)
        if len(line) + self._size > self._limit:
            self._oversize += 1
            return
        self._append(line)
        for name in hashes:
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        self._places[item.number] = self._rows
        while len(self._places) > _QUEUE:
            self._places.popitem(last=False)
        if hashes:
            self._tips[hashes[-1]] = self._rows
            self._tips.move_to_end(hashes[-1])
            while len(self._tips) > _QUEUE:
                self._tips.popitem(last=False)
        self._rows += 1
        self._written += 1

    def _hashes(self, item: _Prompt) -> list[bytes]:
        secret = self._secret
        if item.keys:
            return [_hash(key, secret) for key in item.keys]
        found: list[bytes] = []
        step, rest, parent = self._head.block_tokens * _BYTES_PER_TOKEN, b"", _hash(item.scope, secret)
        for part in item.parts:
            data = rest + bytes(part)
            whole = len(data) - len(data) % step
            for start in range(0, whole, step):
                parent = _hash(parent + data[start : start + step], secret)
                found.append(parent)
            rest = data[whole:]
        return found

    def _prompted(self, item: _Prompt, hashes: list[bytes]) -> bytes:
        """The line of a request: only what comes after the deepest block that this file has already."""
        if self._began is None:
            self._began = item.t
        # Callers in several threads may be queued in another order than they read the clock.
        self._last = max(self._last, round(item.t - self._began, 3))
        known = len(hashes)
        while known and hashes[known - 1] not in self._known:
            known -= 1
        at = hashes[known - 1].hex() if known else ""
        new = b"".join(hashes[known:]).hex()
        return self._encode(Prompted(self._last, item.tokens, at, new)) + b"\n"

    def _line(self, line: Ended) -> None:
        self._append(self._encode(line) + b"\n")

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        _append(self._file, self._size, line)
        self._size += len(line)
        if self._lost:
            log.warning("requests are recorded again, %d lines were lost", self._lost, extra={"file": str(self._path)})
            self._lost = 0


class _Prompt(NamedTuple):
    number: int
    t: float
    tokens: int
    keys: Sequence[bytes]
    parts: Sequence[Buffer]
    scope: bytes


class _Mark(NamedTuple):
    keys: Sequence[bytes]
    label: int


class _End(NamedTuple):
    number: int
    output: int
    busy: float


def _append(file: io.FileIO, size: int, line: bytes) -> None:
    """Write a line at the end of a file of ``size`` bytes; half a line is taken back. Raises OSError."""
    try:
        if file.write(line) == len(line):
            return
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as raised:
        error = raised
    file.truncate(size)
    file.seek(size)
    raise error


def _hash(data: bytes, secret: bytes) -> bytes:
    """63 bits, so that it is a whole number ≥ 0 in an int64."""
    digest = blake2b(data, digest_size=_HASH_BYTES, key=secret).digest()
    return bytes((digest[0] & 0x7F,)) + digest[1:]
