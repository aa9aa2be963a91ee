"""What an engine must do that tells where the end of a prompt looks; part of `EngineMovingContract`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ContextTooLongError, EngineError, TokenRangeError
from ctxreuse.keys import Tokens
from ctxreuse.testing.moving import MovingEngine, MovingScene
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import random_tokens

__all__ = ["EngineLookingContract"]

_NONE: Tokens = np.zeros(0, np.int32)


class EngineLookingContract(MovingScene):
    """Inherit, and give a fixture ``engine``."""

    def test_one_more_look_has_one_more_share_of_attention(self, engine: MovingEngine) -> None:
        live = self.start(engine, random_tokens(engine, 3 * engine.space.block_tokens))
        rows, suffix = np.arange(live.n, dtype=np.int32), random_tokens(engine, 3, seed=1)

        def look(*looks: int) -> npt.NDArray[np.float64]:
            return engine.attention(live, rows, np.array(looks, np.int32), suffix).astype(np.float64)

        nobody, early, late = look(), look(4), look(live.n - 1)
        # On rows that are what computing them gives, a look adds a softmax for each head and layer, and all of it falls
        # on what stands before.
        one = (early - nobody).sum()
        assert abs(one - round(one)) < 1e-3
        assert round(one) >= sum(spec.kv_heads for spec in engine.space.layers)
        assert abs((late - nobody).sum() - one) < 1e-3
        assert np.abs((early - nobody)[5:]).max() < 1e-4
        assert min(nobody.min(), (early - nobody).min()) > -1e-4
        assert np.allclose(look(4, live.n - 1) - nobody, early + late - 2 * nobody, atol=1e-3)
        # Every softmax of the suffix has a share of at most 1 here; the rest falls on the suffix.
        assert 0 < nobody.sum() < 3 * one
        some = np.array([2, 7, 8], np.int32)
        assert np.array_equal(engine.attention(live, some, _NONE, suffix), nobody[some].astype(np.float32))

    def test_a_look_leaves_the_context_as_it_is(self, engine: MovingEngine) -> None:
        live, _ = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        before = live.moved, live.gaps, live.levels, live.n, live.tokens.tolist()
        suffix = random_tokens(engine, 5, seed=3)
        rows, looks = np.arange(live.n, dtype=np.int32), np.arange(live.n - 9, live.n, dtype=np.int32)
        found = engine.attention(live, rows, looks, suffix)
        assert found.shape == (live.n,)
        assert found.dtype == np.float32
        assert (live.moved, live.gaps, live.levels, live.n, live.tokens.tolist()) == before
        assert np.array_equal(found, engine.attention(live, rows, looks, suffix))
        assert engine.attention(live, rows[:0], looks, suffix).shape == (0,)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        assert np.array_equal(engine.mend(live, gap, suffix), engine.mend(twin, gap, suffix))
        assert np.array_equal(engine.prefill(live, suffix), engine.prefill(twin, suffix))

    def test_a_look_at_what_is_not_there(self, engine: MovingEngine) -> None:
        live, twin = (self.start(engine, random_tokens(engine, 5)) for _ in range(2))
        one, suffix = np.array([1], np.int32), random_tokens(engine, 2, seed=1)
        for rows in ([5], [-1], [3, 2], [3, 3], [[1, 2]]):
            raises(EngineError, engine.attention, live, np.array(rows, np.int32), _NONE, suffix)
            raises(EngineError, engine.attention, live, one, np.array(rows, np.int32), suffix)
        raises(EngineError, engine.attention, live, one, _NONE, suffix[:0])
        raises(TokenRangeError, engine.attention, live, one, _NONE, np.array([engine.space.vocab_size], np.int32))
        raises(ContextTooLongError, engine.attention, live, one, _NONE, np.zeros(engine.space.max_tokens, np.int32))
        assert (live.n, live.moved, live.gaps) == (5, (), ())
        assert np.array_equal(engine.prefill(live, suffix), engine.prefill(twin, suffix))
