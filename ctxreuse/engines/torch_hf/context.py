"""One context in the memory of the torch engine: its cache, its token ids, its snapshots of states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ctxreuse.engines.chunks import Role
from ctxreuse.engines.early import PendingRow
from ctxreuse.engines.imports import Import
from ctxreuse.engines.provenance import LevelRun, Provenance
from ctxreuse.engines.torch_hf.cache import states
from ctxreuse.engines.torch_hf.cache.arena import Lease, Pool
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer, WindowLayer
from ctxreuse.engines.torch_hf.cache.states import Snapshot
from ctxreuse.engines.torch_hf.inplace.attention import InPlaceLayer
from ctxreuse.errors import EngineError, FormatError, LinkError
from ctxreuse.exits import ExitRow
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse.inplace import AttachedRun, InPlaceRuns, Selection
from ctxreuse.rope import Rotary

__all__ = ["TorchContext"]

#: The least capacity, in tokens, of a new arena.
_LEAST = 256


class TorchContext:
    """See `ctxreuse.engines.base.Context`. Made by the engine only; all its changes go through the engine."""

    #: Newest snapshots kept, and how many of those that runs shorter than a block leave: a generation of one block is
    #: then always inside two of them, and a long one does not push out requested ones.
    KEEP_STATES, KEEP_PASSING = 12, 2

    def __init__(self, cache: DynamicCache, pool: Pool, limit: int, reserve: int) -> None:
        self.place = pool.place
        self.cache = cache
        self.broken = ""  # why the context cannot be used any more
        self.snapshots: dict[int, Snapshot] = {}
        self._passing: set[int] = set()
        self.run_start: int | None = None  # where a run began of which some tokens are still to come
        self.loading: Import | None = None
        self.provenance = Provenance()
        self._pool, self._limit = pool, limit
        self._ids = np.zeros(0, "<i4")
        self._n = 0
        self.lease: Lease | None = None
        #: The last tokens, if they left the model early, and what became of those that were completed since.
        self.pending, self.completed = list[PendingRow](), list[ExitRow]()
        self.in_place: InPlaceRuns | None = None
        #: The attached runs are this context's own rows, quantised.
        self.compressed = False
        self.arena_layers = [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, ArenaLayer)]
        self.windows = [layer for layer in cache.layers if isinstance(layer, WindowLayer)]
        self.reserve(max(reserve, min(_LEAST, limit)))

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
        """Positions of the snapshots, ascending."""
        return tuple(sorted(self.snapshots))

    @property
    def levels(self) -> tuple[LevelRun, ...]:
        """See `ctxreuse.engines.base.Context.levels`."""
        return self.provenance.runs(self._n)

    @property
    def relocated(self) -> tuple[tuple[int, int], ...]:
        """See `ctxreuse.engines.chunks.RelocatedContext.relocated`."""
        return self.provenance.relocated

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """See `ctxreuse.engines.chunks.RelocatedContext.gaps`."""
        return self.provenance.gaps

    @property
    def nbytes(self) -> int:
        """Bytes of rows, windows and snapshots; attached runs are counted if no other context can share them."""
        arena = self.lease.arena.nbytes if self.lease else 0
        if self.compressed and self.in_place is not None:
            arena += self.in_place.nbytes
        return arena + sum(w.nbytes for w in self.windows) + sum(s.nbytes for s in self.snapshots.values())

    def __repr__(self) -> str:
        return f"TorchContext(n={self._n}, nbytes={self.nbytes}, states={self.states})"

    def check_usable(self) -> None:
        """Raise EngineError if an earlier failure left the context without a valid cache."""
        if self.broken:
            raise EngineError(f"the context cannot be used: {self.broken}", fix="Start a new one")

    def check_filled(self) -> None:
        """Raise EngineError if the context has gaps."""
        if self.gaps:
            raise EngineError(f"the context has gaps at {list(self.gaps)[:4]}", fix="recompute_rows() must fill them")

    def check_attended(self) -> None:
        """After a forward: raise EngineError if the model did not attend to attached runs."""
        for _, layer in self.arena_layers:
            if layer.in_place is not None:
                layer.in_place.check_attended()

    def reserve(self, n: int, recomputed: int = 0) -> None:
        """Have capacity for ``n`` tokens; it doubles, so that appending stays linear in time.

        ``recomputed``: rows before the context's end that will be computed and may lie in attached runs now.
        """
        self.reserve_ids(n)
        if self.in_place is not None:
            n = self.in_place.rows + max(n - self._n, 0) + recomputed
        if not self.arena_layers or (self.lease and self.lease.arena.capacity >= n):
            return
        if self.loading is not None:
            self.loading.wait()  # its jobs write to the arena they were made for
        old = self.lease.arena.capacity if self.lease else 0
        lease = self._pool.lease(min(max(n, 2 * old), max(self._limit, n)))
        for index, layer in self.arena_layers:
            layer.bind(lease.arena.k[index], lease.arena.v[index])
        self.lease = lease

    def reserve_ids(self, n: int) -> None:
        """Have room for the ids of ``n`` tokens."""
        if len(self._ids) < n:
            grown = np.zeros(min(max(n, 2 * len(self._ids)), max(self._limit, n)), "<i4")
            grown[: self._n] = self._ids[: self._n]
            self._ids = grown

    def adopt(self, lease: Lease) -> None:
        """Use an arena that holds the context's rows."""
        for index, layer in self.arena_layers:
            layer.adopt(lease.arena.k[index], lease.arena.v[index], self._n)
        self.lease = lease

    def replace_rows(self, rotaries: Mapping[int, Rotary], runs: Sequence[AttachedRun]) -> None:
        """Have all rows in these runs, which cover the context, and none in an arena."""
        self.in_place, self.compressed, self.lease = InPlaceRuns(0), True, None
        for run in runs:
            self.in_place.attach(run)
        for index, layer in self.arena_layers:
            layer.unbind()
            layer.in_place = InPlaceLayer(self.in_place, index, rotaries[index], self._n, self.place.launcher)

    def lease_rows(self) -> Lease:
        """Lease another arena for all tokens, beside what the context has."""
        self.reserve(self._n)  # its own rows can be read then, even if there are none
        return self._pool.lease(self._n)

    def lies_in_runs(self, start: int, end: int) -> bool:
        """True if some of these positions lie in attached runs."""
        return self.in_place is not None and self.in_place.covers(start, end)

    def become_plain(self, lease: Lease) -> None:
        """Use an arena that holds all rows, and no run."""
        self.in_place, self.compressed = None, False
        for _, layer in self.arena_layers:
            layer.in_place = None
        self.adopt(lease)

    def become(self, other: TorchContext, lease: Lease | None) -> None:
        """Be what another context is; ``lease``: an arena with its rows. This one is empty and has capacity."""
        self._ids[: other.n] = other.tokens
        self._n = other.n
        self.provenance = deepcopy(other.provenance)
        if lease is not None:
            self.adopt(lease)
        if self.windows or any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers):
            states.restore(self.cache, states.capture(other.cache, other.n))
        self.snapshots, self._passing = dict(other.snapshots), set(other._passing)

    def append(self, ids: Tokens) -> None:
        """Count tokens as processed; the layers hold them already."""
        self._ids[self._n : self._n + len(ids)] = ids
        self._n += len(ids)

    def truncate(self, n: int) -> None:
        """End ids and K/V at position ``n``; states are the caller's business."""
        if n < self._n:
            self._ids = self._ids.copy()  # views given out keep their contents
        self._n = n
        self.provenance.crop(n)
        kept = self.in_place.crop(n) if self.in_place is not None else None
        for _, layer in self.arena_layers:
            if kept is not None:
                layer.keep(torch.from_numpy(kept))
            layer.resize(min(n if self.in_place is None else self.in_place.rows, layer.length))
            if layer.in_place is not None:
                layer.in_place.restart(n)
        if self.in_place is not None and self.in_place.plain:
            self.in_place, self.compressed = None, False
            for _, layer in self.arena_layers:
                layer.in_place = None

    def attach_runs(
        self, n: int, rotaries: Mapping[int, Rotary], runs: Sequence[AttachedRun], selection: Selection | None
    ) -> None:
        """Extend the context to ``n`` positions (its ids follow), with runs at theirs."""
        if self.in_place is None:
            self.in_place = InPlaceRuns(self._n)
            for index, layer in self.arena_layers:
                layer.in_place = InPlaceLayer(self.in_place, index, rotaries[index], self._n, self.place.launcher)
        self.in_place.selection = selection
        for run in runs:
            self.in_place.attach(run)
        for _, layer in self.arena_layers:
            assert layer.in_place is not None
            layer.in_place.restart(n)

    @contextmanager
    def restored(self, layer: int, positions: npt.NDArray[np.int64]) -> Iterator[None]:
        """Restore the layers below ``layer`` afterwards: inside, rows at ``positions`` and new ones may be written."""
        below = [one for index, one in self.arena_layers if index < layer]
        rows = torch.from_numpy(positions if self.in_place is None else self.in_place.own(positions))
        rows = rows.to(below[0].keys.device) if below else rows
        before = [(one.keys.index_select(2, rows), one.values.index_select(2, rows)) for one in below]
        try:
            with self.in_place.restored() if self.in_place is not None else nullcontext():
                yield
        finally:
            for one, (keys, values) in zip(below, before):
                one.keys.index_copy_(2, rows, keys)
                one.values.index_copy_(2, rows, values)
                one.resize(self._n if self.in_place is None else self.in_place.rows)
                if one.in_place is not None:
                    one.in_place.restart(self._n)

    def read(self, layer: int, role: Role, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """K or V [heads, n, dim] of a layer at ``positions``, K as rotated there."""
        own = dict(self.arena_layers)[layer]
        plane = own.keys if role == "k" else own.values
        if own.in_place is not None:
            return own.in_place.read(role, positions, plane)
        rows: npt.NDArray[np.float32] = plane[0, :, torch.from_numpy(positions)].float().cpu().numpy()
        return rows

    def row_of(self, start: int, end: int) -> int:
        """The first of the arena's rows that hold ``start`` to ``end``; EngineError if a run is attached there."""
        found = start if self.in_place is None else self.in_place.row_of(start, end)
        if found < 0:
            raise EngineError(f"tokens {start} to {end} lie in an attached run, so they are no block of this context")
        return found

    def take_snapshot(self, position: int, *, passing: bool = False) -> None:
        """Keep the states at ``position``; ``passing``: they were not requested there."""
        if any(window.short(position) for window in self.windows):
            return  # not a state that could be loaded
        self.keep_snapshot(states.capture(self.cache, position, self.provenance.level_at(position)), passing=passing)

    def keep_snapshot(self, snapshot: Snapshot, *, passing: bool = False) -> None:
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

    def begin_load(self, loading: Import) -> None:
        """Make every layer wait for its part of a load before it is used."""
        self.loading = loading
        for index, layer in self.arena_layers:
            layer.ready = partial(loading.ensure, index)  # type: ignore[method-assign]

    def wait_load(self) -> None:
        """Return when no load is in flight; raises what `Loading.wait` raises."""
        if self.loading is not None:
            self.loading.wait()

    def abandon_load(self) -> None:
        """After a failure: return when no load reads its views any more; their owner may free them then."""
        with suppress(FormatError, LinkError, EngineError):
            self.wait_load()

    def finish_load(self) -> None:
        """Forget a load that is complete, so that its views are no longer referred to."""
        if self.loading is not None and self.loading.done:
            self.loading = None
            for _, layer in self.arena_layers:
                del layer.ready

    def check(self) -> None:
        """Raise AssertionError if ids, layers and snapshots do not agree."""
        assert self._n <= min(len(self._ids), self._limit)
        rows = self._n
        if self.in_place is not None:
            self.in_place.check(self._n)
            rows = self.in_place.rows
        for index, layer in self.arena_layers:
            rest = sum(row.depth <= index for row in self.pending)
            assert layer.length == rows - rest, (
                f"layer {index} holds {layer.length} tokens of {rows}, {rest} left early"
            )
            assert layer.in_place is None or layer.in_place.n == self._n, "attached runs end elsewhere"
        for window in self.windows:
            assert window.cumulative_length == self._n, "a window ends elsewhere"
            assert window.holds(self._n), "a window is not whole"
        assert all(0 < position <= self._n for position in self.snapshots), "a snapshot is beyond the end"
        assert len(self.snapshots) <= self.KEEP_STATES
