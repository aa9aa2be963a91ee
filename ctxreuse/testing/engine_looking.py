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


class EngineLookingContract(MovingScene):
    """Inherit, and give a fixture ``engine``."""

    def test_one_more_look_has_one_more_share_of_attention(self, engine: MovingEngine) -> None:
        live = self.start(engine, random_tokens(engine, 3 * engine.space.block_tokens))
        rows, suffix = np.arange(live.n, dtype=np.int32), random_tokens(engine, 3, seed=1)
        layers = len(engine.space.layers)

        def look(looks: int, layers: int = layers) -> npt.NDArray[np.float64]:
            return engine.attention(live, rows, suffix, looks=looks, layers=layers).astype(np.float64)

        # On rows that are what computing them gives, a look adds a softmax for each head and layer, and all of it falls
        # on what stands before.
        suffix_only, one_more, two_more = look(3), look(4), look(5)
        one = (one_more - suffix_only).sum()
        assert abs(one - round(one)) < 1e-3
        assert round(one) >= sum(spec.kv_heads for spec in engine.space.layers)
        assert abs((two_more - one_more).sum() - one) < 1e-3
        # What looks from the row before the last one does not see that.
        assert abs((two_more - one_more)[-1]) < 1e-4
        assert min(suffix_only.min(), (one_more - suffix_only).min()) > -1e-4
        # Every softmax of the suffix has a share of at most 1 here; the rest falls on the suffix.
        assert 0 < suffix_only.sum() < 3 * one
        # Layers add up, and beyond the last there are none.
        sums = [look(5, some).sum() for some in range(1, layers + 1)]
        assert sums == sorted(sums)
        assert np.array_equal(look(5, layers + 3), two_more)
        some = np.array([2, 7, 8], np.int32)
        found = engine.attention(live, some, suffix, looks=3, layers=layers)
        assert np.array_equal(found, suffix_only[some].astype(np.float32))

    def test_a_look_sees_nothing_of_gaps_and_of_what_else_is_new(self, engine: MovingEngine) -> None:
        live, _ = self.shuffled(engine)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        rows, suffix = np.arange(live.n, dtype=np.int32), random_tokens(engine, 9, seed=1)
        first = live.n + 7
        seen = engine.attention(live, rows, suffix, looks=2, layers=1)
        hidden = gap[gap < first]
        assert len(hidden)
        assert not seen[hidden].any()
        # In the first layer what a token asks for is a matter of itself and of its position.
        other = np.concatenate([random_tokens(engine, 7, seed=2), suffix[7:]]).astype(np.int32)
        assert np.array_equal(engine.attention(live, rows, other, looks=2, layers=1), seen)
        more = engine.attention(live, rows, suffix, looks=9, layers=1)
        assert more.sum() > 2 * seen.sum()

    def test_a_look_leaves_the_context_as_it_is(self, engine: MovingEngine) -> None:
        live, _ = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        before = live.moved, live.gaps, live.levels, live.n, live.tokens.tolist()
        suffix, rows = random_tokens(engine, 5, seed=3), np.arange(live.n, dtype=np.int32)
        layers = len(engine.space.layers)
        for looks in (2, 14):
            found = engine.attention(live, rows, suffix, looks=looks, layers=layers)
            assert found.shape == (live.n,)
            assert found.dtype == np.float32
            assert np.isfinite(found).all()
            assert (live.moved, live.gaps, live.levels, live.n, live.tokens.tolist()) == before
            assert np.array_equal(found, engine.attention(live, rows, suffix, looks=looks, layers=layers))
            assert engine.attention(live, rows[:0], suffix, looks=looks, layers=1).shape == (0,)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in live.gaps])
        assert np.array_equal(engine.mend(live, gap, suffix), engine.mend(twin, gap, suffix))
        assert np.array_equal(engine.prefill(live, suffix), engine.prefill(twin, suffix))

    def test_a_look_at_what_is_not_there(self, engine: MovingEngine) -> None:
        live, twin = (self.start(engine, random_tokens(engine, 5)) for _ in range(2))
        one, suffix = np.array([1], np.int32), random_tokens(engine, 2, seed=1)

        def refused(kind: type[Exception], rows: object, tokens: Tokens, looks: int = 2, layers: int = 1) -> None:
            given = np.asarray(rows, np.int32)
            raises(kind, lambda: engine.attention(live, given, tokens, looks=looks, layers=layers))

        for rows in ([5], [-1], [3, 2], [3, 3], [[1, 2]]):
            refused(EngineError, rows, suffix)
        refused(EngineError, one, suffix, looks=0)
        refused(EngineError, one, suffix, layers=0)
        refused(EngineError, one, suffix[:0])
        refused(TokenRangeError, one, np.array([engine.space.vocab_size], np.int32))
        refused(ContextTooLongError, one, np.zeros(engine.space.max_tokens, np.int32))
        assert (live.n, live.moved, live.gaps) == (5, (), ())
        assert np.array_equal(engine.prefill(live, suffix), engine.prefill(twin, suffix))
