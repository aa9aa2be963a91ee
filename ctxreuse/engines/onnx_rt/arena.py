"""Memory for K and V that a graph reads as past and appends to as present: contexts stand side by side in a buffer."""

from __future__ import annotations

import heapq
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import onnxruntime as ort

from ctxreuse import kernels
from ctxreuse.dtypes import BITS
from ctxreuse.engines.base import Logits
from ctxreuse.engines.kept import kept_bytes
from ctxreuse.engines.onnx_rt.model import GraphPart, OnnxModel
from ctxreuse.engines.rows import Bits
from ctxreuse.identity.keys import Tokens

__all__ = ["DeviceArena", "HostArena", "KvPool", "KvSlot", "neighbours"]

#: Least tokens that a slot has room for; larger ones double.
_LEAST = 256
#: Contexts side by side at most, and bytes of address space for them; what nobody writes to takes no memory.
_SLOTS, _SPAN = 8, 1 << 30
#: Bytes of free slots that are kept in a device's memory.
_DEVICE_KEEP = 256 << 20
_HUGE = 2 << 20
#: A buffer starts at a multiple of this, as pages are.
_ALIGN = mmap.PAGESIZE


class _Arena(Protocol):
    """Buffers of all layers, [slots, heads, capacity, dim]."""

    capacity: int
    slots: int
    #: Slots that are free, as a heap: the lowest first, so that contexts stand side by side.
    free: list[int]

    def rows(self, slot: int, at: tuple[int, str]) -> Bits:
        """K or V of a layer in a slot as bits, [heads, capacity, dim]; maybe a copy."""
        ...

    def put(self, slot: int, at: tuple[int, str], rows: Bits) -> None:
        """Take back what `rows` gave and the caller changed."""
        ...

    def binding(self, slot: int, count: int, part: GraphPart) -> ort.IOBinding:
        """Past and present of a part's layers in ``count`` slots from ``slot`` on."""
        ...

    def release(self, slot: int) -> None:
        """Give the memory of a slot back to the system."""
        ...


class HostArena:
    """Buffers in the machine's memory, which blocks are copied straight into."""

    def __init__(self, model: OnnxModel, capacity: int, slots: int) -> None:
        self._model, self.capacity, self.slots, self.free = model, capacity, slots, list(range(slots))
        self._bindings = weakref.WeakKeyDictionary[GraphPart, dict[tuple[int, int], ort.IOBinding]]()
        size, bits = model.slot_bytes(capacity), BITS[model.dtype]
        starts, total = {}, 0
        for at, nbytes in size.items():
            starts[at] = total
            total += -(-slots * nbytes // _ALIGN) * _ALIGN
        self._mapping = mmap.mmap(-1, total + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._mapping, np.uint8)
        self._start = -whole.ctypes.data % _HUGE
        memory = whole[self._start : self._start + total]
        if min(size.values()) >= _HUGE:  # else a page would be several contexts'
            kernels.advise_hugepages(memory)
        self._places = {at: (starts[at], nbytes) for at, nbytes in size.items()}
        self._planes = {
            at: memory[start : start + slots * nbytes].view(bits).reshape(slots, model.heads[at], capacity, model.dim)
            for at, (start, nbytes) in self._places.items()
        }

    def rows(self, slot: int, at: tuple[int, str]) -> Bits:
        """See `_Arena.rows`: in place."""
        plane: Bits = self._planes[at][slot]
        return plane

    def put(self, slot: int, at: tuple[int, str], rows: Bits) -> None:
        """See `_Arena.put`: nothing is to be done."""

    def binding(self, slot: int, count: int, part: GraphPart) -> ort.IOBinding:
        """See `_Arena.binding`."""
        bindings = self._bindings.setdefault(part, {})
        found = bindings.get((slot, count))
        if found is None:
            found = bindings[slot, count] = part.session.io_binding()
            for at, (past, present) in self._model.names_of(part):
                planes = self._planes[at][slot : slot + count]
                where = "cpu", 0, self._model.number, planes.shape, planes.ctypes.data
                found.bind_input(past, *where)
                found.bind_output(present, *where)
        return found

    def release(self, slot: int) -> None:
        """See `_Arena.release`."""
        for start, nbytes in self._places.values():
            self._mapping.madvise(mmap.MADV_DONTNEED, self._start + start + slot * nbytes, nbytes)


class DeviceArena:
    """Buffers of one context on another device; rows are copied there and back."""

    def __init__(self, model: OnnxModel, capacity: int) -> None:
        self._model, self.capacity, self.slots, self.free = model, capacity, 1, [0]
        self._bindings = weakref.WeakKeyDictionary[GraphPart, ort.IOBinding]()
        self._values = {
            at: ort.OrtValue.ortvalue_from_shape_and_type(
                (1, model.heads[at], capacity, model.dim), model.number, model.device, 0
            )
            for at in model.names
        }

    def rows(self, slot: int, at: tuple[int, str]) -> Bits:
        """See `_Arena.rows`: a copy."""
        copy = np.array(self._values[at].numpy()[slot])
        return copy.view(BITS[self._model.dtype])

    def put(self, slot: int, at: tuple[int, str], rows: Bits) -> None:
        """See `_Arena.put`."""
        self._values[at].update_inplace(rows[None].view(self._values[at].numpy().dtype))

    def binding(self, slot: int, count: int, part: GraphPart) -> ort.IOBinding:
        """See `_Arena.binding`."""
        found = self._bindings.get(part)
        if found is None:
            found = self._bindings[part] = part.session.io_binding()
            for at, (past, present) in self._model.names_of(part):
                found.bind_ortvalue_input(past, self._values[at])
                found.bind_ortvalue_output(present, self._values[at])
        return found

    def release(self, slot: int) -> None:
        """See `_Arena.release`: it goes with the arena."""


class KvSlot:
    """K and V of one context: room for ``capacity`` tokens, back in the pool when the last reference is dropped."""

    def __init__(self, model: OnnxModel, arena: _Arena, index: int, pool: KvPool) -> None:
        self._model, self.arena, self.index = model, arena, index
        self.capacity, self.nbytes = arena.capacity, pool.nbytes(arena.capacity)
        weakref.finalize(self, pool.put, arena, index).atexit = False

    def rows(self, layer: int, role: str) -> Bits:
        """K or V of a layer as bits, [heads, capacity, dim]; `put` them back when they were changed."""
        return self.arena.rows(self.index, (layer, role))

    def put(self, layer: int, role: str, rows: Bits) -> None:
        """Take back what `rows` gave and the caller changed."""
        self.arena.put(self.index, (layer, role), rows)

    def copy(self, other: KvSlot, count: int) -> None:
        """Take the first ``count`` rows of another."""
        for at in self._model.names:
            mine = self.rows(*at)
            mine[:, :count] = other.rows(*at)[:, :count]
            self.put(*at, mine)

    def compute(self, ids: Tokens, at: int, rows: int = 1) -> Logits:
        """Append tokens from position ``at`` on; the logits after the last ``rows``. Raises EngineError."""
        logits: Logits = self._model.run(self.bind(), ids[None], [at], rows)[0]
        return logits

    def bind(self, count: int = 1) -> Callable[[GraphPart], ort.IOBinding]:
        """What binds past and present of a part's layers in this slot and those behind it, ``count`` in all."""
        return partial(self.arena.binding, self.index, count)


class KvPool:
    """All slots of a model. Thread-safe."""

    def __init__(self, model: OnnxModel) -> None:
        self._model, self._arenas = model, list[_Arena]()
        self._kept: set[tuple[_Arena, int]] = set()  # free slots whose pages are kept
        self._keep = kept_bytes() if model.device == "cpu" else _DEVICE_KEEP
        self._returned: deque[tuple[_Arena, int]] = deque()
        self._lock = threading.Lock()

    def lease(self, tokens: int) -> KvSlot:
        """Room for ``tokens``, beside other contexts of about that length if there is a place."""
        capacity = _LEAST
        while capacity < tokens:
            capacity *= 2
        with self._lock:
            self._take_back()
            for arena in self._arenas:
                if arena.capacity == capacity and arena.free:
                    break
            else:
                arena = self._new(capacity)
                self._arenas.append(arena)
            slot = heapq.heappop(arena.free)
            self._kept.discard((arena, slot))
        return KvSlot(self._model, arena, slot, self)

    def _new(self, capacity: int) -> _Arena:
        if self._model.device != "cpu":
            return DeviceArena(self._model, capacity)
        most = _SLOTS if self._model.batches else 1
        return HostArena(self._model, capacity, max(1, min(most, _SPAN // self.nbytes(capacity))))

    def put(self, arena: _Arena, slot: int) -> None:
        """Take a slot back; beyond what is kept, its memory goes to the system."""
        self._returned.append((arena, slot))
        # A finalizer may run on a thread that is inside lease(), which takes it back then, or the next one does.
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            arena, slot = self._returned.popleft()
            heapq.heappush(arena.free, slot)
            kept = sum(self.nbytes(one.capacity) for one, _ in self._kept)
            if kept + self.nbytes(arena.capacity) <= self._keep:
                self._kept.add((arena, slot))
            elif arena.slots == 1:
                self._arenas.remove(arena)
            else:
                arena.release(slot)

    def nbytes(self, capacity: int) -> int:
        """Bytes of one context with room for ``capacity`` tokens."""
        return sum(self._model.slot_bytes(capacity).values())


T = TypeVar("T")


def neighbours(batch: Sequence[T], slot_of: Callable[[T], KvSlot]) -> Iterator[list[T]]:
    """Cut what is to decode into runs of neighbouring slots."""
    run: list[T] = []
    for one in sorted(batch, key=lambda one: (id(slot_of(one).arena), slot_of(one).index)):
        slot = slot_of(one)
        if run and (slot.arena is not slot_of(run[-1]).arena or slot.index != slot_of(run[-1]).index + 1):
            yield run
            run = []
        run.append(one)
    if run:
        yield run
