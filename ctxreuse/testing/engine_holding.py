"""EngineHoldingContract: what any engine must do whose contexts attend to runs where they are held.

::

    class TestMine(EngineHoldingContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

The engine is a `Holder` and keeps no states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ctxreuse.block import BlockView, parse
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.engines.moving import HeldFormat, Holder, Move, MovedLive, MoveError, Role, Rows
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attend import Plane, dequantise
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.levels import EXACT, PACKED
from ctxreuse.reuse.attend import Coded, Held, HeldMove, Slab
from ctxreuse.testing.moving import BLOCKS, LEVEL, MovingScene, moves_of
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import continuation, random_tokens

__all__ = ["EngineHoldingContract", "HoldingEngine", "rows_of"]


class HoldingEngine(Engine, Holder, Protocol):
    """An engine that is a holder."""


def rows_of(views: Sequence[BlockView], first: int, count: int) -> list[Rows]:
    """Rows of the tokens ``first`` to ``first + count`` of consecutive blocks."""
    return [Rows(move.view, move.row, move.count) for move in moves_of(views, first, count, 0)]


class EngineHoldingContract(MovingScene):
    """Inherit, and give a fixture ``engine``."""

    #: As `tolerance`, where queries and weights are rounded to 16 bits.
    rounded = 1e-3

    def near(self, a: Sequence[Logits], b: Sequence[Logits], tolerance: float) -> bool:
        """True if the logits differ by rounding only."""
        return all(bool(np.abs(x - y).max() <= tolerance * np.abs(y).max()) for x, y in zip(a, b, strict=True))

    def shown(self, engine: HoldingEngine, held: Held, ids: Tokens) -> MovedLive:
        """A head, then pieces of a run of all of ``ids`` in another order, with a gap of 7 tokens."""
        size = engine.space.block_tokens
        live = self.start(engine, random_tokens(engine, size // 2, seed=1))
        cuts = [(2 * size + 3, size + 5), (size, size), (5, 2), (0, 2 * size - 1)]
        tokens, moves, at = list[Tokens](), list[HeldMove](), live.n
        for first, count in cuts:
            moves.append(HeldMove(at, held, first, count))
            tokens.append(ids[first : first + count])
            at += count
            if count == 2:
                tokens.append(random_tokens(engine, 7, seed=2))
                at += 7
        engine.show(live, np.concatenate(tokens), moves, LEVEL)
        return live

    def gap(self, live: MovedLive) -> Tokens:
        """The rows that nothing is held for."""
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])

    def test_runs_as_stored_say_what_rows_that_were_copied_say(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        held = engine.hold(rows_of(views, 0, len(ids)), "stored")
        assert len(held) == len(ids)
        live = self.shown(engine, held, ids)
        twin = self.start(engine, live.tokens[: live.moved[0][0]].copy())
        head, at, moves = twin.n, twin.n, list[Move]()
        size = engine.space.block_tokens
        for first, count in [(2 * size + 3, size + 5), (size, size), (5, 2), (0, 2 * size - 1)]:
            moves += moves_of(views, first, count, at)
            at += count + 7 * (count == 2)
        engine.place(twin, live.tokens[head:].copy(), moves, LEVEL)
        assert (live.gaps, live.moved, live.levels) == (twin.gaps, twin.moved, twin.levels)
        rows = np.union1d(self.gap(live), [head + 2, head + 3, head + size + 9]).astype(np.int32)
        suffix = random_tokens(engine, 5, seed=3)
        ours, theirs = engine.mend(live, rows, suffix), engine.mend(twin, rows, suffix)
        assert (live.gaps, live.moved, live.levels) == (twin.gaps, twin.moved, twin.levels)
        assert np.array_equal(live.tokens, twin.tokens)
        assert self.near(continuation(engine, live, ours, 3), continuation(engine, twin, theirs, 3), self.tolerance)

    def test_quantised_runs_are_read_as_what_they_stand_for(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        held = engine.hold(rows_of(views, 0, len(ids)), "int8")
        stored = engine.hold(rows_of(views, 0, len(ids)), "stored")
        assert held.nbytes < 0.6 * stored.nbytes
        wide = Held(
            held.tokens,
            held.at,
            {layer: tuple(_widened(slab) for slab in slabs) for layer, slabs in held.layers.items()},
            "widened",
        )
        suffix = random_tokens(engine, 5, seed=3)
        seen = []
        for run in (held, wide, stored):
            live = self.shown(engine, run, ids)
            seen.append(continuation(engine, live, engine.mend(live, self.gap(live), suffix), 0))
        assert self.near(seen[0], seen[1], self.rounded)
        assert self.near(seen[0], seen[2], 0.05)

    def test_deviations_and_attention_are_those_of_rows_that_were_copied(self, engine: HoldingEngine) -> None:
        _, views = self.source(engine)
        size = engine.space.block_tokens
        head, suffix = random_tokens(engine, size // 2, seed=1), random_tokens(engine, 5, seed=3)
        allowed: dict[HeldFormat, float] = {"stored": self.tolerance, "int8": 0.02}
        for format, tolerance in allowed.items():
            held = engine.hold(rows_of(views, 3, 3 * size), format)
            live, plain, twin = (self.start(engine, head) for _ in range(3))
            at = live.n + 2
            tokens = np.concatenate([suffix[:2], held.tokens])
            for one in (live, twin):
                engine.show(one, tokens, [HeldMove(at, held, 0, len(held))], LEVEL)
            engine.place(plain, tokens, list(moves_of(views, 3, 3 * size, at)), LEVEL)
            rows = np.array([2, at + 1, at + 5, at + size, live.n - 1], np.int32)
            for layer in sorted({0, max(i for i, spec in enumerate(engine.space.layers) if spec.blocked)}):
                roles: tuple[Role, ...] = ("k", "v")
                for role in roles:
                    ours, theirs = (
                        engine.deviations(live, rows, layer, role),
                        engine.deviations(plain, rows, layer, role),
                    )
                    assert np.abs(ours[0] - theirs[0]).max() <= tolerance * theirs[1].max()
                    assert np.abs(ours[1] - theirs[1]).max() <= tolerance * theirs[1].max()
            # The gap looks as well, so it is there for both.
            last = live.n - (at - 2) + len(suffix)
            looks = [
                engine.attention(one, rows, suffix, looks=last, layers=len(engine.space.layers))
                for one in (live, plain)
            ]
            assert np.abs(looks[0] - looks[1]).max() <= tolerance * looks[1].max()
            assert (live.gaps, live.moved, live.n) == (twin.gaps, twin.moved, twin.n)
            mended = np.array([*range(at - 2, at), at + 7], np.int32)
            assert np.array_equal(engine.mend(live, mended, suffix), engine.mend(twin, mended, suffix))
            again = [engine.deviations(one, rows, 0, "k") for one in (live, twin)]
            assert np.array_equal(again[0], again[1])
            assert np.array_equal(engine.prefill(live, suffix), engine.prefill(twin, suffix))

    def test_all_rows_mended_are_a_whole_prefill(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        live = self.shown(engine, engine.hold(rows_of(views, 0, len(ids)), "int8"), ids)
        tokens, suffix = live.tokens.copy(), random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.start(), np.concatenate([tokens, suffix]))
        first = live.moved[0][0]
        # In two goes: rows that are computed once more, and between others, are where they were.
        odd = np.union1d(np.arange(first, len(tokens), 2), self.gap(live)).astype(np.int32)
        engine.mend(live, odd, suffix[:1])
        assert engine.crop(live, len(tokens))
        logits = engine.mend(live, np.arange(first, len(tokens), dtype=np.int32), suffix)
        assert self.near([logits], [whole], self.tolerance)
        assert not live.moved
        assert [run.level for run in live.levels] == [EXACT]

    def test_any_number_of_contexts_show_a_run_at_once(self, engine: HoldingEngine) -> None:
        _, views = self.source(engine)
        size = engine.space.block_tokens
        held = engine.hold(rows_of(views, 3, 2 * size), "stored")
        lives = [self.start(engine, random_tokens(engine, count, seed=count)) for count in (3, 40)]
        for live in lives:
            engine.show(live, held.tokens, [HeldMove(live.n, held, 0, len(held))], LEVEL)
        twins = []
        for live in lives:
            n = live.moved[0][0]
            twin = self.start(engine, live.tokens[:n].copy())
            engine.place(twin, held.tokens, list(moves_of(views, 3, 2 * size, n)), LEVEL)
            twins.append(twin)
        suffix = random_tokens(engine, 5, seed=3)
        for _ in range(3):
            for live, twin in zip(lives, twins):
                assert self.near([engine.prefill(live, suffix)], [engine.prefill(twin, suffix)], self.tolerance)
        engine.show(lives[0], held.tokens[4:9], [HeldMove(lives[0].n, held, 4, 5)], LEVEL)
        engine.place(twins[0], held.tokens[4:9], list(moves_of(views, 7, 5, twins[0].n)), LEVEL)
        assert self.near([engine.prefill(lives[0], suffix)], [engine.prefill(twins[0], suffix)], self.tolerance)

    def test_crop_goes_back_to_where_it_was(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        live = self.shown(engine, engine.hold(rows_of(views, 0, len(ids)), "stored"), ids)
        gap, suffix, other = self.gap(live), random_tokens(engine, 5, seed=3), random_tokens(engine, 40, seed=4)
        n = live.n
        expected = engine.mend(live, gap, suffix)
        engine.prefill(live, other)
        # A row before the end now lies behind the last ones in memory.
        inner = np.array([n - 3], np.int32)
        engine.mend(live, inner, other[:3])
        assert engine.crop(live, n)
        assert live.n == n
        again = engine.prefill(live, suffix)
        twin = self.shown(engine, engine.hold(rows_of(views, 0, len(ids)), "stored"), ids)
        assert self.near([engine.mend(twin, gap, suffix)], [expected], 0.0)
        assert engine.crop(twin, n)
        assert self.near([engine.mend(twin, inner, suffix)], [again], self.tolerance)
        assert list(live.moved) == list(twin.moved)
        cut = live.moved[1][1] - 3
        assert engine.crop(live, cut)
        whole = engine.mend(live, np.arange(live.moved[0][0], cut, dtype=np.int32), other)
        assert self.near([whole], [engine.prefill(engine.start(), live.tokens)], self.tolerance)
        assert engine.crop(live, 3)
        assert self.near(
            [engine.prefill(live, other)],
            [engine.prefill(engine.start(), np.append(live.tokens[:3], other))],
            self.tolerance,
        )

    def test_blocks_of_what_was_computed_are_exported_and_others_are_not(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine)
        held = engine.hold(rows_of(views, 0, 2 * size), "stored")
        engine.show(live, ids[: 2 * size], [HeldMove(0, held, 0, 2 * size)], LEVEL)
        engine.prefill(live, ids[2 * size :])
        keys = [bytes([i]) * 32 for i in range(BLOCKS)]
        later = [parse(data) for data in engine.export(live, keys[2:], keys[1], 2)]
        for view, exact in zip(later, views[2:]):
            assert view.header.level == LEVEL
            assert view.header.tokens == exact.header.tokens
            for plane in exact.layout.planes:
                a, b = (one.array(plane.layer, plane.role).astype(np.float64) for one in (view, exact))
                assert np.abs(a - b).max() <= self.tolerance * np.abs(b).max()
        raises(EngineError, lambda: list(engine.export(live, keys, ROOT, 0)))

    def test_packed_blocks_are_held_as_what_they_unpack_to(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        codec = Codec(engine.space)
        engine.codec = codec  # type: ignore[misc]
        packed = [parse(codec.encode(view, PACKED)) for view in views]
        suffix = random_tokens(engine, 5, seed=3)
        formats: tuple[HeldFormat, ...] = ("stored", "int8")
        for format in formats:
            seen, rows = [], []
            for blocks in (views, packed):
                run = engine.hold(rows_of(blocks, 0, len(ids)), format)
                rows.append([_rows(slabs) for slabs in run.layers.values()])
                live = self.shown(engine, run, ids)
                seen.append([engine.mend(live, self.gap(live), suffix)])
            assert all(np.array_equal(a, b) for a, b in zip(*rows))
            # Sums are taken in another order where blocks lie together.
            assert self.near(seen[0], seen[1], self.tolerance)

    def test_what_cannot_be_held_or_shown_changes_nothing(self, engine: HoldingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        for pieces in (
            [Rows(views[0], 0, size), Rows(views[2], 0, size)],
            [Rows(views[0], 0, size - 1), Rows(views[1], 0, size)],
            [Rows(views[1], -1, 3)],
            [Rows(views[1], 1, size)],
            [Rows(views[1], 0, 0)],
        ):
            error = raises(MoveError, engine.hold, pieces)
            assert isinstance(error, MoveError)
            assert error.index == len(pieces) - 1
        raises(EngineError, engine.hold, [])
        spoiled = bytearray(views[1].buffer)
        plane = next(plane for plane in views[1].layout.planes if plane.nbytes)
        spoiled[views[1].offset(plane.layer, plane.role)] ^= 1
        for format in ("int8", "stored"):
            error = raises(MoveError, engine.hold, [Rows(views[0], 0, size), Rows(parse(spoiled), 0, size)], format)
            assert isinstance(error, MoveError)
            assert (error.index, error.key) == (1, views[1].header.key)
        held = engine.hold(rows_of(views, 0, 2 * size), "stored")
        live, twin = self.start(engine, ids[:5]), self.start(engine, ids[:5])
        good = HeldMove(5, held, 0, 2 * size)
        alien = Held(held.tokens, held.at, {99: next(iter(held.layers.values()))}, "stored")
        for move in (
            HeldMove(5, held, 1, 2 * size - 1),
            HeldMove(4, held, 0, 2 * size),
            HeldMove(6, held, 0, 2 * size),
            HeldMove(5, held, -1, 3),
            HeldMove(5, held, 0, 2 * size + 1),
            HeldMove(5, held, 0, 0),
            HeldMove(5, alien, 0, 2 * size),
        ):
            raises(EngineError, engine.show, live, ids[: 2 * size], [move], LEVEL)
        raises(EngineError, engine.show, live, ids[: 2 * size], [good], EXACT)
        assert (live.n, live.moved) == (5, ())
        assert np.array_equal(engine.prefill(live, ids[:3]), engine.prefill(twin, ids[:3]))
        live = self.start(engine, ids[:size])
        engine.show(live, ids[: 2 * size], [HeldMove(size, held, 0, 2 * size)], LEVEL)
        raises(EngineError, engine.load, live, views[3:4])
        raises(EngineError, engine.place, live, ids[:size], list(moves_of(views, 0, size, live.n)), LEVEL)


def _widened(slab: Slab | Coded) -> Slab:
    return Slab(Plane("fp32", dequantise(slab.k)), Plane("fp32", dequantise(slab.v)), slab.first, slab.rows)


def _rows(slabs: Sequence[Slab | Coded]) -> Logits:
    """K beside V of all rows, float32 [heads, rows, 2 * dim]."""
    parts = [
        np.concatenate([dequantise(p.rows(slab.first, slab.first + slab.rows)) for p in (slab.k, slab.v)], axis=2)
        for slab in slabs
    ]
    return np.concatenate(parts, axis=1)
