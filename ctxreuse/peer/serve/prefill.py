"""Prefills for peers: the interface that computes them, and jobs that several peers may share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import block_layout, parse
from ctxreuse.bus.protocol.base import EncodableSource
from ctxreuse.bus.transfer.receive import part_offsets
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["DISPLACED", "PrefillJob", "PrefillSink", "PrefillSource", "Prefiller"]

Sealed = npt.NDArray[np.uint8]
#: Reason for the end of a job that has left the queue because its tenant had more than its share there.
DISPLACED = "other tenants wait, too"


class PrefillSink(Protocol):
    """Where the blocks of a prefill go. Any thread may call; calls of one job are sequential."""

    def block(self, index: int, data: Sealed) -> None:
        """Take the sealed bytes of block ``index`` of the context, ascending without gaps; they must not change."""

    def state(self, data: Sealed) -> None:
        """Take the sealed bytes of the state at the end of the last block."""

    def end(self, reason: str = "") -> None:
        """End the job, as the last call: "" if all has come, else why not."""


class Prefiller(Protocol):
    """Engines that compute for peers. Any thread may call; nothing blocks."""

    @property
    def spaces(self) -> Mapping[bytes, ModelSpace]:
        """What can be computed now, by digest."""

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: PrefillSink, audited: int
    ) -> Callable[[], None] | None:
        """Compute whole blocks of ``tokens`` and give the sink those from ``first`` on, and the state where needed.

        Args:
            space: Digest of the model space.
            salt: Of the keys.
            tokens: int32 [n x block_tokens].
            first: First block for the sink.
            sink: Where blocks go.
            audited: So many leading blocks may be read from the store; others there have not been audited.

        Returns:
            A call that cancels it (idempotent; the sink may still be called), None if too many jobs wait. A job that
            waits may end with `DISPLACED` when other tenants come.
        """


class PrefillJob:
    """One context that is being computed; a `PrefillSink`. Any thread may call.

    ``keep(key, data, is_state)`` is called with each item, in the prefiller's thread. Items stay in memory until the
    last waiting peer leaves.
    """

    def __init__(
        self, space: ModelSpace, keys: Sequence[bytes], first: int, keep: Callable[[bytes, Sealed, bool], None]
    ) -> None:
        self.keys, self.first = tuple(keys), first
        self._space, self._keep = space, keep
        self._lock = threading.Lock()
        self._items: dict[int, memoryview] = {}
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._waiting = 0
        self.ended: str | None = None
        self.cancel: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of planes when complete, without states."""
        return (len(self.keys) - self.first) * block_layout(self._space).nbytes

    def block(self, index: int, data: Sealed) -> None:
        """See `PrefillSink.block`."""
        self._add(index, self.keys[index] if index < len(self.keys) else b"", data, "block")

    def state(self, data: Sealed) -> None:
        """See `PrefillSink.state`."""
        self._add(len(self.keys), self.keys[-1], data, "state")

    def _add(self, item: int, key: bytes, data: Sealed, kind: str) -> None:
        try:
            view = parse(data, space=self._space.digest)
        except FormatError as error:
            self.end(error.what)
            return
        if (view.header.key, view.header.kind) != (key, kind):
            self.end("a worker made something else")
            return
        with self._lock:
            if self.ended is None:
                self._items[item], self._offsets[item] = view.buffer, part_offsets(view)
        # Kept after it can be sent: the store's queue may block this thread.
        self._notify()
        self._keep(key, data, kind == "state")

    def end(self, reason: str = "") -> None:
        """See `PrefillSink.end`."""
        with self._lock:
            whole = len(self.keys) - self.first + self._space.needs_state
            if self.ended is None:
                self.ended = reason or ("" if len(self._items) >= whole else "incomplete")
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    def join(self) -> int | None:
        """Let another peer wait; returns its number, or None if the job was given up."""
        with self._lock:
            if self._waiting < 0 or self.ended:
                return None
            self._waiting += 1
            return next(self._numbers)

    def wake(self, wake: Callable[[], None], who: int) -> None:
        """Have ``wake`` called for peer ``who`` when something has come."""
        with self._lock:
            self._wakes[who] = wake

    def leave(self, who: int) -> bool:
        """End the wait of a peer; returns True if it was the last, and the job is given up."""
        with self._lock:
            self._wakes.pop(who, None)
            self._waiting -= 1
            if self._waiting:
                return False
            self._waiting = -1
            self._items.clear()
            ended, self.ended = self.ended, self.ended or "given up"
        if ended is None and self.cancel is not None:
            self.cancel()
        return True

    def item(self, number: int) -> tuple[memoryview, tuple[int, ...]] | None:
        """Return bytes and offsets of an item, None while it is being made. Raises LookupError if it will not come."""
        with self._lock:
            found = self._items.get(number)
            if found is None and self.ended is not None:
                raise LookupError(self.ended or "not made")
            return (found, self._offsets[number]) if found is not None else None


class PrefillSource(EncodableSource):
    """The blocks from ``first`` on of a context that is being computed, for one peer."""

    def __init__(self, job: PrefillJob, who: int, first: int, state: bool, done: Callable[[], None]) -> None:
        """``done`` is called if this was the last peer to wait for it."""
        self._job, self._who, self._first, self._done = job, who, first, done
        self.count = len(job.keys) - first + state
        self._closed = False

    def parts(self, item: int) -> tuple[int, ...] | None:
        """See `BlockSource.parts`."""
        found = self._job.item(item + self._first)
        return found[1] if found is not None else None

    def read(self, item: int, start: int, stop: int) -> memoryview:
        """See `BlockSource.read`."""
        found = self._job.item(item + self._first)
        if found is None:
            raise LookupError("not made yet")
        return found[0][start:stop]

    def allow(self, levels: Container[str]) -> None:
        """See `EncodableSource.allow`; what is computed here is exact."""

    def sealed(self, item: int) -> memoryview:
        """See `EncodableSource.sealed`."""
        return self.read(item, 0, 1 << 62)

    def watch(self, wake: Callable[[], None]) -> None:
        """See `BlockSource.watch`."""
        self._job.wake(wake, self._who)

    def close(self) -> None:
        """See `BlockSource.close`."""
        if not self._closed:
            self._closed = True
            if self._job.leave(self._who):
                self._done()
