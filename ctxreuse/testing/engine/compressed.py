"""EngineCompressionContract: the contract of engines that keep contexts which wait in less memory.

::

    class TestMine(EngineCompressionContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

Its `chunks` are `ChunkOps` and `CompressingOps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT, is_approx
from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.engines.chunks import ChunkOps, CompressingOps
from ctxreuse.engines.fork import ForkingEngine
from ctxreuse.errors import CtxReuseError
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.engine.chunk_contexts import BLOCKS, LEVEL, relocations_of
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, random_tokens, seal

__all__ = ["CompressingEngine", "EngineCompressionContract"]


class _Ops(ChunkOps, CompressingOps, Protocol):
    """Both kinds of operations."""


class CompressingEngine(Engine, Protocol):
    """An engine that compresses contexts."""

    @property
    def chunks(self) -> _Ops: ...


def _check(context: Context) -> None:
    check: Any = getattr(context, "check", None)
    if check is not None:
        check()


class EngineCompressionContract:
    """Inherit, and give a fixture ``engine``."""

    #: Largest |difference| of logits to those of exact rows with int8, as a share of the largest |logit|.
    rounded = 0.05
    #: The same between two ways to compute the same numbers.
    tolerance = 1e-4

    def near(self, a: Sequence[Logits], b: Sequence[Logits], tolerance: float) -> bool:
        """True if two lists of logits differ by no more than that."""
        return all(bool(np.abs(x - y).max() <= tolerance * np.abs(y).max()) for x, y in zip(a, b, strict=True))

    def two(self, engine: CompressingEngine, extra: int = 5) -> tuple[Context, Context, Tokens]:
        """Two contexts of the same tokens, the first compressed."""
        ids = random_tokens(engine, BLOCKS * engine.space.block_tokens + extra)
        contexts = [engine.new_context(), engine.new_context()]
        for context in contexts:
            engine.prefill(context, ids)
        engine.chunks.compress(contexts[0], "int8", LEVEL)
        return contexts[0], contexts[1], ids

    def test_a_compressed_context_is_smaller_and_says_nearly_the_same(self, engine: CompressingEngine) -> None:
        context, twin, ids = self.two(engine)
        assert context.nbytes < 0.5 * twin.nbytes
        assert context.tokens.tolist() == ids.tolist()
        assert [(run.start, run.end, run.level) for run in context.levels] == [(0, len(ids), LEVEL)]
        suffix = random_tokens(engine, 5, seed=3)
        assert self.near([engine.prefill(context, suffix)], [engine.prefill(twin, suffix)], self.rounded)
        for token in suffix:
            step = np.array([token], np.int32)
            assert self.near([engine.prefill(context, step)], [engine.prefill(twin, step)], self.rounded)
        assert all(is_approx(run.level) for run in context.levels)
        _check(context)

    def test_it_goes_on_beside_others_in_one_pass_as_alone(self, engine: CompressingEngine) -> None:
        context, twin, _ = self.two(engine)
        alone = self.two(engine)[0]
        other = engine.new_context()
        engine.prefill(other, random_tokens(engine, 9, seed=5))
        for token in random_tokens(engine, 3, seed=3):
            step = np.array([token], np.int32)
            together = engine.step([(context, step), (twin, step), (other, random_tokens(engine, 2, seed=6))])
            assert isinstance(together[0], np.ndarray)
            assert self.near([together[0]], [engine.prefill(alone, step)], self.tolerance)
        _check(context)

    def test_it_is_compressed_again_and_cropped_anywhere(self, engine: CompressingEngine) -> None:
        context, twin, ids = self.two(engine)
        more = random_tokens(engine, 2 * engine.space.block_tokens, seed=7)
        for one in (context, twin):
            engine.prefill(one, more)
        before = context.nbytes
        engine.chunks.compress(context, "int8", LEVEL)
        assert context.nbytes < before
        suffix = random_tokens(engine, 5, seed=3)
        for n in (len(ids) + 3, len(ids) - 2, 3):
            for one in (context, twin):
                assert engine.crop(one, n)
            _check(context)
            assert self.near([engine.prefill(context, suffix)], [engine.prefill(twin, suffix)], self.rounded)
            _check(context)
            engine.chunks.compress(context, "int8", LEVEL)
            _check(context)
        assert engine.crop(context, 0)
        assert self.near(
            [engine.prefill(context, suffix)], [engine.prefill(engine.new_context(), suffix)], self.tolerance
        )

    def test_what_quantised_rows_cannot_do_expands_them_first(self, engine: CompressingEngine) -> None:
        suffix, size = random_tokens(engine, 5, seed=3), engine.space.block_tokens
        said = engine.prefill(self.two(engine, 0)[0], suffix)

        exported = self.two(engine, 0)[0]
        blocks = [parse(data) for data in Sealed(engine, exported).blocks]
        assert {block.header.level for block in blocks} == {LEVEL}
        assert self.near([engine.prefill(exported, suffix)], [said], self.tolerance)

        ids = random_tokens(engine, (BLOCKS + 2) * size)
        views = [parse(data) for data in seal(engine, ids).blocks]
        loaded, twin, _ = self.two(engine, 0)
        for one in (loaded, twin):
            engine.load(one, views[BLOCKS:]).wait()
        assert loaded.n == (BLOCKS + 2) * size
        assert loaded.levels[-1].level == EXACT
        assert self.near([engine.prefill(loaded, suffix)], [engine.prefill(twin, suffix)], self.rounded)

        inserted, twin, _ = self.two(engine)
        for one in (inserted, twin):
            rows = list(relocations_of(views, 3, size, one.n))
            engine.chunks.insert_rows(one, ids[3 : 3 + size], rows, LEVEL)
        assert self.near([engine.prefill(inserted, suffix)], [engine.prefill(twin, suffix)], self.rounded)

        if isinstance(engine, ForkingEngine):
            forked = self.two(engine, 0)[0]
            for one in (forked, *engine.fork(forked, 2)):
                assert self.near([engine.prefill(one, suffix)], [said], self.tolerance)
                _check(one)

    def test_what_cannot_be_compressed_stays_as_it_is(self, engine: CompressingEngine) -> None:
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, 20))
        for format, level in (("int8", EXACT), ("int8", "kl-0.05"), ("int5", LEVEL)):
            raises(CtxReuseError, engine.chunks.compress, context, cast("Any", format), level)
        assert [run.level for run in context.levels] == [EXACT]
        _check(context)
        empty = engine.new_context()
        engine.chunks.compress(empty, "int8", LEVEL)
        suffix = random_tokens(engine, 5)
        assert self.near([engine.prefill(empty, suffix)], [engine.prefill(engine.new_context(), suffix)], 0.0)
