"""Audits blocks from elsewhere: sampled rows are computed here, on top of all others, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import parse
from ctxreuse.block.levels import expected_kl, is_exact, is_raw
from ctxreuse.dtypes import VALUES
from ctxreuse.engines.provenance import tokens_at

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.store.base import Store

__all__ = ["SAMPLES", "SPAN_TOKENS", "audit_stored", "first_k_matches", "rows_match", "span_matches"]

#: Rows compared of one run. Of SmolLM2 on one thread, 8 take .15 s on 1,024 tokens and .19 s on 2,048, which is 3.4 and
#: 2.0 % of a prefill (reading the weights once is most of it); 12 take a quarter more.
SAMPLES = 8
#: The longest span that is computed from one state to the next to audit both.
SPAN_TOKENS = 256
#: Largest difference that rounding explains, as a share of the row's largest value: other kernels, other batch sizes.
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
#: The same for rows of all layers, by their root mean square: rounding adds up over the layers below.
_DEEP_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
#: Rows are measured by their own length, but not by less than this share of the usual one: the first token's V is
#: nearly nothing in many models.
_LEAST_LENGTH = 0.05

#: Largest squared difference of lossy rows, all together, as a share of their squares: those of rubbish are above 1.
_LOSSY = 0.8
#: The same for rows of all layers at a level of KL x, in the mean over the layers: this times x ** 0.75, at most
#: `_LOSSY`. Twice what SmolLM2's V has at kl-0.05 (.38), kl-0.01 (.15) and kl-0.002 (.033); its K has a fifth of that.
_LOSSY_SHARE = 8.0
#: In one layer: V has up to .70 at kl-0.05, other numbers of the same size have 2.
_LOSSY_LAYER = 1.44
#: All levels: what a store keeps with loss is audited with the tolerance of lossy rows.
_ANY = 1000.0


def audit_stored(
    engine: Engine, store: Store, keys: Sequence[bytes], first: int, state: BlockView | None, rng: Random
) -> bool | None:
    """Audit the blocks from ``first`` on of a stored context, given with all its keys, or the state at its end.

    With ``state``, ``first`` is where an earlier state is stored, or 0. None: nothing can be said of the deeper layers.
    Raises LookupError if a block is not stored any more, and what `Engine.load` raises.
    """
    size, context = engine.space.block_tokens, engine.new_context()
    with store.read(_ANY) as reader:
        views = [reader.peek(key) for key in keys]
        before = reader.peek(keys[first - 1], "state") if state is not None and first else None
        cached = [view for view in views if view is not None]
        try:
            if len(cached) < len(keys) or (state is not None and first and before is None):
                raise LookupError("a block of the audited context is not stored any more")
            if state is None and engine.space.needs_state:
                return None if first_k_matches(engine, cached[first:], rng) is not False else False
            front = cached[:first] if state is not None else cached
            if front:
                engine.load(context, front, before).wait()
            if state is not None:
                return span_matches(engine, context, cached[first:], state)
        finally:
            views.clear()
            cached.clear()
            del before
    return rows_match(engine, context, first * size, len(keys) * size, rng)


def rows_match(
    engine: Engine, context: Context, start: int, stop: int, rng: Random, samples: int = SAMPLES
) -> bool | None:
    """Return whether K and V of positions ``start`` to ``stop`` are what this engine computes there, in all layers.

    ``samples`` positions spread over the run are computed again on top of everything that ``context`` holds. None: the
    model cannot compute tokens out of order (it keeps states), so nothing can be said. A lie about any row before a
    sampled one shows in all layers above it. What remains is one who changes few rows, or rows that nothing after them
    looks at, and computes on consistently: it is caught as often as one of its rows is sampled.
    """
    edges = np.linspace(start, stop, min(samples, stop - start) + 1).astype(int)
    rows = np.array([rng.randrange(a, b) for a, b in pairwise(edges)], np.int32)
    found = engine.row_errors(context, rows)
    if found is None:
        return None
    distances, lengths = found
    levels = tokens_at(context.levels, 0, stop)
    if all(is_exact(level) for level in levels):
        usual = lengths.mean(2, keepdims=True)
        limit = _DEEP_TOLERANCE[engine.space.dtype] ** 2 * np.maximum(lengths, _LEAST_LENGTH**2 * usual)
        return bool((distances <= limit).all())  # so written, a NaN fails
    shares = distances.sum(2) / lengths.sum(2)
    limit = min(_LOSSY, _LOSSY_SHARE * max(map(expected_kl, levels)) ** 0.75)
    return bool((shares.mean(0) <= limit).all() and (shares <= _LOSSY_LAYER).all())


def span_matches(engine: Engine, context: Context, views: Sequence[BlockView], state: BlockView) -> bool:
    """Return whether blocks and the state at their end are what this engine computes behind ``context``, which ends
    where they begin. ``views`` and ``state`` are exact; ``context`` grows by them."""
    parent, keys = views[0].header.parent, [view.header.key for view in views]
    first, end = context.n // engine.space.block_tokens, state.header.end
    engine.prefill(context, np.concatenate([view.tokens for view in views]))
    computed = [parse(data) for data in engine.export(context, keys, parent, first)]
    computed.append(parse(engine.export_state(context, state.header.key, state.header.parent, end)))
    limit = _DEEP_TOLERANCE[engine.space.dtype] ** 2
    for mine, theirs in zip(computed, (*views, state), strict=True):
        for plane in mine.layout.planes:
            a = _floats(mine.array(plane.layer, plane.role))
            b = _floats(theirs.array(plane.layer, plane.role))
            if not float(((a - b) ** 2).sum()) <= limit * float((a**2).sum()):
                return False
    return True


def first_k_matches(engine: Engine, views: Sequence[BlockView], rng: Random, samples: int = SAMPLES) -> bool | None:
    """Return whether K of the first layer is what this engine computes for the token ids of the blocks.

    For models of which `rows_match` can say nothing. Compares ``samples`` rows at random over ``views`` (blocks of the
    engine's space with the engine's layout, anywhere in a context, at any level that it can decode; only their planes
    of the first layer are read). None: the first layer keeps no K of all tokens either. Raises FormatError if a plane
    that is read is corrupt.

    It proves little about the deeper layers, which depend on all tokens before: a peer that computes the first layer
    and invents the rest passes. It catches the wrong model, wrong positions, rubbish, and random corruption under right
    checksums. Of lossy blocks it asks for less: numbers that have more to do with the right ones than with nothing.
    """
    space = engine.space
    picks = [(rng.choice(views), rng.randrange(space.block_tokens)) for _ in range(samples if views else 0)]
    if not picks:
        return None
    tokens = np.array([view.tokens[row] for view, row in picks], np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= space.vocab_size:
        return False
    positions = np.array([view.header.end - space.block_tokens + row for view, row in picks], np.int32)
    if int(positions.min()) < 0 or int(positions.max()) >= space.max_tokens:
        return False
    found = engine.first_rows(tokens, positions)
    if found is None:
        return None
    layer, rows = found
    off = size = 0.0
    for i, (view, row) in enumerate(picks):
        stored, level = _floats(_plane(engine, view, layer)[:, row]), view.header.level
        if is_exact(level):
            # Written so that a NaN fails.
            if not np.abs(stored - rows[:, i]).max() <= _TOLERANCE[space.dtype] * np.abs(rows[:, i]).max():
                return False
        else:
            off += float(((stored - rows[:, i]) ** 2).sum())
            size += float((rows[:, i] ** 2).sum())
    return bool(off <= _LOSSY * size)


def _plane(engine: Engine, view: BlockView, layer: int) -> npt.NDArray[np.generic]:
    """K of a layer, [heads, tokens, dim]."""
    if is_raw(view.header.level) or engine.codec is None:
        return view.array(layer, "k")
    spec, space = engine.space.layers[layer], engine.space
    kind = VALUES[space.dtype]
    bits = np.empty((spec.kv_heads, len(view.tokens), spec.k_dim), f"u{np.dtype(kind).itemsize}")
    engine.codec.fill([view], layer, "k", bits, 0)
    return bits.view(kind)


def _floats(row: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """float32 of a row as it stands in a block, where bfloat16 is its bits in uint16."""
    if row.dtype == np.uint16:
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row.astype(np.float32)
