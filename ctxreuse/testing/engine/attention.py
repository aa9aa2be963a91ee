"""Contract of the attention probe: how much the end of a prompt attends to rows; part of `EngineChunksContract`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ContextTooLongError, EngineError, TokenRangeError
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.engine.chunk_contexts import ChunkContexts, ChunkReuseEngine
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import random_tokens

__all__ = ["EngineAttentionContract"]


class EngineAttentionContract(ChunkContexts):
    """Inherit, and give a fixture ``engine``."""

    def test_each_query_adds_one_share_of_attention(self, engine: ChunkReuseEngine) -> None:
        context = self.start(engine, random_tokens(engine, 3 * engine.space.block_tokens))
        rows, suffix = np.arange(context.n, dtype=np.int32), random_tokens(engine, 3, seed=1)
        layers = len(engine.space.layers)

        def probe(queries: int, layers: int = layers) -> npt.NDArray[np.float64]:
            return engine.chunks.attention(context, rows, suffix, queries=queries, layers=layers).astype(np.float64)

        # On computed rows each query adds a softmax a head and layer, all of it on the rows before.
        suffix_only, one_more, two_more = probe(3), probe(4), probe(5)
        one = (one_more - suffix_only).sum()
        assert abs(one - round(one)) < 1e-3
        assert round(one) >= sum(spec.kv_heads for spec in engine.space.layers)
        assert abs((two_more - one_more).sum() - one) < 1e-3
        # The query at the row before the last one does not see the last.
        assert abs((two_more - one_more)[-1]) < 1e-4
        assert min(suffix_only.min(), (one_more - suffix_only).min()) > -1e-4
        # Every softmax of the suffix has a share of at most 1 here; the rest falls on the suffix.
        assert 0 < suffix_only.sum() < 3 * one
        # Layers add up, and beyond the last there are none.
        sums = [probe(5, some).sum() for some in range(1, layers + 1)]
        assert sums == sorted(sums)
        assert np.array_equal(probe(5, layers + 3), two_more)
        some = np.array([2, 7, 8], np.int32)
        found = engine.chunks.attention(context, some, suffix, queries=3, layers=layers)
        assert np.array_equal(found, suffix_only[some].astype(np.float32))

    def test_attention_ignores_gaps_and_new_rows(self, engine: ChunkReuseEngine) -> None:
        context, _ = self.shuffled(engine)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])
        rows, suffix = np.arange(context.n, dtype=np.int32), random_tokens(engine, 9, seed=1)
        first = context.n + 7
        seen = engine.chunks.attention(context, rows, suffix, queries=2, layers=1)
        hidden = gap[gap < first]
        assert len(hidden)
        assert not seen[hidden].any()
        # In the first layer what a token asks for is a matter of itself and of its position.
        other = np.concatenate([random_tokens(engine, 7, seed=2), suffix[7:]]).astype(np.int32)
        assert np.array_equal(engine.chunks.attention(context, rows, other, queries=2, layers=1), seen)
        more = engine.chunks.attention(context, rows, suffix, queries=9, layers=1)
        assert more.sum() > 2 * seen.sum()

    def test_attention_leaves_the_context_unchanged(self, engine: ChunkReuseEngine) -> None:
        context, _ = self.shuffled(engine)
        twin, _ = self.shuffled(engine)
        before = context.relocated, context.gaps, context.levels, context.n, context.tokens.tolist()
        suffix, rows = random_tokens(engine, 5, seed=3), np.arange(context.n, dtype=np.int32)
        layers = len(engine.space.layers)
        for queries in (2, 14):
            found = engine.chunks.attention(context, rows, suffix, queries=queries, layers=layers)
            assert found.shape == (context.n,)
            assert found.dtype == np.float32
            assert np.isfinite(found).all()
            assert (context.relocated, context.gaps, context.levels, context.n, context.tokens.tolist()) == before
            assert np.array_equal(found, engine.chunks.attention(context, rows, suffix, queries=queries, layers=layers))
            assert engine.chunks.attention(context, rows[:0], suffix, queries=queries, layers=1).shape == (0,)
        gap = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in context.gaps])
        assert np.array_equal(
            engine.chunks.recompute_rows(context, gap, suffix), engine.chunks.recompute_rows(twin, gap, suffix)
        )
        assert np.array_equal(engine.prefill(context, suffix), engine.prefill(twin, suffix))

    def test_attention_refuses_rows_that_do_not_exist(self, engine: ChunkReuseEngine) -> None:
        context, twin = (self.start(engine, random_tokens(engine, 5)) for _ in range(2))
        one, suffix = np.array([1], np.int32), random_tokens(engine, 2, seed=1)

        def refused(kind: type[Exception], rows: object, tokens: Tokens, queries: int = 2, layers: int = 1) -> None:
            given = np.asarray(rows, np.int32)
            raises(kind, lambda: engine.chunks.attention(context, given, tokens, queries=queries, layers=layers))

        for rows in ([5], [-1], [3, 2], [3, 3], [[1, 2]]):
            refused(EngineError, rows, suffix)
        refused(EngineError, one, suffix, queries=0)
        refused(EngineError, one, suffix, layers=0)
        refused(EngineError, one, suffix[:0])
        refused(TokenRangeError, one, np.array([engine.space.vocab_size], np.int32))
        refused(ContextTooLongError, one, np.zeros(engine.space.max_tokens, np.int32))
        assert (context.n, context.relocated, context.gaps) == (5, (), ())
        assert np.array_equal(engine.prefill(context, suffix), engine.prefill(twin, suffix))
