"""Computing blocks for peers: who computes, and a context in the making that several peers may wait for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block import block_layout, parse
from ctxreuse.bus.transfer import part_offsets
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace

__all__ = ["Making", "MakingSupply", "Prefiller", "Sink"]

Sealed = npt.NDArray[np.uint8]


class Sink(Protocol):
    """Where a prefill's blocks go. Any thread may call; calls of one job come one after another."""

    def block(self, index: int, data: Sealed) -> None:
        """Sealed bytes of block ``index`` of the context, ascending without gaps; memory that nobody changes."""
        ...

    def state(self, data: Sealed) -> None:
        """Sealed bytes of the state at the end of the last block."""
        ...

    def end(self, reason: str = "") -> None:
        """Nothing more comes; empty if all has come, else why not. The last call."""
        ...


class Prefiller(Protocol):
    """Engines that compute for peers. Any thread may call; nothing here blocks."""

    @property
    def spaces(self) -> Mapping[bytes, ModelSpace]:
        """What can be computed now, by digest."""
        ...

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: Sink, held: int
    ) -> Callable[[], None] | None:
        """Compute whole blocks of ``tokens`` int32 [n x block_tokens], with keys of ``salt``, and give the sink those
        from ``first`` on, and the state at their end where the space needs it. The first ``held`` of them may be taken
        from the store; whatever else lies there has not been audited.

        Returns how to give it up (idempotent; the sink may still be called), or None if too many wait already.
        """
        ...


class Making:
    """One context in the making; a `Sink`. Any thread may call.

    ``keep(key, data, is_state)`` is called with each item as it comes, in the maker's thread. Items stay in memory
    until the last peer that waits for them has let go.
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
        """Bytes of planes that it will hold in the end, without states."""
        return (len(self.keys) - self.first) * block_layout(self._space).nbytes

    def block(self, index: int, data: Sealed) -> None:
        """See `Sink.block`."""
        self._add(index, self.keys[index] if index < len(self.keys) else b"", data, "block")

    def state(self, data: Sealed) -> None:
        """See `Sink.state`."""
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
        # Kept after it can be sent: the store's queue may make the maker wait.
        self._tell()
        self._keep(key, data, kind == "state")

    def end(self, reason: str = "") -> None:
        """See `Sink.end`."""
        with self._lock:
            whole = len(self.keys) - self.first + self._space.needs_state
            if self.ended is None:
                self.ended = reason or ("" if len(self._items) >= whole else "incomplete")
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    def join(self) -> int | None:
        """Another peer waits; its number, or None if this one was given up."""
        with self._lock:
            if self._waiting < 0 or self.ended:
                return None
            self._waiting += 1
            return next(self._numbers)

    def wake(self, wake: Callable[[], None], who: int) -> None:
        """Call ``wake`` for peer ``who`` when something has come."""
        with self._lock:
            self._wakes[who] = wake

    def leave(self, who: int) -> bool:
        """A peer waits no more; True if it was the last, and the making is given up."""
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
        """Bytes and offsets of an item; None while it is being made. LookupError if it will not come."""
        with self._lock:
            found = self._items.get(number)
            if found is None and self.ended is not None:
                raise LookupError(self.ended or "not made")
            return (found, self._offsets[number]) if found is not None else None


class MakingSupply:
    """See `ctxreuse.bus.base.Encodable`: the blocks from ``first`` on of a context in the making, for one peer."""

    def __init__(self, making: Making, who: int, first: int, state: bool, done: Callable[[], None]) -> None:
        """``done`` is called if this was the last peer to wait for it."""
        self._making, self._who, self._first, self._done = making, who, first, done
        self.count = len(making.keys) - first + state
        self._closed = False

    def parts(self, item: int) -> tuple[int, ...] | None:
        """See `Supply.parts`."""
        found = self._making.item(item + self._first)
        return found[1] if found is not None else None

    def read(self, item: int, start: int, stop: int) -> memoryview:
        """See `Supply.read`."""
        found = self._making.item(item + self._first)
        if found is None:
            raise LookupError("not made yet")
        return found[0][start:stop]

    def allow(self, levels: Container[str]) -> None:
        """See `Encodable.allow`; what is computed here is exact."""

    def sealed(self, item: int) -> memoryview:
        """See `Encodable.sealed`."""
        return self.read(item, 0, 1 << 62)

    def watch(self, wake: Callable[[], None]) -> None:
        """See `Supply.watch`."""
        self._making.wake(wake, self._who)

    def close(self) -> None:
        """See `Supply.close`."""
        if not self._closed:
            self._closed = True
            if self._making.leave(self._who):
                self._done()
