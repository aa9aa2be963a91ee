"""Contexts as bytes, for tests of engines: prefilled, sealed, parsed again and resumed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse
from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt

__all__ = ["Sealed", "continuation", "random_tokens", "resume", "seal", "views"]

_SALT = tenant_salt("contract")


class Sealed:
    """A context as bytes: its blocks, the state at each position at which one is stored, and the keys."""

    def __init__(self, engine: Engine, context: Context) -> None:
        size, space = engine.space.block_tokens, engine.space.digest
        self.tokens: Tokens = context.tokens.copy()
        self.keys = prefix_keys(space, _SALT, self.tokens, size)
        self.blocks = list(engine.export(context, self.keys, ROOT, 0))
        self.states: dict[int, npt.NDArray[np.uint8]] = {}
        for at in context.states:
            number = at // size - 1
            parent = self.keys[number - 1] if number else ROOT
            self.states[at] = engine.export_state(context, self.keys[number], parent, at)


def random_tokens(engine: Engine, count: int, seed: int = 0) -> Tokens:
    """``count`` ids of the engine's vocabulary, int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.space.vocab_size, count).astype(np.int32)


def continuation(engine: Engine, context: Context, logits: Logits, steps: int) -> list[Logits]:
    """Logits of ``steps`` greedy tokens, one forward each."""
    seen = [logits]
    for _ in range(steps):
        seen.append(engine.prefill(context, np.array([seen[-1].argmax()], np.int32)))
    return seen


def seal(engine: Engine, tokens: Tokens) -> Sealed:
    """Prefill tokens into a new context and export it; states are taken at the end only (a block boundary)."""
    context = engine.new_context()
    engine.prefill(context, tokens)
    return Sealed(engine, context)


def views(engine: Engine, sealed: Sealed, end: int) -> tuple[list[BlockView], BlockView | None]:
    """Parsed blocks up to position ``end`` and, where the engine needs it, the state there."""
    space = engine.space
    blocks = [parse(data, space=space.digest) for data in sealed.blocks[: end // space.block_tokens]]
    return blocks, parse(sealed.states[end], space=space.digest) if space.needs_state else None


def resume(engine: Engine, sealed: Sealed, end: int, suffix: Tokens) -> tuple[Context, Logits]:
    """A new context loaded up to ``end``, then ``suffix`` prefilled into it."""
    context = engine.new_context()
    blocks, state = views(engine, sealed, end)
    loading = engine.load(context, blocks, state)
    logits = engine.prefill(context, suffix)
    loading.wait()
    return context, logits
