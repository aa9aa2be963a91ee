"""EngineMovingContract: what any engine must do that reuses K and V at other positions.

::

    class TestMine(EngineMovingContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

The engine is a `Mover`, keeps no states, and its ``codec`` can be set.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ctxreuse.block import BlockView, parse
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Logits
from ctxreuse.engines.moving import Move, MoveError
from ctxreuse.errors import ContextTooLongError, EngineError, LinkDownError, TokenRangeError
from ctxreuse.keys import ROOT
from ctxreuse.levels import EXACT, PACKED
from ctxreuse.testing.engine_looking import EngineLookingContract
from ctxreuse.testing.moving import LEVEL, MovingEngine, moves_of
from ctxreuse.testing.plain_card import plain_card
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, continuation, random_tokens, seal

__all__ = ["EngineMovingContract", "MovingEngine", "moves_of"]


class EngineMovingContract(EngineLookingContract):
    """Inherit, and give a fixture ``engine``."""

    def test_rows_moved_to_where_they_are_give_the_bits_of_a_load(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        suffix = random_tokens(engine, 9, seed=1)
        loaded = engine.start()
        engine.load(loaded, views).wait()
        expected = continuation(engine, loaded, engine.prefill(loaded, suffix), 2)
        live = self.start(engine)
        engine.place(live, ids, list(moves_of(views, 0, len(ids), 0)), LEVEL)
        assert not live.gaps
        got = continuation(engine, live, engine.mend(live, ids[:0], suffix), 2)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected))
        assert np.array_equal(live.tokens, loaded.tokens)

    def test_gaps_are_computed_on_what_is_held(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        whole = engine.prefill(engine.start(), np.concatenate([ids, ids[:3]]))
        live = self.start(engine, ids[:3])
        moves = [*moves_of(views, 7, size, 7), *moves_of(views, 2 * size, 9, 2 * size)]
        engine.place(live, ids[3:], moves, LEVEL)
        assert list(live.gaps) == [(3, 7), (7 + size, 2 * size), (2 * size + 9, len(ids))]
        assert list(live.moved) == [(7, 7 + size), (2 * size, 2 * size + 9)]
        rows = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        assert self.close(engine.mend(live, rows, ids[:3]), whole)
        assert not live.gaps
        assert np.array_equal(live.tokens, np.concatenate([ids, ids[:3]]))

    def test_all_rows_mended_are_a_whole_prefill(self, engine: MovingEngine) -> None:
        live, _ = self.shuffled(engine)
        tokens, suffix = live.tokens.copy(), random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.start(), np.concatenate([tokens, suffix]))
        first = live.moved[0][0]
        assert self.close(engine.mend(live, np.arange(first, len(tokens), dtype=np.int32), suffix), whole)
        assert not live.moved
        assert [run.level for run in live.levels] == [EXACT]
        plain = self.start(engine, np.concatenate([tokens, suffix]))
        for at, rows in self.rows(engine, plain).items():
            assert np.abs(self.rows(engine, live)[at] - rows).max() <= self.tolerance * np.abs(rows).max()

    def test_rows_come_back_as_they_were_from_another_place(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine, random_tokens(engine, 3 * size // 2, seed=1))
        at = live.n
        engine.place(live, ids, list(moves_of(views, 0, len(ids), at)), LEVEL)
        engine.mend(live, ids[:0], random_tokens(engine, size, seed=2))
        there = [parse(data) for data in Sealed(engine, live).blocks]
        back = self.start(engine)
        engine.place(back, ids, list(moves_of(there, at, len(ids), 0)), LEVEL)
        engine.mend(back, ids[:0], ids[:1])
        expected, turned = self.rows(engine, self.start(engine, ids)), self.rows(engine, live)
        for plane, rows in self.rows(engine, back).items():
            assert np.abs(rows - expected[plane]).max() <= self.tolerance * np.abs(rows).max()
            if plane[1] == "v":
                assert np.array_equal(turned[plane][:, at : at + len(ids)], expected[plane])

    def test_v_is_the_very_bits_and_k_is_not_turned_if_so_asked(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine, random_tokens(engine, 5, seed=1))
        engine.place(live, ids[3 : 3 * size], list(moves_of(views, 3, 3 * size - 3, 5)), LEVEL, turn=False)
        engine.mend(live, ids[:0], random_tokens(engine, size, seed=2))
        expected = self.rows(engine, self.start(engine, ids))
        for plane, rows in self.rows(engine, live).items():
            assert np.array_equal(rows[:, 5 : 3 * size + 2], expected[plane][:, 3 : 3 * size])

    def test_the_first_layer_of_moved_rows_is_right_without_repair(self, engine: MovingEngine) -> None:
        live, pieces = self.shuffled(engine)
        rows = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in pieces])
        found = engine.first_rows(live.tokens[rows], rows)
        if found is None:
            return
        for role in ("k", "v"):
            distance, length = engine.deviations(live, rows, found[0], role)
            assert distance.shape == length.shape == (len(rows),)
            assert distance.dtype == length.dtype == np.float32
            assert bool((distance <= 1e-8 * length).all()) is self.relative

    def test_deviations_are_the_distance_to_what_mending_gives(self, engine: MovingEngine) -> None:
        live, pieces = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        rows = np.concatenate([np.arange(b - 4, b, dtype=np.int32) for _, a, b in pieces if b - a > 4])
        layers = [layer for layer, spec in enumerate(engine.space.layers) if spec.blocked]
        kinds = [(layer, role) for layer in (layers[0], layers[-1]) for role in ("k", "v")]
        seen = {kind: engine.deviations(live, rows, *kind) for kind in kinds}  # type: ignore[arg-type]
        suffix = random_tokens(engine, engine.space.block_tokens, seed=3)
        engine.mend(twin, np.union1d(rows, gap).astype(np.int32), suffix)
        # The context is as it was: computing the gaps alone gives what is held.
        engine.mend(live, gap, suffix)
        held, fresh = self.rows(engine, live), self.rows(engine, twin)
        for plane, (distance, length) in seen.items():
            ours = ((fresh[plane][:, rows] - held[plane][:, rows]) ** 2).sum((0, 2))
            assert np.allclose(length, (fresh[plane][:, rows] ** 2).sum((0, 2)), rtol=1e-4)
            assert np.abs(distance - ours).max() <= 1e-4 * length.max()
        assert seen[layers[-1], "v"][0].max() > 1e-3 * seen[layers[-1], "v"][1].max() or len(layers) == 1

    def test_deviations_leave_the_context_as_it_is(self, engine: MovingEngine) -> None:
        live, pieces = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        before = live.moved, live.gaps, live.levels, live.n
        layer = max(i for i, spec in enumerate(engine.space.layers) if spec.blocked)
        rows = np.arange(pieces[0][1], live.n, dtype=np.int32)
        engine.deviations(live, rows, layer, "v")
        assert (live.moved, live.gaps, live.levels, live.n) == before
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        suffix = random_tokens(engine, 5, seed=3)
        assert np.array_equal(engine.mend(live, gap, suffix), engine.mend(twin, gap, suffix))
        nothing = engine.deviations(live, rows[:0], layer, "k")
        assert [part.shape for part in nothing] == [(0,), (0,)]

    def test_a_context_says_what_was_moved_and_what_stands_on_it(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine, ids[:4])
        engine.place(live, ids[: 2 * size], list(moves_of(views, 2, 2 * size - 2, 6)), "approx~kl-0.02")
        n = 4 + 2 * size
        assert (live.gaps, live.moved) == (((4, 6),), ((6, n),))
        engine.mend(live, np.array([4, 5, 6, 20], np.int32), ids[:size])
        assert list(live.moved) == [(7, 20), (21, n)]
        levels = [run.level for run in live.levels for _ in range(run.start, run.end)]
        # What was computed before anything that was moved is exact, what was moved is at its level, as is the rest.
        assert levels == [EXACT] * 7 + ["approx~kl-0.02"] * (n + size - 7)
        keys = [bytes([i]) * 32 for i in range(3)]
        exported = [parse(data).header.level for data in engine.export(live, keys, ROOT, 0)]
        assert exported == ["approx~kl-0.02"] * 3
        # Rows that are computed on exact ones are exact; what was computed before on the moved ones is not.
        engine.mend(live, np.arange(7, n, dtype=np.int32), ids[:1])
        assert not live.moved
        levels = [run.level for run in live.levels for _ in range(run.start, run.end)]
        assert levels == [EXACT] * n + ["approx~kl-0.02"] * (size + 1)
        assert engine.crop(live, n)
        assert [run.level for run in live.levels] == [EXACT]

    def test_cropping_forgets_what_was_moved(self, engine: MovingEngine) -> None:
        live, pieces = self.shuffled(engine)
        end = pieces[1][2]
        assert engine.crop(live, end - 2)
        assert list(live.moved) == [(pieces[0][1], end - 2)]
        assert not live.gaps
        assert engine.crop(live, pieces[0][1])
        assert not live.moved
        assert [run.level for run in live.levels] == [EXACT]
        ids = random_tokens(engine, 9, seed=4)
        whole = engine.prefill(engine.start(), np.concatenate([live.tokens, ids]))
        assert self.close(engine.prefill(live, ids), whole)

    def test_a_context_with_gaps_is_not_used(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine)
        engine.place(live, ids[: 2 * size], list(moves_of(views, 3, size, 3)), LEVEL)
        assert list(live.gaps) == [(0, 3), (3 + size, 2 * size)]
        assert "mend" in str(raises(EngineError, engine.prefill, live, ids[:2]))
        raises(EngineError, engine.export, live, [ROOT], ROOT, 0)
        raises(EngineError, engine.load, live, views[2:3])
        raises(EngineError, engine.mend, live, ids[:0], ids[:2])
        raises(EngineError, engine.mend, live, np.arange(2 * size - 1, dtype=np.int32), ids[:2])
        rows = np.concatenate([np.arange(3), np.arange(3 + size, 2 * size)]).astype(np.int32)
        assert self.close(
            engine.mend(live, rows, ids[:2]), engine.prefill(self.start(engine), np.append(ids[: 2 * size], ids[:2]))
        )

    def test_two_places_one_behind_the_other(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        live = self.start(engine)
        engine.place(live, ids[:size], list(moves_of(views, 0, size, 0)), LEVEL)
        engine.place(live, ids[size : size + 5], [], LEVEL)
        engine.place(live, ids[size + 5 :], list(moves_of(views, size + 5, len(ids) - size - 5, size + 5)), LEVEL)
        assert live.gaps == ((size, size + 5),)
        logits = engine.mend(live, np.arange(size, size + 5, dtype=np.int32), ids[:4])
        assert self.close(logits, engine.prefill(engine.start(), np.concatenate([ids, ids[:4]])))

    def test_rows_are_placed_behind_blocks_that_are_still_on_their_way(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        suffix = random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.start(), np.concatenate([ids, suffix]))
        gap = np.arange(2 * size, 2 * size + 3, dtype=np.int32)
        moves = list(moves_of(views, 2 * size + 3, len(ids) - 2 * size - 3, 2 * size + 3))
        for compare in (False, True):
            live, asked = self.start(engine), list[int]()
            loading = engine.load(live, views[:2], None, asked.append)
            engine.place(live, ids[2 * size :], moves, LEVEL)
            if compare:
                distance, length = engine.deviations(
                    live, gap + 3, max(i for i, s in enumerate(engine.space.layers) if s.blocked), "v"
                )
                assert (distance <= 1e-8 * length).all()
            assert self.close(engine.mend(live, gap, suffix), whole)
            loading.wait()
            assert asked

        def cut(layer: int) -> None:
            raise LinkDownError("the link was cut")

        live = self.start(engine)
        loading = engine.load(live, views[:2], None, cut)
        engine.place(live, ids[2 * size :], moves, LEVEL)
        raises(LinkDownError, engine.mend, live, gap, suffix)
        raises(LinkDownError, loading.wait)
        raises(EngineError, engine.prefill, live, suffix)

    def test_coded_views_are_moved_as_what_they_decode_to(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        codec = Codec(engine.space, ("0" * 64, plain_card(engine.space, views)))
        engine.codec = codec  # type: ignore[misc]
        head, suffix = random_tokens(engine, 7, seed=1), random_tokens(engine, 5, seed=2)

        def moved(held: Sequence[BlockView]) -> Logits:
            live = self.start(engine, head)
            engine.place(live, ids[3:-2], list(moves_of(held, 3, len(ids) - 5, 7)), LEVEL)
            return engine.mend(live, ids[:0], suffix)

        packed = [
            parse(codec.encode(view, level)) for view, level in zip(views, [PACKED, EXACT, PACKED, PACKED, EXACT])
        ]
        assert np.array_equal(moved(packed), moved(views))
        coded = [parse(codec.encode(view, "kl-0.05")) for view in views]
        assert np.array_equal(moved(coded), moved([parse(codec.decode(view)) for view in coded]))

    def test_moves_that_cannot_be_change_nothing(self, engine: MovingEngine) -> None:
        ids, views = self.source(engine)
        size, space = engine.space.block_tokens, engine.space
        live, twin = self.start(engine, ids[:5]), self.start(engine, ids[:5])
        good = list(moves_of(views, 0, 2 * size, 5))
        two = ids[: 2 * size]
        other = _named(views[1], space=bytes(32))
        unturned = _named(views[1], rope_at=-1)
        shifted = Move(5 + size, views[1], 1, size - 1)
        beyond = Move(5 + size, views[1], 1, size)
        foreign = (Move(5 + size, view, 0, size) for view in (other, unturned))
        for wrong in (*foreign, shifted, beyond, Move(5 + size, views[1], -1, 2)):
            error = raises(MoveError, engine.place, live, two, [good[0], wrong], LEVEL)
            assert isinstance(error, MoveError)
            assert (error.index, error.key) == (1, wrong.view.header.key)
        overlap, before = Move(4 + size, views[1], 0, size), Move(4, views[0], 0, size)
        for moves in ([good[0], overlap], [before], [good[0], Move(5 + size, views[1], 0, 0)], good[::-1]):
            raises(EngineError, engine.place, live, two, moves, LEVEL)
        raises(EngineError, engine.place, live, ids[: 2 * size - 1], good, LEVEL)
        for level in (EXACT, PACKED, "kl-0.05"):
            raises(EngineError, engine.place, live, two, good, level)
        raises(TokenRangeError, engine.place, live, np.append(two, space.vocab_size).astype(np.int32), good, LEVEL)
        raises(ContextTooLongError, engine.place, live, np.zeros(space.max_tokens, np.int32), [], LEVEL)
        for rows in ([5], [-1], [3, 2], [3, 3], [[1, 2]]):
            raises(EngineError, engine.mend, live, np.array(rows, np.int32), ids[:2])
            raises(EngineError, engine.deviations, live, np.array(rows, np.int32), 0, "v")
        one = np.array([1], np.int32)
        raises(EngineError, engine.deviations, live, one, len(space.layers), "v")
        raises(EngineError, engine.mend, live, one, ids[:0])
        assert (live.n, live.moved, live.gaps) == (5, (), ())
        assert np.array_equal(engine.prefill(live, ids[:3]), engine.prefill(twin, ids[:3]))

    def test_a_corrupt_plane_is_never_placed(self, engine: MovingEngine) -> None:
        ids = random_tokens(engine, 4 * engine.space.block_tokens)
        blocks = [data.copy() for data in seal(engine, ids).blocks]
        rng = np.random.default_rng(5)
        codec = Codec(engine.space)
        engine.codec = codec  # type: ignore[misc]
        for number in (0, 1, 3):
            for packed in (False, True):
                held = [codec.encode(parse(data), PACKED) if packed else data for data in blocks]
                data = held[number] = held[number].copy()
                planes = [p for p in parse(data).layout.planes if p.nbytes]
                plane = planes[int(rng.integers(len(planes)))]
                data[parse(data).offset(plane.layer, plane.role) + int(rng.integers(plane.nbytes))] ^= 0x10
                live, twin = self.start(engine, ids[:7]), self.start(engine, ids[:7])
                moves = list(moves_of([parse(one) for one in held], 2, len(ids) - 4, 7))
                error = raises(MoveError, engine.place, live, ids[2:-2], moves, LEVEL)
                assert isinstance(error, MoveError)
                assert (error.index, error.key) == (number, parse(data).header.key)
                assert live.n == 7
                assert np.array_equal(engine.prefill(live, ids[:3]), engine.prefill(twin, ids[:3]))

    def test_more_rows_than_go_through_the_model_together(self, engine: MovingEngine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, min(40 * size, engine.space.max_tokens - 64))
        views = [parse(data) for data in seal(engine, ids).blocks]
        live = self.start(engine, random_tokens(engine, 3, seed=1))
        held = list(moves_of(views, 0, len(views) * size, 3))
        engine.place(live, ids, held[1::2], LEVEL)
        rows = np.arange(3, live.n, dtype=np.int32)
        odd = rows[rows % 3 > 0]
        rest = np.union1d(odd, np.concatenate([np.arange(a, b) for a, b in live.gaps])).astype(np.int32)
        distance, length = engine.deviations(
            live, odd, max(i for i, s in enumerate(engine.space.layers) if s.blocked), "v"
        )
        assert len(distance) == len(length) == len(odd)
        engine.mend(live, rest, ids[:3])
        whole = engine.prefill(engine.start(), np.concatenate([live.tokens, ids[:4]]))
        logits = engine.mend(live, rows, ids[:4])
        assert logits.shape == whole.shape
        assert engine.crop(live, len(rows) + 3)
        assert [run.level for run in live.levels] == [EXACT]


def _named(view: BlockView, **fields: object) -> BlockView:
    """The block with another header, as one that another node made."""
    return BlockView(msgspec.structs.replace(view.header, **fields), view.layout, view.start, view.buffer)
