"""One context in the memory of the torch engine: its cache, its token ids, its snapshots of states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ctxreuse.engines.moving import Role
from ctxreuse.engines.provenance import Provenance, Run
from ctxreuse.engines.torch_hf import states
from ctxreuse.engines.torch_hf.arena import Lease, Pool
from ctxreuse.engines.torch_hf.inplace import Beside
from ctxreuse.engines.torch_hf.layers import ArenaLayer, WindowLayer
from ctxreuse.engines.torch_hf.loading import Import
from ctxreuse.engines.torch_hf.states import Snapshot
from ctxreuse.errors import EngineError, FormatError, LinkError
from ctxreuse.keys import Tokens
from ctxreuse.reuse.attend import HeldMove, Residents, Selection, Turn

__all__ = ["TorchLive"]

#: The least room for tokens in a new arena.
_LEAST = 256


class TorchLive:
    """See `ctxreuse.engines.base.Live`. Made by the engine only; all its changes go through the engine."""

    #: Newest snapshots kept, and how many of those taken in passing, by runs shorter than a block: a generation of one
    #: block is then always inside two of them, and a long one does not cost those that were asked for.
    KEEP_STATES, KEEP_PASSING = 12, 2

    def __init__(self, cache: DynamicCache, pool: Pool, limit: int, reserve: int) -> None:
        self.cache = cache
        self.broken = ""  # why the context cannot be used any more
        self.snapshots: dict[int, Snapshot] = {}
        self._passing: set[int] = set()
        self.loading: Import | None = None
        self.provenance = Provenance()
        self._pool, self._limit = pool, limit
        self._ids = np.zeros(0, "<i4")
        self._n = 0
        self.lease: Lease | None = None
        self.residents: Residents | None = None  # what is attended to in place
        self.arena_layers = [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, ArenaLayer)]
        self.windows = [layer for layer in cache.layers if isinstance(layer, WindowLayer)]
        self.room(max(reserve, min(_LEAST, limit)))

    @property
    def tokens(self) -> Tokens:
        """Ids processed so far, int32 [n]; a read-only view of the context's own buffer."""
        view = self._ids[: self._n]
        view.flags.writeable = False
        return view

    @property
    def n(self) -> int:
        """Number of tokens processed so far."""
        return self._n

    @property
    def states(self) -> tuple[int, ...]:
        """Positions of the snapshots held, ascending."""
        return tuple(sorted(self.snapshots))

    @property
    def levels(self) -> tuple[Run, ...]:
        """See `ctxreuse.engines.base.Live.levels`."""
        return self.provenance.runs(self._n)

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """See `ctxreuse.engines.moving.MovedLive.moved`."""
        return self.provenance.moved

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """See `ctxreuse.engines.moving.MovedLive.gaps`."""
        return self.provenance.gaps

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, the windows, the snapshots and the runs held in place (which others may hold too)."""
        arena = self.lease.arena.nbytes if self.lease else 0
        return arena + sum(w.nbytes for w in self.windows) + sum(s.nbytes for s in self.snapshots.values())

    def __repr__(self) -> str:
        return f"TorchLive(n={self._n}, nbytes={self.nbytes}, states={self.states})"

    def usable(self) -> None:
        """Raises EngineError if an earlier failure left the context without a valid cache."""
        if self.broken:
            raise EngineError(f"the context cannot be used: {self.broken}", fix="Start a new one")

    def filled(self) -> None:
        """Raises EngineError if there are rows that nothing has been computed for."""
        if self.gaps:
            raise EngineError(f"the context has gaps at {list(self.gaps)[:4]}", fix="mend() must compute them first")

    def settle(self) -> None:
        """After a forward: raises EngineError if the model did not attend to what is held in place."""
        for _, layer in self.arena_layers:
            if layer.beside is not None:
                layer.beside.settle()

    def room(self, n: int, again: int = 0) -> None:
        """Have room for ``n`` tokens; grows to twice the capacity, so that appending stays linear in time.

        ``again``: how many tokens before the context's end will be computed, which a run may hold by now.
        """
        if len(self._ids) < n:
            grown = np.zeros(min(max(n, 2 * len(self._ids)), max(self._limit, n)), "<i4")
            grown[: self._n] = self._ids[: self._n]
            self._ids = grown
        if self.residents is not None:
            n = self.residents.rows + max(n - self._n, 0) + again
        if not self.arena_layers or (self.lease and self.lease.arena.capacity >= n):
            return
        if self.loading is not None:
            self.loading.wait()  # its jobs write to the arena they were made for
        old = self.lease.arena.capacity if self.lease else 0
        lease = self._pool.lease(min(max(n, 2 * old), max(self._limit, n)))
        for index, layer in self.arena_layers:
            layer.bind(lease.arena.k[index], lease.arena.v[index])
        self.lease = lease

    def append(self, ids: Tokens) -> None:
        """Count tokens as processed; the layers hold them already."""
        self._ids[self._n : self._n + len(ids)] = ids
        self._n += len(ids)

    def truncate(self, n: int) -> None:
        """Let ids and K/V end at position ``n``; states are the caller's business."""
        if n < self._n:
            self._ids = self._ids.copy()  # views handed out keep their contents
        self._n = n
        self.provenance.crop(n)
        kept = self.residents.crop(n) if self.residents is not None else None
        for _, layer in self.arena_layers:
            if kept is not None:
                layer.keep(torch.from_numpy(kept))
            layer.resize(min(n if self.residents is None else self.residents.rows, layer.length))
            if layer.beside is not None:
                layer.beside.restart(n)
        if self.residents is not None and self.residents.plain:
            self.residents = None
            for _, layer in self.arena_layers:
                layer.beside = None

    def show(self, n: int, turns: Mapping[int, Turn], moves: Sequence[HeldMove], selection: Selection | None) -> None:
        """Let the context have ``n`` positions (its ids follow), with runs where ``moves`` say."""
        if self.residents is None:
            self.residents = Residents(self._n)
            for index, layer in self.arena_layers:
                layer.beside = Beside(self.residents, index, turns[index], self._n)
        self.residents.selection = selection
        for move in moves:
            self.residents.add(move)
        for _, layer in self.arena_layers:
            assert layer.beside is not None
            layer.beside.restart(n)

    @contextmanager
    def tried(self, layer: int, positions: npt.NDArray[np.int64]) -> Iterator[None]:
        """Rows at ``positions``, and new ones, may be written inside, in the layers below ``layer``; all is as before
        afterwards."""
        below = [held for index, held in self.arena_layers if index < layer]
        rows = torch.from_numpy(positions if self.residents is None else self.residents.own(positions))
        before = [(held.keys.index_select(2, rows), held.values.index_select(2, rows)) for held in below]
        try:
            with self.residents.tried() if self.residents is not None else nullcontext():
                yield
        finally:
            for held, (keys, values) in zip(below, before):
                held.keys.index_copy_(2, rows, keys)
                held.values.index_copy_(2, rows, values)
                held.resize(self._n if self.residents is None else self.residents.rows)
                if held.beside is not None:
                    held.beside.restart(self._n)

    def read(self, layer: int, role: Role, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """K or V [heads, n, dim] that a layer holds for ``positions``, K as it stands there."""
        own = dict(self.arena_layers)[layer]
        if own.beside is None:
            held = own.keys if role == "k" else own.values
            rows: npt.NDArray[np.float32] = held[0, :, torch.from_numpy(positions)].float().numpy()
            return rows
        return own.beside.read(role, positions, own.keys if role == "k" else own.values)

    def row(self, start: int, end: int) -> int:
        """The first of the arena's rows that hold ``start`` to ``end``; EngineError if they are held in place."""
        found = start if self.residents is None else self.residents.row(start, end)
        if found < 0:
            raise EngineError(f"tokens {start} to {end} are held in place, so there is no block of them")
        return found

    def snap(self, position: int, *, passing: bool = False) -> None:
        """Keep the states at ``position``; ``passing``: nobody asked for them there."""
        if any(window.short(position) for window in self.windows):
            return  # no state that anybody could load
        self.hold(states.capture(self.cache, position, self.provenance.below(position)), passing=passing)

    def hold(self, snapshot: Snapshot, *, passing: bool = False) -> None:
        """Keep a snapshot, and of all only the newest few."""
        self.snapshots[snapshot.position] = snapshot
        self._passing.discard(snapshot.position)
        if passing:
            self._passing.add(snapshot.position)
        self._passing &= self.snapshots.keys()
        for old in sorted(self._passing)[: -self.KEEP_PASSING]:
            del self.snapshots[old]
        for old in sorted(self.snapshots)[: -self.KEEP_STATES]:
            del self.snapshots[old]

    def attach(self, loading: Import) -> None:
        """Let every layer wait for its part of a load before it is used."""
        self.loading = loading
        for index, layer in self.arena_layers:
            layer.ready = partial(loading.ensure, index)  # type: ignore[method-assign]

    def abandon(self) -> None:
        """After a failure: return when no load reads its views any more; their owner may free them then."""
        if self.loading is not None:
            with suppress(FormatError, LinkError):
                self.loading.wait()

    def detach(self) -> None:
        """Forget a load that is complete, so that its views are no longer referred to."""
        if self.loading is not None and self.loading.done:
            self.loading = None
            for _, layer in self.arena_layers:
                del layer.ready

    def check(self) -> None:
        """Raises AssertionError if ids, layers and snapshots do not agree."""
        assert self._n <= min(len(self._ids), self._limit)
        rows = self._n
        if self.residents is not None:
            self.residents.check(self._n)
            rows = self.residents.rows
        for index, layer in self.arena_layers:
            assert layer.length == rows, f"layer {index} holds {layer.length} tokens of {rows}"
            assert layer.beside is None or layer.beside.n == self._n, "held runs end elsewhere"
        for window in self.windows:
            assert window.cumulative_length == self._n, "a window ends elsewhere"
            assert window.holds(self._n), "a window is not whole"
        assert all(0 < position <= self._n for position in self.snapshots), "a snapshot is beyond the end"
        assert len(self.snapshots) <= self.KEEP_STATES
