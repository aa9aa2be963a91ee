"""Whether a block that arrives has a level that was allowed, and the planes that such a level has."""

from __future__ import annotations

from collections.abc import Container

from ctxreuse.block import BlockView, Layout
from ctxreuse.codec.levels import LevelName, parse_level
from ctxreuse.errors import FormatError
from ctxreuse.levels import EXACT

__all__ = ["allowed", "laid_out"]


def allowed(level: str, levels: Container[str], base: str) -> bool:
    """True for ``exact`` and for what is among ``levels``.

    ``base``: the level of the block that this is to refine, "" for a block that stands alone. A refinement is allowed
    if it leads from that to one of ``levels``.
    """
    try:
        name = parse_level(level)
    except FormatError:
        return False
    if not base:
        return level == EXACT or (level in levels and not name.base)
    fine, coarse = LevelName(name.name, name.card), LevelName(name.base, name.card)
    return bool(name.base) and str(fine) in levels and str(coarse) == base


def laid_out(view: BlockView, layout: Layout) -> bool:
    """True for planes as ``layout`` has them, or, at a coded level, one stream of bytes in place of each."""
    if view.header.level == EXACT:
        return view.header.planes == layout.encoded
    ours, theirs = layout.planes, view.layout.planes
    return len(ours) == len(theirs) and all(
        (p.layer, p.role, "uint8", 1) == (q.layer, q.role, q.dtype, len(q.shape)) for p, q in zip(ours, theirs)
    )
