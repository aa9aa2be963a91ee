"""Memory for K and V: one huge-page mapping, or piece of a device's memory, a context, from a small pool."""

from __future__ import annotations

import mmap
import os
import threading
import weakref

import torch

from ctxreuse import kernels
from ctxreuse.engines.kept import kept_bytes
from ctxreuse.engines.torch_hf.devices import HOST, TorchDevice, device_errors
from ctxreuse.engines.torch_hf.modes import normal
from ctxreuse.errors import EngineError

__all__ = ["Arena", "Lease", "Pool", "SharedRows", "forked"]

_HUGE = 2 << 20
#: A plane starts at a multiple of this in its arena, as torch's own allocations do; kernels then take the same path.
_ALIGN = 64
#: Bytes of unused arenas that are kept in a device's memory.
_DEVICE_KEEP = 256 << 20

#: Tokens. In steps, so that a context serves the next one that is a little longer: new pages cost more than copying
#: into them does (94 MB: 0.1 s, against 0.01 s into pages that are there).
_STEP = 256

#: (layer, heads, width of K, width of V) of each layer that keeps K and V of all tokens.
Shape = tuple[tuple[int, int, int, int], ...]


def _stepped(capacity: int) -> int:
    return -(-capacity // _STEP) * _STEP


class Arena:
    """Room for ``capacity`` tokens: ``k[layer]`` and ``v[layer]``, [1, heads, capacity, dim], of full-attention layers.

    Heads are outermost, as attention reads them: appending a token writes one row a head and moves nothing.
    """

    # Made when memory is needed, maybe in the middle of a forward: it must be writable outside of inference mode too.
    @normal
    def __init__(
        self, shape: Shape, dtype: torch.dtype, capacity: int, file: SharedRows | None = None, place: TorchDevice = HOST
    ) -> None:
        """``file``: what it holds at first; written pages become its own. None: anything."""
        self.capacity, self.shape, self.dtype, self.place = capacity, shape, dtype, place
        sizes = [heads * capacity * width * dtype.itemsize for _, heads, *widths in shape for width in widths]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        self.nbytes = total
        if place.apart:
            with device_errors(place):
                self._memory = torch.empty(max(total, 1), dtype=torch.uint8, device=place.device)
        else:
            self._memory = _map(total) if file is None else file.map(total)
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        room = iter(zip(starts, sizes))
        for layer, heads, k_dim, v_dim in shape:
            for role, width in ((self.k, k_dim), (self.v, v_dim)):
                at, size = next(room)
                role[layer] = self._memory[at : at + size].view(dtype).view(1, heads, capacity, width)

    def populate(self) -> None:
        """Touch every page now, so that no request waits for the system to clear it."""
        if self.place.apart:
            return
        kernels.advise_hugepages(self._memory.numpy(), populate=True)
        self._memory[:: mmap.PAGESIZE] = 0  # what is no whole huge page, and systems without them


class SharedRows:
    """A file in memory that arenas of one shape and capacity begin with, without copying it. Close it when they are
    made: they keep it.

    Its pages are small ones, and an arena gets a copy of each page that it writes to.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("ctxreuse-rows")
        self._kind = mmap.MAP_SHARED

    def map(self, size: int) -> torch.Tensor:
        """uint8 [size] of the file: written through by the first, later ones see what it wrote until now."""
        if self._kind == mmap.MAP_SHARED:
            os.truncate(self._file, max(size, 1))
        memory = mmap.mmap(self._file, max(size, 1), self._kind)
        self._kind = mmap.MAP_PRIVATE
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]

    def close(self) -> None:
        """Make no further arenas."""
        os.close(self._file)


def forked(arena: Arena, rows: int, capacity: int, count: int) -> list[Arena]:
    """Return ``count`` arenas for ``capacity`` tokens that hold the first ``rows`` rows of one.

    They share the pages of these rows where the system can; then all but the first count without them.
    """
    capacity, place = _stepped(capacity), arena.place
    shared = SharedRows() if hasattr(os, "memfd_create") and not place.apart else None
    try:
        first = Arena(arena.shape, arena.dtype, capacity, shared, place)
        for old, new in ((arena.k, first.k), (arena.v, first.v)):
            for layer, plane in old.items():
                new[layer][:, :, :rows] = plane[:, :, :rows]
        if shared is None:
            others = [Arena(arena.shape, arena.dtype, capacity, place=place) for _ in range(count - 1)]
            for other in others:
                other._memory[:] = first._memory
            return [first, *others]
        found = [Arena(arena.shape, arena.dtype, capacity, shared) for _ in range(count)]
    finally:
        if shared is not None:
            shared.close()
    for other in found[1:]:
        other.nbytes -= other.nbytes // capacity * rows
    return found


def _map(size: int) -> torch.Tensor:
    """uint8 [size] of anonymous memory, from a 2 MiB boundary, advised to huge pages where the system has them."""
    whole = torch.frombuffer(mmap.mmap(-1, max(size, 1) + _HUGE), dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    memory = whole[start : start + size]
    kernels.advise_hugepages(memory.numpy())
    return memory


class Lease:
    """The right to use an arena, which goes back when the last holder (context or load in flight) drops it."""

    __slots__ = ("__weakref__", "arena")

    def __init__(self, arena: Arena, pool: Pool | None) -> None:
        """``pool``: None: the arena is used once."""
        self.arena = arena
        if pool is not None:
            weakref.finalize(self, pool.put, arena).atexit = False


class Pool:
    """Unused arenas, kept because their pages are mapped already. Thread-safe.

    At most ``keep`` bytes stay; what goes beyond is given back to the system, the smallest arena first.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, keep: int | None = None, place: TorchDevice = HOST) -> None:
        """``keep``: None for what suits the place."""
        self._shape, self._dtype, self.place = shape, dtype, place
        self._keep = keep if keep is not None else _DEVICE_KEEP if place.apart else kept_bytes()
        self._free: list[Arena] = []
        # Re-entrant: a finalizer may run put() on a thread that is inside lease().
        self._lock = threading.RLock()

    def reserve(self, capacity: int) -> None:
        """Make an arena of ``capacity`` tokens, its pages touched, and keep it whatever ``keep`` said before."""
        arena = Arena(self._shape, self._dtype, _stepped(capacity), place=self.place)
        arena.populate()
        with self._lock:
            self._keep = max(self._keep, 2 * arena.nbytes)
        self.put(arena)

    def lease(self, capacity: int) -> Lease:
        """An arena for at least ``capacity`` tokens: the smallest free one, else a new one of the next whole size."""
        capacity = _stepped(capacity)
        with self._lock:
            fit = min((a for a in self._free if a.capacity >= capacity), key=lambda a: a.capacity, default=None)
            if fit is not None:
                self._free.remove(fit)
        return Lease(fit or self._made(capacity), self)

    def _made(self, capacity: int) -> Arena:
        try:
            return Arena(self._shape, self._dtype, capacity, place=self.place)
        except EngineError:  # a device's memory; what is kept here is some of it
            with self._lock:
                if not self._free:
                    raise
                self._free.clear()
            return Arena(self._shape, self._dtype, capacity, place=self.place)

    def put(self, arena: Arena) -> None:
        """Take an arena back."""
        with self._lock:
            self._free.append(arena)
            self._free.sort(key=lambda a: a.capacity)
            while self._free and sum(a.nbytes for a in self._free) > self._keep:
                self._free.pop(0)

    @property
    def nbytes(self) -> int:
        """Bytes in unused arenas."""
        with self._lock:
            return sum(a.nbytes for a in self._free)

    def check(self) -> None:
        """Raises AssertionError if an arena is in the pool twice or the pool holds more than it may."""
        with self._lock:
            assert len({id(a) for a in self._free}) == len(self._free), "an arena is in the pool twice"
            assert self.nbytes <= self._keep, f"{self.nbytes} bytes are kept, the limit is {self._keep}"
