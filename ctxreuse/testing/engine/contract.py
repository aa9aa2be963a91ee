"""EngineContract: what any engine must do, as tests to inherit from.

::

    class TestMine(EngineContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

The engine should be small (a context of six blocks is prefilled some twenty times). ``tolerance`` bounds the difference
of logits between a resumed and a whole prefill, relative to the largest logit; a restored context that goes on like
the live one must have the same bits whatever the tolerance.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import parse
from ctxreuse.engines.base import Context, Engine
from ctxreuse.engines.scoring import TokenScores, score_logits, score_tokens
from ctxreuse.errors import ContextTooLongError, EngineError, FormatError, LinkDownError, TokenRangeError
from ctxreuse.identity.keys import ROOT
from ctxreuse.testing.engine.forks import ForkContract
from ctxreuse.testing.engine.partial_blocks import PartialBlockContract
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, continuation, random_tokens, resume, seal, views

__all__ = ["EngineContract", "Sealed", "continuation", "random_tokens", "resume", "seal", "views"]

_BLOCKS = 6
#: Nats by which scores of a pass may differ from those of single tokens, as engines round by the length of a pass.
_SCORE = 0.02


class EngineContract(ForkContract, PartialBlockContract):
    """Inherit, and give a fixture ``engine``."""

    def test_tokens_and_counts_follow_what_was_processed(self, engine: Engine) -> None:
        ids = random_tokens(engine, 2 * engine.space.block_tokens + 3)
        context = engine.new_context()
        assert context.n == 0
        assert context.states == ()
        assert len(context.tokens) == 0
        logits = engine.prefill(context, ids[:5])
        assert logits.shape == (engine.space.vocab_size,)
        assert logits.dtype == np.float32
        engine.prefill(context, ids[5:])
        assert context.n == len(ids)
        assert np.array_equal(context.tokens, ids)
        assert context.nbytes > 0

    def test_scores_are_those_of_one_token_after_the_other(self, engine: Engine) -> None:
        ids = random_tokens(engine, engine.space.block_tokens + 9)
        context, plain = engine.new_context(), engine.new_context()
        found = score_tokens(engine, context, ids[:-1], ids[1:], 3)
        assert np.array_equal(context.tokens, ids[:-1])
        rows = [engine.prefill(plain, ids[i : i + 1]) for i in range(len(ids) - 1)]
        expected = TokenScores.joined([score_logits(row, int(target), 3) for row, target in zip(rows, ids[1:])])
        assert np.abs(found.logprobs - expected.logprobs).max() < _SCORE
        assert np.abs(found.top_logprobs - expected.top_logprobs).max() < _SCORE
        assert found.top.shape == (len(ids) - 1, 3)
        likeliest = found.ranks == 1
        assert np.array_equal(found.top[likeliest, 0], ids[1:][likeliest])
        # It goes on as any other context does.
        assert self.close(engine.prefill(context, ids[-1:]), engine.prefill(plain, ids[-1:]))

    def test_same_prefill_gives_the_same_bits(self, engine: Engine) -> None:
        ids = random_tokens(engine, 3 * engine.space.block_tokens + 1)
        first, second = engine.prefill(engine.new_context(), ids), engine.prefill(engine.new_context(len(ids)), ids)
        assert np.array_equal(first, second)

    def test_prefill_in_parts_equals_a_whole_one(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, 3 * size + 7)
        whole = engine.prefill(engine.new_context(), ids)
        for cut in (1, size - 1, size, 2 * size + 3, len(ids) - 1):
            context = engine.new_context()
            engine.prefill(context, ids[:cut])
            assert self.close(engine.prefill(context, ids[cut:]), whole), f"cut at {cut}"

    def test_a_restored_context_continues_with_the_same_bits(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids, suffix = random_tokens(engine, _BLOCKS * size), random_tokens(engine, size // 2, seed=1)
        for end in (size, 2 * size, _BLOCKS * size):
            context = engine.new_context()
            engine.prefill(context, ids[:end])
            sealed = Sealed(engine, context)
            expected = continuation(engine, context, engine.prefill(context, suffix), 3)
            copy, logits = resume(engine, sealed, end, suffix)
            got = continuation(engine, copy, logits, 3)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected)), f"resumed at {end}"
            assert np.array_equal(copy.tokens, context.tokens)

    def test_resumed_equals_a_whole_prefill(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, _BLOCKS * size + 9)
        whole = engine.prefill(engine.new_context(), ids)
        for end in range(size, len(ids), size):
            _, logits = resume(engine, seal(engine, ids[:end]), end, ids[end:])
            assert self.close(logits, whole), f"resumed at {end}"

    def test_two_forks_of_one_prefix_do_not_touch_each_other(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        prefix = random_tokens(engine, 2 * size)
        sealed = seal(engine, prefix)
        left, right = random_tokens(engine, size + 5, seed=2), random_tokens(engine, size + 5, seed=3)
        first, a = resume(engine, sealed, 2 * size, left)
        _, b = resume(engine, sealed, 2 * size, right)
        _, again = resume(engine, sealed, 2 * size, left)
        assert np.array_equal(a, again)
        assert self.close(b, engine.prefill(engine.new_context(), np.concatenate([prefix, right])))
        assert np.array_equal(first.tokens[: 2 * size], prefix)

    def test_export_load_export_gives_the_same_bytes(self, engine: Engine) -> None:
        end = 3 * engine.space.block_tokens
        sealed = seal(engine, random_tokens(engine, end))
        copy, _ = resume(engine, sealed, end, random_tokens(engine, 2, seed=1))
        again = Sealed(engine, copy)
        assert len(sealed.blocks) == 3
        assert [a.tobytes() for a in again.blocks] == [b.tobytes() for b in sealed.blocks]
        if engine.space.needs_state:
            assert again.states[end].tobytes() == sealed.states[end].tobytes()

    def test_blocks_say_what_they_are(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed = seal(engine, random_tokens(engine, 2 * size))
        for number, data in enumerate(sealed.blocks):
            view = parse(data, space=engine.space.digest)
            ids = sealed.tokens[number * size : (number + 1) * size]
            assert view.covers(sealed.keys[number], ids)
            assert view.header.parent == (sealed.keys[number - 1] if number else ROOT)
            assert (view.header.kind, view.header.end) == ("block", (number + 1) * size)
            view.verify()
        for at, data in sealed.states.items():
            view = parse(data, space=engine.space.digest)
            assert view.covers(sealed.keys[at // size - 1], sealed.tokens[at - size : at])
            assert (view.header.kind, view.header.end) == ("state", at)
            view.verify()

    def test_export_of_a_part_equals_that_part_of_the_whole(self, engine: Engine) -> None:
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, 3 * engine.space.block_tokens))
        sealed = Sealed(engine, context)
        part = list(engine.export(context, sealed.keys[1:], sealed.keys[0], 1))
        assert [a.tobytes() for a in part] == [b.tobytes() for b in sealed.blocks[1:]]

    def test_states_are_stored_at_block_boundaries(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, 2 * size + 3))
        for token in random_tokens(engine, size, seed=1):
            engine.prefill(context, np.array([token], np.int32))
        if engine.space.needs_state:
            assert {2 * size, 3 * size} <= set(context.states)
        else:
            assert context.states == ()
        assert all(at % size == 0 and 0 < at <= context.n for at in context.states)

    def test_crop_goes_back_to_where_it_was(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids, other = random_tokens(engine, 2 * size), random_tokens(engine, size + 2, seed=4)
        context = engine.new_context()
        engine.prefill(context, ids)
        before = context.tokens
        expected = engine.prefill(context, other)
        assert engine.crop(context, 2 * size)
        assert context.n == 2 * size
        assert np.array_equal(context.tokens, ids)
        assert np.array_equal(before, ids)
        assert np.array_equal(engine.prefill(context, other), expected)
        assert engine.crop(context, 0)
        assert context.n == 0
        assert self.close(engine.prefill(context, ids), engine.prefill(engine.new_context(), ids))

    def test_crop_that_cannot_be_done_changes_nothing(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, _BLOCKS * size + 3)
        context, twin = engine.new_context(), engine.new_context()
        engine.prefill(context, ids)
        engine.prefill(twin, ids)
        odd = size + 1
        done = engine.crop(context, odd)
        if not engine.space.needs_state:
            assert done
        if done:
            assert context.n == odd
            engine.prefill(context, ids[odd:])
            assert np.array_equal(context.tokens, ids)
        else:
            assert context.n == len(ids)
            one = ids[:1]
            assert np.array_equal(engine.prefill(context, one), engine.prefill(twin, one))
        raises(EngineError, engine.crop, context, context.n + 1)
        raises(EngineError, engine.crop, context, -1)

    def test_growth_far_beyond_the_reserve(self, engine: Engine) -> None:
        ids = random_tokens(engine, min(700, engine.space.max_tokens))
        small, large = engine.new_context(1), engine.new_context(len(ids))
        for at in range(0, len(ids), 70):
            a, b = engine.prefill(small, ids[at : at + 70]), engine.prefill(large, ids[at : at + 70])
            assert np.array_equal(a, b)

    def test_prompts_that_cannot_be_processed_change_nothing(self, engine: Engine) -> None:
        ids = random_tokens(engine, 5)
        context = engine.new_context()
        engine.prefill(context, ids)
        limit = engine.space.max_tokens
        raises(EngineError, engine.prefill, context, ids[:0])
        raises(TokenRangeError, engine.prefill, context, np.array([1, engine.space.vocab_size], np.int32))
        raises(TokenRangeError, engine.prefill, context, np.array([-1], np.int32))
        error = raises(ContextTooLongError, engine.prefill, context, np.zeros(limit, np.int32))
        assert str(limit) in str(error)
        assert str(limit + 5) in str(error)
        raises(ContextTooLongError, engine.new_context, limit + 1)
        assert context.n == 5
        engine.prefill(context, ids)

    def test_exports_that_do_not_exist_are_refused(self, engine: Engine) -> None:
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, engine.space.block_tokens + 1))
        raises(EngineError, engine.export, context, [ROOT, ROOT], ROOT, 0)
        raises(EngineError, engine.export, context, [ROOT], ROOT, -1)
        raises(EngineError, engine.export_state, context, ROOT, ROOT, engine.space.block_tokens + 1)

    def test_loads_that_do_not_fit_are_refused_before_anything_changes(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed = seal(engine, random_tokens(engine, 3 * size))
        blocks, state = views(engine, sealed, 3 * size)
        context = engine.new_context()
        swapped = [blocks[1], blocks[0], blocks[2]]
        other = seal(engine, random_tokens(engine, 3 * size, seed=9))
        strange = [blocks[0], parse(other.blocks[1]), blocks[2]]
        for wrong in (swapped, strange, blocks[1:]):
            raises(FormatError, engine.load, context, wrong, state)
            assert context.n == 0
        if engine.space.needs_state:
            assert state is not None
            raises(EngineError, engine.load, context, blocks, None)
            raises(FormatError, engine.load, context, blocks[:2], state)
            raises(FormatError, engine.load, context, blocks, blocks[2])
            raises(FormatError, engine.load, context, [*blocks[:2], state], state)
        else:
            raises(EngineError, engine.load, context, blocks, blocks[2])
        engine.load(context, blocks, state).wait()
        assert np.array_equal(context.tokens, sealed.tokens)
        raises(FormatError, engine.load, context, blocks, state)
        assert context.n == 3 * size
        engine.prefill(context, sealed.tokens[:1])
        raises(EngineError, engine.load, context, blocks, state)

    def test_blocks_continue_a_context_at_a_boundary(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, _BLOCKS * size + 5)
        whole = engine.prefill(engine.new_context(), ids)
        sealed = seal(engine, ids[: _BLOCKS * size])
        blocks, state = views(engine, sealed, _BLOCKS * size)
        for cut in range(1, _BLOCKS):
            context = engine.new_context()
            engine.prefill(context, ids[: cut * size])
            loading = engine.load(context, blocks[cut:], state)
            assert context.n == _BLOCKS * size
            assert self.close(engine.prefill(context, ids[context.n :]), whole), f"continued at block {cut}"
            loading.wait()
            assert np.array_equal(context.tokens, ids)
            again = list(engine.export(context, sealed.keys[cut:], sealed.keys[cut - 1], cut))
            assert [a.tobytes() for a in again] == [b.tobytes() for b in sealed.blocks[cut:]]
        if not engine.space.needs_state:  # two loads, one behind the other
            context = engine.new_context()
            engine.load(context, blocks[:2]).wait()
            engine.load(context, blocks[2:]).wait()
            assert self.close(engine.prefill(context, ids[context.n :]), whole)

    def test_layers_are_read_only_when_they_are_ready(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, 2 * size + 3)
        sealed = seal(engine, ids[: 2 * size])
        blanks = [data.copy() for data in sealed.blocks]
        blocks = [parse(data) for data in blanks]
        _, state = views(engine, sealed, 2 * size)
        whole = {plane.layer for plane in blocks[0].layout.planes if plane.nbytes}
        for view, data in zip(blocks, blanks):
            data[view.offset(*view.layout.planes[0][:2]) :] = 0
        requested: list[int] = []
        last: dict[int, int] = {}

        def put(layer: int, source: list[npt.NDArray[np.uint8]]) -> None:
            for view, data, other in zip(blocks, blanks, source):
                for role in ("k", "v"):
                    at = view.offset(layer, role)
                    end = at + view.layout.planes[view.layout.index[layer, role]].nbytes
                    data[at:end] = other[at:end]

        def arrive(layer: int) -> None:
            requested.append(layer)
            me = threading.get_ident()
            if me in last:  # it has copied that layer, so the planes may go
                put(last[me], [np.zeros_like(data) for data in blanks])
            last[me] = layer
            put(layer, sealed.blocks)

        context = engine.new_context()
        loading = engine.load(context, blocks, state, arrive)
        logits = engine.prefill(context, ids[2 * size :])
        loading.wait()
        assert sorted(requested) == sorted(whole)
        assert self.close(logits, engine.prefill(engine.new_context(), ids))

    def test_a_layer_that_never_comes_ends_the_context(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed = seal(engine, random_tokens(engine, 2 * size))
        blocks, state = views(engine, sealed, 2 * size)
        layers = sorted({plane.layer for plane in blocks[0].layout.planes if plane.nbytes})

        def cut(layer: int) -> None:
            if layer == layers[-1]:
                raise LinkDownError("the link was cut")

        if not layers:
            return
        context = engine.new_context()
        loading = engine.load(context, blocks, state, cut)
        raises(LinkDownError, engine.prefill, context, sealed.tokens[:3])
        raises(LinkDownError, loading.wait)
        raises(EngineError, engine.prefill, context, sealed.tokens[:3])

    def test_first_rows_are_those_that_a_prefill_stores(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, 3 * size)
        sealed = seal(engine, ids)
        positions = np.array([2 * size + 1, 0, size, size - 1, 3 * size - 1], np.int32)
        found = engine.first_rows(ids[positions], positions)
        if found is None:
            return
        layer, rows = found
        spec = engine.space.layers[layer]
        assert layer == 0
        assert rows.shape == (spec.kv_heads, len(positions), spec.k_dim)
        assert rows.dtype == np.float32
        if engine.space.dtype == "float32":
            for i, at in enumerate(positions):
                stored = parse(sealed.blocks[at // size]).array(layer, "k")[:, at % size].astype(np.float32)
                assert np.abs(stored - rows[:, i]).max() <= 1e-5 * np.abs(stored).max()

    def test_a_corrupt_plane_is_never_computed_with(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed = seal(engine, random_tokens(engine, 2 * size))
        rng = np.random.default_rng(5)
        for data in [*sealed.blocks, *sealed.states.values()]:
            view = parse(data)
            planes = [p for p in view.layout.planes if p.nbytes]
            for number in rng.choice(len(planes), min(3, len(planes)), replace=False):
                plane = planes[number]
                at = view.offset(plane.layer, plane.role) + int(rng.integers(plane.nbytes))
                data[at] ^= 0x10
                context = engine.new_context()
                error = raises(FormatError, self._use, engine, context, sealed)
                assert plane.role in str(error)
                data[at] ^= 0x10
        self._use(engine, engine.new_context(), sealed)

    def _use(self, engine: Engine, context: Context, sealed: Sealed) -> None:
        blocks, state = views(engine, sealed, len(sealed.tokens))
        loading = engine.load(context, blocks, state)
        try:
            engine.prefill(context, sealed.tokens[:3])
        except FormatError:
            raises(FormatError, loading.wait)
            raises(EngineError, engine.prefill, context, sealed.tokens[:3])
            raise
        loading.wait()
