"""PartialBlockContract: the end of a context that fills no block can be exported and loaded like one."""

from __future__ import annotations

import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.engines.base import Engine
from ctxreuse.errors import EngineError, FormatError
from ctxreuse.identity.keys import ROOT
from ctxreuse.testing.engine.steps import StepContract
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, continuation, random_tokens

__all__ = ["PartialBlockContract"]

_KEY = b"\x07" * 32


class PartialBlockContract(StepContract):
    """Part of `EngineContract`."""

    def test_a_context_loaded_with_its_partial_block_goes_on_as_it_would(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        more = random_tokens(engine, 5, seed=1)
        for count in () if engine.space.needs_state else (size + 1, 2 * size + size // 2, 3 * size - 1):
            context = engine.new_context()
            engine.prefill(context, random_tokens(engine, count))
            sealed, whole = Sealed(engine, context), count // size
            parts = [*sealed.blocks, *engine.export(context, [_KEY], sealed.keys[-1], whole, last_partial=True)]
            together = list(engine.export(context, [*sealed.keys, _KEY], ROOT, 0, last_partial=True))
            assert [one.tobytes() for one in together] == [one.tobytes() for one in parts]
            view = parse(parts[-1], space=engine.space.digest)
            assert view.covers(_KEY, context.tokens[whole * size :])
            assert (view.header.parent, view.header.end) == (sealed.keys[-1], count)
            copy = engine.new_context(count + 9)
            engine.load(copy, [parse(one) for one in parts]).wait()
            assert np.array_equal(copy.tokens, context.tokens)
            assert copy.levels == context.levels
            got = continuation(engine, copy, engine.prefill(copy, more), 3)
            expected = continuation(engine, context, engine.prefill(context, more), 3)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected)), f"{count} tokens"

    def test_partial_blocks_that_cannot_be_are_refused(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, 2 * size + 5))
        sealed = Sealed(engine, context)
        raises(EngineError, engine.export, context, [_KEY], sealed.keys[0], 1, last_partial=True)  # a whole block
        raises(EngineError, engine.export, context, [_KEY], sealed.keys[1], 3, last_partial=True)
        raises(EngineError, engine.export, context, [], sealed.keys[1], 2, last_partial=True)
        raises(EngineError, engine.export, context, [_KEY], sealed.keys[1], 2)
        blocks = [parse(one) for one in sealed.blocks]
        (part,) = (parse(one) for one in engine.export(context, [_KEY], sealed.keys[1], 2, last_partial=True))
        for views in ([part], [blocks[0], part], [blocks[0], part, blocks[1]], [*blocks, part, part]):
            raises(FormatError, engine.load, engine.new_context(), views)
        if engine.space.needs_state:  # there is none at its end
            raises((EngineError, FormatError), engine.load, engine.new_context(), [*blocks, part])
            return
        loaded = engine.new_context()
        engine.load(loaded, [*blocks, part]).wait()
        raises(EngineError, engine.load, loaded, [blocks[0]])
        assert loaded.n == 2 * size + 5
