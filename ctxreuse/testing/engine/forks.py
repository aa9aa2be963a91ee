"""ForkContract: contexts that continue one context go on as it would, and none changes another."""

from __future__ import annotations

import numpy as np

from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.engines.fork import fork_context
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.engine.steps import StepContract
from ctxreuse.testing.sealed import continuation, random_tokens

__all__ = ["ForkContract"]


class ForkContract(StepContract):
    """Part of `EngineContract`."""

    def test_forks_go_on_as_their_origin_would(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        for count in (3, 2 * size, 2 * size + 5):
            ids = random_tokens(engine, count)
            origin, forks = self._forked(engine, ids, 3)
            for number, context in enumerate([*forks, origin]):
                more = random_tokens(engine, 3, seed=number + 1)
                logits = self._go_on(engine, context, np.concatenate([ids, more]))
                whole = engine.prefill(engine.new_context(), np.concatenate([ids, more]))
                assert self.close(logits, whole), f"fork {number} of {count} tokens"
                assert np.array_equal(context.tokens, np.concatenate([ids, more]))

    def test_what_is_done_to_one_fork_changes_no_other(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        ids, more = random_tokens(engine, 2 * size + 5), random_tokens(engine, 4, seed=1)
        origin, (first, second) = self._forked(engine, ids, 2)
        expected = continuation(engine, first, self._go_on(engine, first, np.concatenate([ids, more])), 3)
        # The origin goes back and on with other tokens; the first fork has gone; the origin's own forks are others.
        engine.crop(origin, 0)
        engine.prefill(origin, random_tokens(engine, 2 * size + 9, seed=2))
        del first
        engine.prefill(engine.new_context(4 * size), random_tokens(engine, 3 * size, seed=3))
        got = continuation(engine, second, self._go_on(engine, second, np.concatenate([ids, more])), 3)
        assert all(self.close(a, b) for a, b in zip(got, expected))

    def test_a_fork_forks(self, engine: Engine) -> None:
        ids, more = random_tokens(engine, engine.space.block_tokens + 3), random_tokens(engine, 9, seed=1)
        _, (fork,) = self._forked(engine, ids, 1)
        self._go_on(engine, fork, np.concatenate([ids, more[:5]]))
        (grandchild,) = fork_context(engine, fork, [bytes([number]) * 32 for number in range(1)], 1)
        logits = self._go_on(engine, grandchild, np.concatenate([ids, more]))
        assert self.close(logits, engine.prefill(engine.new_context(), np.concatenate([ids, more])))

    def _forked(self, engine: Engine, ids: Tokens, count: int) -> tuple[Context, list[Context]]:
        origin = engine.new_context()
        engine.prefill(origin, ids)
        keys = [bytes([number]) * 32 for number in range(len(ids) // engine.space.block_tokens)]
        return origin, fork_context(engine, origin, keys, count, len(ids) + 20)

    def _go_on(self, engine: Engine, context: Context, ids: Tokens) -> Logits:
        return engine.prefill(context, ids[context.n :])
