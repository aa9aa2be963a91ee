"""What engines check before a context is read or changed: nothing is touched unless all of it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ctxreuse.block.format import BlockView, Layout, block_layout, parse
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Context
from ctxreuse.engines.chunks import BlockRows, Relocation, RelocationError
from ctxreuse.errors import ConfigError, EngineError, FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "check_blocks",
    "check_boundary",
    "check_crop",
    "check_export",
    "check_kind",
    "check_relocations",
    "check_rows",
    "check_spans",
    "check_state",
    "decoded_state",
]

C = TypeVar("C")


def check_kind(context: Context, kind: type[C]) -> C:
    """Return the context, as one of this engine's kind; raises EngineError if it is another's."""
    if not isinstance(context, kind):
        raise EngineError(
            f"a {type(context).__name__} is no context of this engine", fix="Use one that new_context() gave"
        )
    return context


def check_boundary(n: int, size: int) -> None:
    """Raise EngineError unless ``n`` tokens are whole blocks of ``size``."""
    if n % size:
        raise EngineError(
            f"the context holds {n} tokens, which is no block boundary", fix=f"Crop or compute to a multiple of {size}"
        )


def check_export(first: int, count: int, size: int, n: int, *, last_partial: bool = False) -> None:
    """Raise EngineError unless ``count`` blocks of ``size`` tokens from block ``first`` are in ``n`` tokens.

    ``last_partial``: the last of them is to be the part of a block at the end of the context.
    """
    end = (first + count) * size
    if first < 0 or end > n + (size - 1 if last_partial else 0) or (last_partial and (not count or end <= n)):
        what = "the last of them partial, " if last_partial else ""
        raise EngineError(
            f"blocks {first} to {first + count - 1} of {size} tokens {what}are not in a context of {n} tokens"
        )


def check_crop(position: int, n: int) -> None:
    """Raise EngineError unless a context of ``n`` tokens can end at ``position``."""
    if not 0 <= position <= n:
        raise EngineError(f"position {position} is not in a context of {n} tokens")


def _check_level(view: BlockView, codec: Codec | None) -> None:
    """Raise ConfigError if the view is coded at a level that nothing here decodes, FormatError if it is no block."""
    level = view.header.level
    if is_raw(level):
        return
    if ">" in level:
        raise FormatError("a refinement is no block by itself", where=view.header.key.hex()[:16])
    if codec is None or not codec.knows(level):
        raise ConfigError(
            f"a block of level {level} cannot be decoded here",
            where=view.header.key.hex()[:16],
            fix="It needs the profile that it was coded with: `ctxreuse calibrate MODEL`, or the sender's",
        )


def _alike(view: BlockView, layout: Layout) -> bool:
    """True if the planes are those of the layout, raw or each as a coded stream."""
    # Layouts are parsed once for equal bytes, so this compares identities nearly always.
    if is_raw(view.header.level):
        return view.layout is layout or view.layout.planes == layout.planes
    return len(view.layout.planes) == len(layout.planes) and all(
        plane == raw or (plane[:3] == (raw.layer, raw.role, "uint8") and len(plane.shape) == 1)
        for plane, raw in zip(view.layout.planes, layout.planes)
    )


def check_blocks(
    views: Sequence[BlockView], space: ModelSpace, layout: Layout, start: int, codec: Codec | None
) -> None:
    """Raise FormatError unless the views are consecutive blocks of this space from position ``start``.

    The last may be partial and raw. Raises ConfigError if there is no profile for a level.
    """
    size, end, last = space.block_tokens, start, None
    for index, view in enumerate(views):
        header = view.header
        if index == len(views) - 1 and is_raw(header.level) and not space.needs_state:
            size = max(1, min(len(header.tokens) // 4, size))
            layout = block_layout(space, size) if size < space.block_tokens else layout
        end += size
        where = f"block {header.key.hex()[:16]} for position {end - size}"
        if header.kind != "block" or header.space != space.digest:
            raise FormatError("not a block of this model space", where=where, fix="It is recomputed")
        if header.end != end or len(header.tokens) != 4 * size or header.rope_at not in (-1, end - size):
            raise FormatError(
                f"block has {len(header.tokens) // 4} tokens up to position {header.end}, rotated at {header.rope_at}",
                where=where,
            )
        _check_level(view, codec)
        if not _alike(view, layout):
            raise FormatError("planes have other layers, types or shapes than this model's", where=where)
        if last is not None and header.parent != last:
            raise FormatError("block does not follow the one before it", where=where)
        if int(view.tokens.min()) < 0 or int(view.tokens.max()) >= space.vocab_size:
            raise FormatError("block has token ids outside the vocabulary", where=where)
        last = header.key


def check_spans(spans: Sequence[tuple[int, int]], start: int, stop: int) -> None:
    """Raise EngineError unless spans (position, count) ascend within ``start`` to ``stop`` without overlap."""
    last = start
    for index, (at, count) in enumerate(spans):
        if at < last or count < 1 or at + count > stop:
            raise EngineError(
                f"rows {index} are for positions {at} to {at + count}, there is room from {last} to {stop}"
            )
        last = at + count


def check_relocations(
    rows: Sequence[Relocation], tokens: Tokens, start: int, space: ModelSpace, layout: Layout, codec: Codec | None
) -> None:
    """Raise RelocationError unless all rows are of this space and of ``tokens``, which stand from ``start`` on.

    Raises EngineError if they are out of order or outside, ConfigError if there is no profile for a level.
    """
    check_spans([(one.start, one.count) for one in rows], start, start + len(tokens))
    for index, one in enumerate(rows):
        _check_movable(one.view, index, space, layout, codec)
        ids = one.view.tokens[one.row : one.row + one.count] if one.row >= 0 else one.view.tokens[:0]
        if not np.array_equal(ids, tokens[one.start - start : one.start - start + one.count]):
            raise _other(one.view, f"rows {one.row} to {one.row + one.count} are of other tokens", index)


def check_rows(rows: Sequence[BlockRows], space: ModelSpace, layout: Layout, codec: Codec | None) -> None:
    """Raise RelocationError unless the rows are of this space and stood one behind another.

    Raises ConfigError if there is no profile for a level.
    """
    end = -1
    for index, one in enumerate(rows):
        _check_movable(one.view, index, space, layout, codec)
        at = one.view.header.rope_at + one.row
        if one.row < 0 or one.count < 1 or one.row + one.count > space.block_tokens:
            raise _other(one.view, f"rows {one.row} to {one.row + one.count} of {space.block_tokens}", index)
        if end not in (-1, at):
            raise _other(one.view, f"rows that stood at position {at} follow those before {end}", index)
        end = at + one.count


def _check_movable(view: BlockView, index: int, space: ModelSpace, layout: Layout, codec: Codec | None) -> None:
    _check_level(view, codec)
    header = view.header
    if header.kind != "block" or header.space != space.digest or not _alike(view, layout):
        raise _other(view, "not a block of this model space", index)
    if len(header.tokens) != 4 * space.block_tokens or header.rope_at < 0:
        raise _other(view, f"block has {len(header.tokens) // 4} tokens, rotated at {header.rope_at}", index)


def _other(view: BlockView, what: str, index: int) -> RelocationError:
    key = view.header.key
    return RelocationError(what, where=f"block {key.hex()[:16]}", fix="It is recomputed", index=index, key=key)


def decoded_state(state: BlockView | None, space: ModelSpace, codec: Codec | None) -> BlockView | None:
    """The state with raw planes. Raises ConfigError if there is no profile for it, FormatError if it is damaged."""
    if state is None or is_raw(state.header.level):
        return state
    if state.header.kind != "state" or state.header.space != space.digest:
        raise FormatError("not a state of this model space", where=state.header.key.hex()[:16], fix="It is recomputed")
    _check_level(state, codec)
    assert codec is not None
    return parse(codec.decode(state))


def check_state(state: BlockView | None, space: ModelSpace, end: int, fits: Callable[[BlockView], bool]) -> None:
    """Raise EngineError if a needed state is missing or an unneeded one is given, FormatError if it is another's.

    ``fits``: True if the state's planes are those that the engine keeps at its position.
    """
    if state is None:
        if space.needs_state:
            raise EngineError(
                f"{space.architecture} cannot resume from blocks alone",
                fix="Pass the state at the blocks' end, or compute from the start",
            )
        return
    if not space.needs_state:
        raise EngineError(f"{space.architecture} keeps no states", fix="Load its blocks without one")
    header = state.header
    where = f"state {header.key.hex()[:16]}"
    if header.kind != "state" or header.space != space.digest or not is_raw(header.level):
        raise FormatError("not a state of this model space", where=where, fix="It is recomputed")
    if header.end != end:
        raise FormatError(f"state at position {header.end} for blocks up to {end}", where=where)
    if not fits(state):
        raise FormatError("planes have other layers, types or shapes than this model's states", where=where)
