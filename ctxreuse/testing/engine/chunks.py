"""EngineChunksContract: the contract of engines that reuse K and V at other positions.

::

    class TestMine(EngineChunksContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

Its `chunks` are `ChunkOps`; it keeps no states, and its ``codec`` can be set.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ctxreuse.block.format import BlockView, parse
from ctxreuse.block.levels import EXACT, PACKED
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Logits
from ctxreuse.engines.chunks import Relocation, RelocationError
from ctxreuse.errors import ContextTooLongError, EngineError, LinkDownError, TokenRangeError
from ctxreuse.identity.keys import ROOT
from ctxreuse.testing.engine.attention import EngineAttentionContract
from ctxreuse.testing.engine.chunk_contexts import LEVEL, ChunkReuseEngine, relocations_of
from ctxreuse.testing.profiles import plain_profile
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, continuation, random_tokens, seal

__all__ = ["ChunkReuseEngine", "EngineChunksContract", "relocations_of"]


class EngineChunksContract(EngineAttentionContract):
    """Inherit, and give a fixture ``engine``."""

    def test_rows_relocated_in_place_give_the_bits_of_a_load(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        suffix = random_tokens(engine, 9, seed=1)
        loaded = engine.new_context()
        engine.load(loaded, views).wait()
        expected = continuation(engine, loaded, engine.prefill(loaded, suffix), 2)
        context = self.start(engine)
        engine.chunks.insert_rows(context, ids, list(relocations_of(views, 0, len(ids), 0)), LEVEL)
        assert not context.gaps
        got = continuation(engine, context, engine.chunks.recompute_rows(context, ids[:0], suffix), 2)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected))
        assert np.array_equal(context.tokens, loaded.tokens)

    def test_gaps_are_computed_on_the_relocated_rows(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        whole = engine.prefill(engine.new_context(), np.concatenate([ids, ids[:3]]))
        context = self.start(engine, ids[:3])
        moves = [*relocations_of(views, 7, size, 7), *relocations_of(views, 2 * size, 9, 2 * size)]
        engine.chunks.insert_rows(context, ids[3:], moves, LEVEL)
        assert list(context.gaps) == [(3, 7), (7 + size, 2 * size), (2 * size + 9, len(ids))]
        assert list(context.relocated) == [(7, 7 + size), (2 * size, 2 * size + 9)]
        rows = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])
        assert self.close(engine.chunks.recompute_rows(context, rows, ids[:3]), whole)
        assert not context.gaps
        assert np.array_equal(context.tokens, np.concatenate([ids, ids[:3]]))

    def test_recomputing_all_rows_equals_a_whole_prefill(self, engine: ChunkReuseEngine) -> None:
        context, _ = self.shuffled(engine)
        tokens, suffix = context.tokens.copy(), random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.new_context(), np.concatenate([tokens, suffix]))
        first = context.relocated[0][0]
        assert self.close(
            engine.chunks.recompute_rows(context, np.arange(first, len(tokens), dtype=np.int32), suffix), whole
        )
        assert not context.relocated
        assert [run.level for run in context.levels] == [EXACT]
        plain = self.start(engine, np.concatenate([tokens, suffix]))
        for at, rows in self.rows(engine, plain).items():
            assert np.abs(self.rows(engine, context)[at] - rows).max() <= self.tolerance * np.abs(rows).max()

    def test_rows_come_back_as_they_were_from_another_place(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine, random_tokens(engine, 3 * size // 2, seed=1))
        at = context.n
        engine.chunks.insert_rows(context, ids, list(relocations_of(views, 0, len(ids), at)), LEVEL)
        engine.chunks.recompute_rows(context, ids[:0], random_tokens(engine, size, seed=2))
        there = [parse(data) for data in Sealed(engine, context).blocks]
        back = self.start(engine)
        engine.chunks.insert_rows(back, ids, list(relocations_of(there, at, len(ids), 0)), LEVEL)
        engine.chunks.recompute_rows(back, ids[:0], ids[:1])
        expected, rotated = self.rows(engine, self.start(engine, ids)), self.rows(engine, context)
        for plane, rows in self.rows(engine, back).items():
            assert np.abs(rows - expected[plane]).max() <= self.tolerance * np.abs(rows).max()
            if plane[1] == "v":
                assert np.array_equal(rotated[plane][:, at : at + len(ids)], expected[plane])

    def test_v_keeps_its_bits_and_k_is_not_rotated_on_request(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine, random_tokens(engine, 5, seed=1))
        engine.chunks.insert_rows(
            context, ids[3 : 3 * size], list(relocations_of(views, 3, 3 * size - 3, 5)), LEVEL, rotate=False
        )
        engine.chunks.recompute_rows(context, ids[:0], random_tokens(engine, size, seed=2))
        expected = self.rows(engine, self.start(engine, ids))
        for plane, rows in self.rows(engine, context).items():
            assert np.array_equal(rows[:, 5 : 3 * size + 2], expected[plane][:, 3 : 3 * size])

    def test_the_first_layer_of_relocated_rows_needs_no_recompute(self, engine: ChunkReuseEngine) -> None:
        context, pieces = self.shuffled(engine)
        rows = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in pieces])
        found = engine.first_rows(context.tokens[rows], rows)
        if found is None:
            return
        for role in ("k", "v"):
            distance, length = engine.chunks.deviations(context, rows, found[0], role)
            assert distance.shape == length.shape == (len(rows),)
            assert distance.dtype == length.dtype == np.float32
            assert bool((distance <= 1e-8 * length).all()) is self.relative

    def test_deviations_are_the_distance_to_recomputed_rows(self, engine: ChunkReuseEngine) -> None:
        context, pieces = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])
        rows = np.concatenate([np.arange(b - 4, b, dtype=np.int32) for _, a, b in pieces if b - a > 4])
        layers = [layer for layer, spec in enumerate(engine.space.layers) if spec.blocked]
        kinds = [(layer, role) for layer in (layers[0], layers[-1]) for role in ("k", "v")]
        seen = {kind: engine.chunks.deviations(context, rows, *kind) for kind in kinds}  # type: ignore[arg-type]
        suffix = random_tokens(engine, engine.space.block_tokens, seed=3)
        engine.chunks.recompute_rows(twin, np.union1d(rows, gap).astype(np.int32), suffix)
        # The context is unchanged: computing the gaps alone leaves the relocated rows.
        engine.chunks.recompute_rows(context, gap, suffix)
        before, fresh = self.rows(engine, context), self.rows(engine, twin)
        for plane, (distance, length) in seen.items():
            ours = ((fresh[plane][:, rows] - before[plane][:, rows]) ** 2).sum((0, 2))
            assert np.allclose(length, (fresh[plane][:, rows] ** 2).sum((0, 2)), rtol=1e-4)
            assert np.abs(distance - ours).max() <= 1e-4 * length.max()
        assert seen[layers[-1], "v"][0].max() > 1e-3 * seen[layers[-1], "v"][1].max() or len(layers) == 1

    def test_deviations_leave_the_context_as_it_is(self, engine: ChunkReuseEngine) -> None:
        context, pieces = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        before = context.relocated, context.gaps, context.levels, context.n
        layer = max(i for i, spec in enumerate(engine.space.layers) if spec.blocked)
        rows = np.arange(pieces[0][1], context.n, dtype=np.int32)
        engine.chunks.deviations(context, rows, layer, "v")
        assert (context.relocated, context.gaps, context.levels, context.n) == before
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])
        suffix = random_tokens(engine, 5, seed=3)
        assert np.array_equal(
            engine.chunks.recompute_rows(context, gap, suffix), engine.chunks.recompute_rows(twin, gap, suffix)
        )
        nothing = engine.chunks.deviations(context, rows[:0], layer, "k")
        assert [part.shape for part in nothing] == [(0,), (0,)]

    def test_a_context_reports_relocated_rows_and_those_computed_on_them(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine, ids[:4])
        engine.chunks.insert_rows(
            context, ids[: 2 * size], list(relocations_of(views, 2, 2 * size - 2, 6)), "approx~kl-0.02"
        )
        n = 4 + 2 * size
        assert (context.gaps, context.relocated) == (((4, 6),), ((6, n),))
        engine.chunks.recompute_rows(context, np.array([4, 5, 6, 20], np.int32), ids[:size])
        assert list(context.relocated) == [(7, 20), (21, n)]
        levels = [run.level for run in context.levels for _ in range(run.start, run.end)]
        # Rows before all relocated ones are exact; relocated ones and those computed on them are at the level.
        assert levels == [EXACT] * 7 + ["approx~kl-0.02"] * (n + size - 7)
        keys = [bytes([i]) * 32 for i in range(3)]
        exported = [parse(data).header.level for data in engine.export(context, keys, ROOT, 0)]
        assert exported == ["approx~kl-0.02"] * 3
        # Rows recomputed on exact ones are exact; those computed earlier on relocated ones are not.
        engine.chunks.recompute_rows(context, np.arange(7, n, dtype=np.int32), ids[:1])
        assert not context.relocated
        levels = [run.level for run in context.levels for _ in range(run.start, run.end)]
        assert levels == [EXACT] * n + ["approx~kl-0.02"] * (size + 1)
        assert engine.crop(context, n)
        assert [run.level for run in context.levels] == [EXACT]

    def test_cropping_forgets_relocated_rows(self, engine: ChunkReuseEngine) -> None:
        context, pieces = self.shuffled(engine)
        end = pieces[1][2]
        assert engine.crop(context, end - 2)
        assert list(context.relocated) == [(pieces[0][1], end - 2)]
        assert not context.gaps
        assert engine.crop(context, pieces[0][1])
        assert not context.relocated
        assert [run.level for run in context.levels] == [EXACT]
        ids = random_tokens(engine, 9, seed=4)
        whole = engine.prefill(engine.new_context(), np.concatenate([context.tokens, ids]))
        assert self.close(engine.prefill(context, ids), whole)

    def test_a_context_with_gaps_is_not_used(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine)
        engine.chunks.insert_rows(context, ids[: 2 * size], list(relocations_of(views, 3, size, 3)), LEVEL)
        assert list(context.gaps) == [(0, 3), (3 + size, 2 * size)]
        assert "recompute_rows" in str(raises(EngineError, engine.prefill, context, ids[:2]))
        raises(EngineError, engine.export, context, [ROOT], ROOT, 0)
        raises(EngineError, engine.load, context, views[2:3])
        raises(EngineError, engine.chunks.recompute_rows, context, ids[:0], ids[:2])
        raises(EngineError, engine.chunks.recompute_rows, context, np.arange(2 * size - 1, dtype=np.int32), ids[:2])
        rows = np.concatenate([np.arange(3), np.arange(3 + size, 2 * size)]).astype(np.int32)
        assert self.close(
            engine.chunks.recompute_rows(context, rows, ids[:2]),
            engine.prefill(self.start(engine), np.append(ids[: 2 * size], ids[:2])),
        )

    def test_two_places_one_behind_the_other(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        context = self.start(engine)
        engine.chunks.insert_rows(context, ids[:size], list(relocations_of(views, 0, size, 0)), LEVEL)
        engine.chunks.insert_rows(context, ids[size : size + 5], [], LEVEL)
        engine.chunks.insert_rows(
            context, ids[size + 5 :], list(relocations_of(views, size + 5, len(ids) - size - 5, size + 5)), LEVEL
        )
        assert context.gaps == ((size, size + 5),)
        logits = engine.chunks.recompute_rows(context, np.arange(size, size + 5, dtype=np.int32), ids[:4])
        assert self.close(logits, engine.prefill(engine.new_context(), np.concatenate([ids, ids[:4]])))

    def test_rows_are_placed_behind_blocks_that_are_still_on_their_way(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size = engine.space.block_tokens
        suffix = random_tokens(engine, 5, seed=3)
        whole = engine.prefill(engine.new_context(), np.concatenate([ids, suffix]))
        gap = np.arange(2 * size, 2 * size + 3, dtype=np.int32)
        moves = list(relocations_of(views, 2 * size + 3, len(ids) - 2 * size - 3, 2 * size + 3))
        for compare in (False, True):
            context, requested = self.start(engine), list[int]()
            loading = engine.load(context, views[:2], None, requested.append)
            engine.chunks.insert_rows(context, ids[2 * size :], moves, LEVEL)
            if compare:
                distance, length = engine.chunks.deviations(
                    context, gap + 3, max(i for i, s in enumerate(engine.space.layers) if s.blocked), "v"
                )
                assert (distance <= 1e-8 * length).all()
            assert self.close(engine.chunks.recompute_rows(context, gap, suffix), whole)
            loading.wait()
            assert requested

        def cut(layer: int) -> None:
            raise LinkDownError("the link was cut")

        context = self.start(engine)
        loading = engine.load(context, views[:2], None, cut)
        engine.chunks.insert_rows(context, ids[2 * size :], moves, LEVEL)
        raises(LinkDownError, engine.chunks.recompute_rows, context, gap, suffix)
        raises(LinkDownError, loading.wait)
        raises(EngineError, engine.prefill, context, suffix)

    def test_coded_blocks_are_relocated_as_what_they_decode_to(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        codec = Codec(engine.space, ("0" * 64, plain_profile(engine.space, views)))
        engine.codec = codec  # type: ignore[misc]
        head, suffix = random_tokens(engine, 7, seed=1), random_tokens(engine, 5, seed=2)

        def logits_of(before: Sequence[BlockView]) -> Logits:
            context = self.start(engine, head)
            engine.chunks.insert_rows(context, ids[3:-2], list(relocations_of(before, 3, len(ids) - 5, 7)), LEVEL)
            return engine.chunks.recompute_rows(context, ids[:0], suffix)

        packed = [
            parse(codec.encode(view, level)) for view, level in zip(views, [PACKED, EXACT, PACKED, PACKED, EXACT])
        ]
        assert np.array_equal(logits_of(packed), logits_of(views))
        coded = [parse(codec.encode(view, "kl-0.05")) for view in views]
        assert np.array_equal(logits_of(coded), logits_of([parse(codec.decode(view)) for view in coded]))

    def test_invalid_relocations_change_nothing(self, engine: ChunkReuseEngine) -> None:
        ids, views = self.source(engine)
        size, space = engine.space.block_tokens, engine.space
        context, twin = self.start(engine, ids[:5]), self.start(engine, ids[:5])
        good = list(relocations_of(views, 0, 2 * size, 5))
        two = ids[: 2 * size]
        other = _named(views[1], space=bytes(32))
        unturned = _named(views[1], rope_at=-1)
        shifted = Relocation(5 + size, views[1], 1, size - 1)
        beyond = Relocation(5 + size, views[1], 1, size)
        foreign = (Relocation(5 + size, view, 0, size) for view in (other, unturned))
        for wrong in (*foreign, shifted, beyond, Relocation(5 + size, views[1], -1, 2)):
            error = raises(RelocationError, engine.chunks.insert_rows, context, two, [good[0], wrong], LEVEL)
            assert isinstance(error, RelocationError)
            assert (error.index, error.key) == (1, wrong.view.header.key)
        overlap, before = Relocation(4 + size, views[1], 0, size), Relocation(4, views[0], 0, size)
        for moves in ([good[0], overlap], [before], [good[0], Relocation(5 + size, views[1], 0, 0)], good[::-1]):
            raises(EngineError, engine.chunks.insert_rows, context, two, moves, LEVEL)
        raises(EngineError, engine.chunks.insert_rows, context, ids[: 2 * size - 1], good, LEVEL)
        for level in (EXACT, PACKED, "kl-0.05"):
            raises(EngineError, engine.chunks.insert_rows, context, two, good, level)
        raises(
            TokenRangeError,
            engine.chunks.insert_rows,
            context,
            np.append(two, space.vocab_size).astype(np.int32),
            good,
            LEVEL,
        )
        raises(ContextTooLongError, engine.chunks.insert_rows, context, np.zeros(space.max_tokens, np.int32), [], LEVEL)
        for rows in ([5], [-1], [3, 2], [3, 3], [[1, 2]]):
            raises(EngineError, engine.chunks.recompute_rows, context, np.array(rows, np.int32), ids[:2])
            raises(EngineError, engine.chunks.deviations, context, np.array(rows, np.int32), 0, "v")
        one = np.array([1], np.int32)
        raises(EngineError, engine.chunks.deviations, context, one, len(space.layers), "v")
        raises(EngineError, engine.chunks.recompute_rows, context, one, ids[:0])
        assert (context.n, context.relocated, context.gaps) == (5, (), ())
        assert np.array_equal(engine.prefill(context, ids[:3]), engine.prefill(twin, ids[:3]))

    def test_a_corrupt_plane_is_never_placed(self, engine: ChunkReuseEngine) -> None:
        ids = random_tokens(engine, 4 * engine.space.block_tokens)
        blocks = [data.copy() for data in seal(engine, ids).blocks]
        rng = np.random.default_rng(5)
        codec = Codec(engine.space)
        engine.codec = codec  # type: ignore[misc]
        for number in (0, 1, 3):
            for packed in (False, True):
                before = [codec.encode(parse(data), PACKED) if packed else data for data in blocks]
                data = before[number] = before[number].copy()
                planes = [p for p in parse(data).layout.planes if p.nbytes]
                plane = planes[int(rng.integers(len(planes)))]
                data[parse(data).offset(plane.layer, plane.role) + int(rng.integers(plane.nbytes))] ^= 0x10
                context, twin = self.start(engine, ids[:7]), self.start(engine, ids[:7])
                moves = list(relocations_of([parse(one) for one in before], 2, len(ids) - 4, 7))
                error = raises(RelocationError, engine.chunks.insert_rows, context, ids[2:-2], moves, LEVEL)
                assert isinstance(error, RelocationError)
                assert (error.index, error.key) == (number, parse(data).header.key)
                assert context.n == 7
                assert np.array_equal(engine.prefill(context, ids[:3]), engine.prefill(twin, ids[:3]))

    def test_more_rows_than_go_through_the_model_together(self, engine: ChunkReuseEngine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, min(40 * size, engine.space.max_tokens - 64))
        views = [parse(data) for data in seal(engine, ids).blocks]
        context = self.start(engine, random_tokens(engine, 3, seed=1))
        before = list(relocations_of(views, 0, len(views) * size, 3))
        engine.chunks.insert_rows(context, ids, before[1::2], LEVEL)
        rows = np.arange(3, context.n, dtype=np.int32)
        odd = rows[rows % 3 > 0]
        rest = np.union1d(odd, np.concatenate([np.arange(a, b) for a, b in context.gaps])).astype(np.int32)
        distance, length = engine.chunks.deviations(
            context, odd, max(i for i, s in enumerate(engine.space.layers) if s.blocked), "v"
        )
        assert len(distance) == len(length) == len(odd)
        engine.chunks.recompute_rows(context, rest, ids[:3])
        whole = engine.prefill(engine.new_context(), np.concatenate([context.tokens, ids[:4]]))
        logits = engine.chunks.recompute_rows(context, rows, ids[:4])
        assert logits.shape == whole.shape
        assert engine.crop(context, len(rows) + 3)
        assert [run.level for run in context.levels] == [EXACT]


def _named(view: BlockView, **fields: object) -> BlockView:
    """The block with another header, as one that another node made."""
    return BlockView(msgspec.structs.replace(view.header, **fields), view.layout, view.start, view.buffer)
