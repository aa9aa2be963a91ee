"""What is checked before a context is filled from blocks: nothing is touched unless all of it holds."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.block import BlockView, Layout
from ctxreuse.engines.torch_hf.states import Snapshot, fits
from ctxreuse.errors import EngineError, FormatError
from ctxreuse.model import ModelSpace

__all__ = ["check_blocks", "check_state"]


def check_blocks(views: Sequence[BlockView], space: ModelSpace, layout: Layout, start: int) -> None:
    """Raises FormatError unless the views are consecutive exact blocks of this space from position ``start``."""
    size, end, last = space.block_tokens, start, None
    for view in views:
        header, end = view.header, end + size
        where = f"block {header.key.hex()[:16]} for position {end - size}"
        if header.kind != "block" or header.space != space.digest:
            raise FormatError("not a block of this model space", where=where, fix="It is recomputed")
        if header.end != end or len(header.tokens) != 4 * size or header.rope_at not in (-1, end - size):
            raise FormatError(
                f"block has {len(header.tokens) // 4} tokens up to position {header.end}, rotated at {header.rope_at}",
                where=where,
            )
        if header.level != "exact":
            raise FormatError(f"block of level {header.level!r}", where=where, fix="Decode it to 'exact' first")
        # Layouts are parsed once for equal bytes, so this compares identities nearly always.
        if view.layout is not layout and view.layout.planes != layout.planes:
            raise FormatError("planes have other layers, types or shapes than this model's", where=where)
        if last is not None and header.parent != last:
            raise FormatError("block does not follow the one before it", where=where)
        if int(view.tokens.min()) < 0 or int(view.tokens.max()) >= space.vocab_size:
            raise FormatError("block has token ids outside the vocabulary", where=where)
        last = header.key


def check_state(state: BlockView | None, space: ModelSpace, end: int, probe: Snapshot, windows: dict[int, int]) -> None:
    """Raises EngineError if a needed state is missing or an unneeded one is given, FormatError if it is another's."""
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
    if header.kind != "state" or header.space != space.digest or header.level != "exact":
        raise FormatError("not an exact state of this model space", where=where, fix="It is recomputed")
    if header.end != end:
        raise FormatError(f"state at position {header.end} for blocks up to {end}", where=where)
    if not fits(state, probe, windows):
        raise FormatError("planes have other layers, types or shapes than this model's states", where=where)
