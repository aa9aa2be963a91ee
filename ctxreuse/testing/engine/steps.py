"""StepContract: `Engine.step` advances several contexts at once, and none of them notices the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.errors import EngineError, FormatError, TokenRangeError
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import random_tokens, seal, views

__all__ = ["StepContract"]


def run_together(
    engine: Engine, contexts: Sequence[Context], prompts: Sequence[Tokens], limit: int | None = None
) -> list[Logits]:
    """Step until each context has all tokens of its prompt, and return the logits after the last ones."""
    begun, found = [context.n for context in contexts], dict[int, Logits]()
    while len(found) < len(contexts):
        waiting = [i for i in range(len(contexts)) if i not in found]
        before = [contexts[i].n for i in waiting]
        rest = [prompts[i][contexts[i].n - begun[i] :] for i in waiting]
        for i, at, logits in zip(
            waiting, before, engine.step([(contexts[i], r) for i, r in zip(waiting, rest)], limit=limit)
        ):
            assert contexts[i].n > at
            assert limit is None or not engine.batches or contexts[i].n - at <= limit
            assert (logits is None) == (contexts[i].n < begun[i] + len(prompts[i]))
            assert not isinstance(logits, Exception)
            if logits is not None:
                found[i] = logits
    return [found[i] for i in range(len(contexts))]


class StepContract:
    """Part of `EngineContract`."""

    #: Largest |difference| of logits between two ways to cut the same prefill, as a share of the largest |logit|.
    tolerance = 1e-5

    def close(self, a: Logits, b: Logits) -> bool:
        """True if two logits differ by rounding only."""
        return bool(np.abs(a - b).max() <= self.tolerance * np.abs(b).max())

    def test_contexts_that_step_together_are_as_if_alone(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        prompts = [random_tokens(engine, n, seed=n) for n in (3 * size + 5, 1, size, 2 * size - 1)]
        for limit in (None, size // 2, 1):
            contexts = [engine.new_context() for _ in prompts]
            for ids, context, logits in zip(prompts, contexts, run_together(engine, contexts, prompts, limit)):
                alone = engine.new_context()
                assert self.close(logits, engine.prefill(alone, ids)), f"{len(ids)} tokens, at most {limit} a step"
                assert np.array_equal(context.tokens, ids)
                assert [run.level for run in context.levels] == [run.level for run in alone.levels]

    def test_decoding_beside_a_prefill(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        short, long = random_tokens(engine, size + 3), random_tokens(engine, 4 * size, seed=1)
        more = random_tokens(engine, 8, seed=2)
        decoding, alone, other = engine.new_context(), engine.new_context(), engine.new_context()
        engine.prefill(decoding, short)
        engine.prefill(alone, short)
        last: Logits | None = None
        for i in range(len(more)):
            batch = [(decoding, more[i : i + 1])]
            if last is None:
                batch.append((other, long[other.n :]))
            logits, *rest = engine.step(batch, limit=size)
            assert isinstance(logits, np.ndarray)
            assert self.close(logits, engine.prefill(alone, more[i : i + 1]))
            if rest:
                assert not isinstance(rest[0], Exception)
                last = rest[0]
        assert last is not None
        assert self.close(last, engine.prefill(engine.new_context(), long))

    def test_a_draft_is_checked_in_one_pass_beside_others(self, engine: Engine) -> None:
        if engine.space.needs_state:
            return  # such a context cannot forget the part of a draft that was wrong
        size = engine.space.block_tokens
        ids, other = random_tokens(engine, size + 6), random_tokens(engine, 3, seed=1)
        context, beside, alone = engine.new_context(), engine.new_context(), engine.new_context()
        for one in (context, alone):
            engine.prefill(one, ids[: size - 2])
        expected = [engine.prefill(alone, ids[at : at + 1]) for at in range(size - 2, size + 3)]
        (checked, last) = engine.step([(context, ids[size - 2 : size + 3]), (beside, other)], limit=2, rows=[4, 1])
        assert isinstance(checked, np.ndarray)
        assert checked.shape == (4, engine.space.vocab_size)
        assert all(self.close(a, b) for a, b in zip(checked, expected[1:]))
        assert last is None or isinstance(last, np.ndarray)
        assert engine.crop(context, size)
        (after,) = engine.step([(context, ids[size : size + 1])])
        assert isinstance(after, np.ndarray)
        assert self.close(after, expected[2])

    def test_states_are_stored_where_a_prefill_in_slices_passes(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        prompts = [random_tokens(engine, n, seed=n) for n in (2 * size + 3, 3 * size)]
        contexts = [engine.new_context() for _ in prompts]
        run_together(engine, contexts, prompts, size // 2)
        for ids, context in zip(prompts, contexts):
            if engine.space.needs_state:
                assert len(ids) // size * size in context.states

    def test_a_context_that_loads_steps_with_the_others(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids, other = random_tokens(engine, 2 * size + 3), random_tokens(engine, size + 1, seed=1)
        blocks, state = views(engine, seal(engine, ids[: 2 * size]), 2 * size)
        context, beside = engine.new_context(), engine.new_context()
        loading = engine.load(context, blocks, state)
        found = run_together(engine, [context, beside], [ids[2 * size :], other])
        loading.wait()
        for logits, whole in zip(found, (ids, other)):
            assert self.close(logits, engine.prefill(engine.new_context(), whole))

    def test_one_that_cannot_go_on_does_not_harm_the_others(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids = random_tokens(engine, size + 2)
        good, twin = engine.new_context(), engine.new_context()
        engine.prefill(good, ids)
        engine.prefill(twin, ids)
        expected = [engine.prefill(twin, ids[i : i + 1]) for i in range(3)]
        beyond = np.array([engine.space.vocab_size], np.int32)
        logits, error = engine.step([(good, ids[:1]), (engine.new_context(), beyond)])
        assert isinstance(error, TokenRangeError)
        assert isinstance(logits, np.ndarray)
        assert self.close(logits, expected[0])
        error, logits = engine.step([(engine.new_context(), ids[:0]), (good, ids[1:2])])
        assert isinstance(error, EngineError)
        assert isinstance(logits, np.ndarray)
        assert self.close(logits, expected[1])
        sealed = seal(engine, ids[:size])
        data = sealed.blocks[0]
        planes = [plane for plane in parse(data).layout.planes if plane.nbytes]
        if planes:
            data[parse(data).offset(planes[-1].layer, planes[-1].role)] ^= 0x40
            blocks, state = views(engine, sealed, size)
            bad = engine.new_context()
            loading = engine.load(bad, blocks, state)
            logits, error = engine.step([(good, ids[2:3]), (bad, ids[:1])])
            assert isinstance(error, FormatError)
            assert isinstance(logits, np.ndarray)
            assert self.close(logits, expected[2])
            raises(FormatError, loading.wait)
