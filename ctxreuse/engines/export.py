"""Blocks out of a context's rows: what all engines do alike while they export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockWriter, Layout, block_layout
from ctxreuse.engines.provenance import Provenance
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["ExportedContext", "export_blocks"]


class ExportedContext(Protocol):
    """A context whose rows can become blocks."""

    provenance: Provenance

    @property
    def tokens(self) -> Tokens:
        """See `ctxreuse.engines.base.Context.tokens`."""
        ...

    @property
    def n(self) -> int:
        """See `ctxreuse.engines.base.Context.n`."""
        ...


def export_blocks(
    space: ModelSpace,
    layout: Layout,
    context: ExportedContext,
    keys: Sequence[bytes],
    parent: bytes,
    first: int,
    fill: Callable[[BlockWriter, int, int], None],
    *,
    last_partial: bool = False,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of blocks ``first`` and on, see `Engine.export`.

    ``fill(writer, start, end)`` writes the planes of the tokens between two positions. K stands there as rotated at its
    own position. Raises EngineError if the context is cropped meanwhile.
    """
    size, whole = space.block_tokens, context.n
    for at, key in zip(range(first * size, (first + len(keys)) * size, size), keys):
        end = min(at + size, whole) if last_partial else at + size
        if end > context.n:
            raise EngineError(f"the context was cropped to {context.n} tokens while it was exported")
        if end - at < size:
            layout = block_layout(space, end - at)
        writer = BlockWriter(
            layout,
            kind="block",
            space=space.digest,
            key=key,
            parent=parent,
            end=end,
            tokens=context.tokens[at:end],
            level=context.provenance.worst_level(at, end),
            rope_at=at,
        )
        fill(writer, at, end)
        yield writer.seal()
        parent = key
