"""EngineInPlaceContract: the contract of engines with in-place attention.

::

    class TestMine(EngineInPlaceContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

Its `chunks` are `InPlaceOps`, and it keeps no states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ctxreuse.block.format import BlockView, parse
from ctxreuse.block.levels import EXACT, PACKED
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.engines.chunks import (
    BlockRows,
    InPlaceOps,
    RelocatedContext,
    Relocation,
    RelocationError,
    Role,
    RunFormat,
)
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.kernels.attention import Plane, dequantise
from ctxreuse.reuse.inplace import AttachedRun, CodedSlab, PinnedRun, Slab
from ctxreuse.testing.engine.chunk_contexts import BLOCKS, LEVEL, ChunkContexts, relocations_of
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import continuation, random_tokens

__all__ = ["EngineInPlaceContract", "InPlaceEngine", "rows_of"]


class InPlaceEngine(Engine, Protocol):
    """An engine with in-place operations."""

    @property
    def chunks(self) -> InPlaceOps: ...


def rows_of(views: Sequence[BlockView], first: int, count: int) -> list[BlockRows]:
    """Rows of the tokens ``first`` to ``first + count`` of consecutive blocks."""
    return [BlockRows(move.view, move.row, move.count) for move in relocations_of(views, first, count, 0)]


class EngineInPlaceContract(ChunkContexts):
    """Inherit, and give a fixture ``engine``."""

    #: As `tolerance`, where queries and weights are rounded to 16 bits.
    rounded = 1e-3

    def near(self, a: Sequence[Logits], b: Sequence[Logits], tolerance: float) -> bool:
        """True if the logits differ by rounding only."""
        return all(bool(np.abs(x - y).max() <= tolerance * np.abs(y).max()) for x, y in zip(a, b, strict=True))

    def attached(self, engine: InPlaceEngine, pinned: PinnedRun, ids: Tokens) -> RelocatedContext:
        """A head, then pieces of a run of all of ``ids`` in another order, with a gap of 7 tokens."""
        size = engine.space.block_tokens
        context = self.start(engine, random_tokens(engine, size // 2, seed=1))
        cuts = [(2 * size + 3, size + 5), (size, size), (5, 2), (0, 2 * size - 1)]
        tokens, runs_at, at = list[Tokens](), list[AttachedRun](), context.n
        for first, count in cuts:
            runs_at.append(AttachedRun(at, pinned, first, count))
            tokens.append(ids[first : first + count])
            at += count
            if count == 2:
                tokens.append(random_tokens(engine, 7, seed=2))
                at += 7
        engine.chunks.attach(context, np.concatenate(tokens), runs_at, LEVEL)
        return context

    def gap(self, context: RelocatedContext) -> Tokens:
        """The rows that no run covers."""
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])

    def test_runs_as_stored_say_what_rows_that_were_copied_say(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        pinned = engine.chunks.pin_run(rows_of(views, 0, len(ids)), "stored")
        assert len(pinned) == len(ids)
        context = self.attached(engine, pinned, ids)
        twin = self.start(engine, context.tokens[: context.relocated[0][0]].copy())
        head, at, runs_at = twin.n, twin.n, list[Relocation]()
        size = engine.space.block_tokens
        for first, count in [(2 * size + 3, size + 5), (size, size), (5, 2), (0, 2 * size - 1)]:
            runs_at += relocations_of(views, first, count, at)
            at += count + 7 * (count == 2)
        engine.chunks.insert_rows(twin, context.tokens[head:].copy(), runs_at, LEVEL)
        assert (context.gaps, context.relocated, context.levels) == (twin.gaps, twin.relocated, twin.levels)
        rows = np.union1d(self.gap(context), [head + 2, head + 3, head + size + 9]).astype(np.int32)
        suffix = random_tokens(engine, 5, seed=3)
        ours, theirs = (
            engine.chunks.recompute_rows(context, rows, suffix),
            engine.chunks.recompute_rows(twin, rows, suffix),
        )
        assert (context.gaps, context.relocated, context.levels) == (twin.gaps, twin.relocated, twin.levels)
        assert np.array_equal(context.tokens, twin.tokens)
        assert self.near(continuation(engine, context, ours, 3), continuation(engine, twin, theirs, 3), self.tolerance)

    def test_quantised_runs_are_read_as_what_they_stand_for(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        pinned = engine.chunks.pin_run(rows_of(views, 0, len(ids)), "int8")
        stored = engine.chunks.pin_run(rows_of(views, 0, len(ids)), "stored")
        assert pinned.nbytes < 0.6 * stored.nbytes
        wide = PinnedRun(
            pinned.tokens,
            pinned.at,
            {layer: tuple(_widened(slab) for slab in slabs) for layer, slabs in pinned.layers.items()},
            "widened",
        )
        suffix = random_tokens(engine, 5, seed=3)
        seen = []
        for run in (pinned, wide, stored):
            context = self.attached(engine, run, ids)
            seen.append(
                continuation(engine, context, engine.chunks.recompute_rows(context, self.gap(context), suffix), 0)
            )
        assert self.near(seen[0], seen[1], self.rounded)
        assert self.near(seen[0], seen[2], 0.05)

    def test_deviations_and_attention_are_those_of_rows_that_were_copied(self, engine: InPlaceEngine) -> None:
        _, views = self.source(engine)
        size = engine.space.block_tokens
        head, suffix = random_tokens(engine, size // 2, seed=1), random_tokens(engine, 5, seed=3)
        allowed: dict[RunFormat, float] = {"stored": self.tolerance, "int8": 0.02}
        for format, tolerance in allowed.items():
            pinned = engine.chunks.pin_run(rows_of(views, 3, 3 * size), format)
            context, plain, twin = (self.start(engine, head) for _ in range(3))
            at = context.n + 2
            tokens = np.concatenate([suffix[:2], pinned.tokens])
            for one in (context, twin):
                engine.chunks.attach(one, tokens, [AttachedRun(at, pinned, 0, len(pinned))], LEVEL)
            engine.chunks.insert_rows(plain, tokens, list(relocations_of(views, 3, 3 * size, at)), LEVEL)
            rows = np.array([2, at + 1, at + 5, at + size, context.n - 1], np.int32)
            for layer in sorted({0, max(i for i, spec in enumerate(engine.space.layers) if spec.blocked)}):
                roles: tuple[Role, ...] = ("k", "v")
                for role in roles:
                    ours, theirs = (
                        engine.chunks.deviations(context, rows, layer, role),
                        engine.chunks.deviations(plain, rows, layer, role),
                    )
                    assert np.abs(ours[0] - theirs[0]).max() <= tolerance * theirs[1].max()
                    assert np.abs(ours[1] - theirs[1]).max() <= tolerance * theirs[1].max()
            # Queries of the gap count as well, so both have it.
            last = context.n - (at - 2) + len(suffix)
            probes = [
                engine.chunks.attention(one, rows, suffix, queries=last, layers=len(engine.space.layers))
                for one in (context, plain)
            ]
            assert np.abs(probes[0] - probes[1]).max() <= tolerance * probes[1].max()
            assert (context.gaps, context.relocated, context.n) == (twin.gaps, twin.relocated, twin.n)
            chosen = np.array([*range(at - 2, at), at + 7], np.int32)
            assert np.array_equal(
                engine.chunks.recompute_rows(context, chosen, suffix),
                engine.chunks.recompute_rows(twin, chosen, suffix),
            )
            again = [engine.chunks.deviations(one, rows, 0, "k") for one in (context, twin)]
            assert np.array_equal(again[0], again[1])
            assert np.array_equal(engine.prefill(context, suffix), engine.prefill(twin, suffix))

    def test_recomputing_all_rows_equals_a_whole_prefill(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        context = self.attached(engine, engine.chunks.pin_run(rows_of(views, 0, len(ids)), "int8"), ids)
        tokens, suffix = context.tokens.copy(), random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.new_context(), np.concatenate([tokens, suffix]))
        first = context.relocated[0][0]
        # In two goes: rows that are computed once more, and between others, are where they were.
        odd = np.union1d(np.arange(first, len(tokens), 2), self.gap(context)).astype(np.int32)
        engine.chunks.recompute_rows(context, odd, suffix[:1])
        assert engine.crop(context, len(tokens))
        logits = engine.chunks.recompute_rows(context, np.arange(first, len(tokens), dtype=np.int32), suffix)
        assert self.near([logits], [whole], self.tolerance)
        assert not context.relocated
        assert [run.level for run in context.levels] == [EXACT]

    def test_any_number_of_contexts_show_a_run_at_once(self, engine: InPlaceEngine) -> None:
        _, views = self.source(engine)
        size = engine.space.block_tokens
        pinned = engine.chunks.pin_run(rows_of(views, 3, 2 * size), "stored")
        contexts = [self.start(engine, random_tokens(engine, count, seed=count)) for count in (3, 40)]
        for context in contexts:
            engine.chunks.attach(context, pinned.tokens, [AttachedRun(context.n, pinned, 0, len(pinned))], LEVEL)
        twins = []
        for context in contexts:
            n = context.relocated[0][0]
            twin = self.start(engine, context.tokens[:n].copy())
            engine.chunks.insert_rows(twin, pinned.tokens, list(relocations_of(views, 3, 2 * size, n)), LEVEL)
            twins.append(twin)
        suffix = random_tokens(engine, 5, seed=3)
        for _ in range(3):
            for context, twin in zip(contexts, twins):
                assert self.near([engine.prefill(context, suffix)], [engine.prefill(twin, suffix)], self.tolerance)
        engine.chunks.attach(contexts[0], pinned.tokens[4:9], [AttachedRun(contexts[0].n, pinned, 4, 5)], LEVEL)
        engine.chunks.insert_rows(twins[0], pinned.tokens[4:9], list(relocations_of(views, 7, 5, twins[0].n)), LEVEL)
        assert self.near([engine.prefill(contexts[0], suffix)], [engine.prefill(twins[0], suffix)], self.tolerance)

    def test_crop_goes_back_to_where_it_was(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        context = self.attached(engine, engine.chunks.pin_run(rows_of(views, 0, len(ids)), "stored"), ids)
        gap, suffix, other = self.gap(context), random_tokens(engine, 5, seed=3), random_tokens(engine, 40, seed=4)
        n = context.n
        expected = engine.chunks.recompute_rows(context, gap, suffix)
        engine.prefill(context, other)
        # A row before the end now lies behind the last ones in memory.
        inner = np.array([n - 3], np.int32)
        engine.chunks.recompute_rows(context, inner, other[:3])
        assert engine.crop(context, n)
        assert context.n == n
        again = engine.prefill(context, suffix)
        twin = self.attached(engine, engine.chunks.pin_run(rows_of(views, 0, len(ids)), "stored"), ids)
        assert self.near([engine.chunks.recompute_rows(twin, gap, suffix)], [expected], 0.0)
        assert engine.crop(twin, n)
        assert self.near([engine.chunks.recompute_rows(twin, inner, suffix)], [again], self.tolerance)
        assert list(context.relocated) == list(twin.relocated)
        cut = context.relocated[1][1] - 3
        assert engine.crop(context, cut)
        whole = engine.chunks.recompute_rows(context, np.arange(context.relocated[0][0], cut, dtype=np.int32), other)
        assert self.near([whole], [engine.prefill(engine.new_context(), context.tokens)], self.tolerance)
        assert engine.crop(context, 3)
        assert self.near(
            [engine.prefill(context, other)],
            [engine.prefill(engine.new_context(), np.append(context.tokens[:3], other))],
            self.tolerance,
        )

    def test_blocks_of_what_was_computed_are_exported_and_others_are_not(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine)
        pinned = engine.chunks.pin_run(rows_of(views, 0, 2 * size), "stored")
        engine.chunks.attach(context, ids[: 2 * size], [AttachedRun(0, pinned, 0, 2 * size)], LEVEL)
        engine.prefill(context, ids[2 * size :])
        keys = [bytes([i]) * 32 for i in range(BLOCKS)]
        later = [parse(data) for data in engine.export(context, keys[2:], keys[1], 2)]
        for view, exact in zip(later, views[2:]):
            assert view.header.level == LEVEL
            assert view.header.tokens == exact.header.tokens
            for plane in exact.layout.planes:
                a, b = (one.array(plane.layer, plane.role).astype(np.float64) for one in (view, exact))
                assert np.abs(a - b).max() <= self.tolerance * np.abs(b).max()
        raises(EngineError, lambda: list(engine.export(context, keys, ROOT, 0)))

    def test_packed_blocks_are_pinned_as_what_they_unpack_to(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        codec = Codec(engine.space)
        engine.codec = codec  # type: ignore[misc]
        packed = [parse(codec.encode(view, PACKED)) for view in views]
        suffix = random_tokens(engine, 5, seed=3)
        formats: tuple[RunFormat, ...] = ("stored", "int8")
        for format in formats:
            seen, rows = [], []
            for blocks in (views, packed):
                run = engine.chunks.pin_run(rows_of(blocks, 0, len(ids)), format)
                rows.append([_rows(slabs) for slabs in run.layers.values()])
                context = self.attached(engine, run, ids)
                seen.append([engine.chunks.recompute_rows(context, self.gap(context), suffix)])
            assert all(np.array_equal(a, b) for a, b in zip(*rows))
            # Sums are taken in another order where blocks lie together.
            assert self.near(seen[0], seen[1], self.tolerance)

    def test_invalid_runs_change_nothing(self, engine: InPlaceEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        for pieces in (
            [BlockRows(views[0], 0, size), BlockRows(views[2], 0, size)],
            [BlockRows(views[0], 0, size - 1), BlockRows(views[1], 0, size)],
            [BlockRows(views[1], -1, 3)],
            [BlockRows(views[1], 1, size)],
            [BlockRows(views[1], 0, 0)],
        ):
            error = raises(RelocationError, engine.chunks.pin_run, pieces)
            assert isinstance(error, RelocationError)
            assert error.index == len(pieces) - 1
        raises(EngineError, engine.chunks.pin_run, [])
        spoiled = bytearray(views[1].buffer)
        plane = next(plane for plane in views[1].layout.planes if plane.nbytes)
        spoiled[views[1].offset(plane.layer, plane.role)] ^= 1
        for format in ("int8", "stored"):
            error = raises(
                RelocationError,
                engine.chunks.pin_run,
                [BlockRows(views[0], 0, size), BlockRows(parse(spoiled), 0, size)],
                format,
            )
            assert isinstance(error, RelocationError)
            assert (error.index, error.key) == (1, views[1].header.key)
        pinned = engine.chunks.pin_run(rows_of(views, 0, 2 * size), "stored")
        context, twin = self.start(engine, ids[:5]), self.start(engine, ids[:5])
        good = AttachedRun(5, pinned, 0, 2 * size)
        alien = PinnedRun(pinned.tokens, pinned.at, {99: next(iter(pinned.layers.values()))}, "stored")
        for move in (
            AttachedRun(5, pinned, 1, 2 * size - 1),
            AttachedRun(4, pinned, 0, 2 * size),
            AttachedRun(6, pinned, 0, 2 * size),
            AttachedRun(5, pinned, -1, 3),
            AttachedRun(5, pinned, 0, 2 * size + 1),
            AttachedRun(5, pinned, 0, 0),
            AttachedRun(5, alien, 0, 2 * size),
        ):
            raises(EngineError, engine.chunks.attach, context, ids[: 2 * size], [move], LEVEL)
        raises(EngineError, engine.chunks.attach, context, ids[: 2 * size], [good], EXACT)
        assert (context.n, context.relocated) == (5, ())
        assert np.array_equal(engine.prefill(context, ids[:3]), engine.prefill(twin, ids[:3]))
        context = self.start(engine, ids[:size])
        engine.chunks.attach(context, ids[: 2 * size], [AttachedRun(size, pinned, 0, 2 * size)], LEVEL)
        raises(EngineError, engine.load, context, views[3:4])
        raises(
            EngineError,
            engine.chunks.insert_rows,
            context,
            ids[:size],
            list(relocations_of(views, 0, size, context.n)),
            LEVEL,
        )


def _widened(slab: Slab | CodedSlab) -> Slab:
    return Slab(Plane("fp32", dequantise(slab.k)), Plane("fp32", dequantise(slab.v)), slab.first, slab.rows)


def _rows(slabs: Sequence[Slab | CodedSlab]) -> Logits:
    """K beside V of all rows, float32 [heads, rows, 2 * dim]."""
    parts = [
        np.concatenate([dequantise(p.rows(slab.first, slab.first + slab.rows)) for p in (slab.k, slab.v)], axis=2)
        for slab in slabs
    ]
    return np.concatenate(parts, axis=1)
