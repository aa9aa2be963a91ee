"""Contexts as bytes, for tests of engines: prefilled, sealed, parsed again and resumed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, parse
from ctxreuse.engines.base import Engine, Live, Logits
from ctxreuse.keys import ROOT, Tokens, prefix_keys, tenant_salt

__all__ = ["Sealed", "continuation", "random_tokens", "resume", "seal", "views"]

_SALT = tenant_salt("contract")


class Sealed:
    """A context as bytes: its blocks, the state at each position where it was held, and the keys."""

    def __init__(self, engine: Engine, live: Live) -> None:
        size, space = engine.space.block_tokens, engine.space.digest
        self.tokens: Tokens = live.tokens.copy()
        self.keys = prefix_keys(space, _SALT, self.tokens, size)
        self.blocks = list(engine.export(live, self.keys, ROOT, 0))
        self.states: dict[int, npt.NDArray[np.uint8]] = {}
        for at in live.states:
            number = at // size - 1
            parent = self.keys[number - 1] if number else ROOT
            self.states[at] = engine.export_state(live, self.keys[number], parent, at)


def random_tokens(engine: Engine, count: int, seed: int = 0) -> Tokens:
    """``count`` ids of the engine's vocabulary, int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.space.vocab_size, count).astype(np.int32)


def continuation(engine: Engine, live: Live, logits: Logits, steps: int) -> list[Logits]:
    """Logits of ``steps`` greedy tokens, one forward each."""
    seen = [logits]
    for _ in range(steps):
        seen.append(engine.prefill(live, np.array([seen[-1].argmax()], np.int32)))
    return seen


def seal(engine: Engine, tokens: Tokens) -> Sealed:
    """Prefill tokens into a new context and export it; states are taken at the end only (a block boundary)."""
    live = engine.start()
    engine.prefill(live, tokens)
    return Sealed(engine, live)


def views(engine: Engine, sealed: Sealed, end: int) -> tuple[list[BlockView], BlockView | None]:
    """Parsed blocks up to position ``end`` and, where the engine needs it, the state there."""
    space = engine.space
    blocks = [parse(data, space=space.digest) for data in sealed.blocks[: end // space.block_tokens]]
    return blocks, parse(sealed.states[end], space=space.digest) if space.needs_state else None


def resume(engine: Engine, sealed: Sealed, end: int, suffix: Tokens) -> tuple[Live, Logits]:
    """A new context loaded up to ``end``, then ``suffix`` prefilled into it."""
    live = engine.start()
    blocks, state = views(engine, sealed, end)
    loading = engine.load(live, blocks, state)
    logits = engine.prefill(live, suffix)
    loading.wait()
    return live, logits
