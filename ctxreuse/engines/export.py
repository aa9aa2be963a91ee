"""Blocks out of a context's rows: what all engines do alike while they export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockWriter, Layout
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
    fill: Callable[[BlockWriter, int], None],
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of blocks ``first`` and on; ``fill`` writes the planes of the one from a position.

    K stands there as rotated at its own position. Raises EngineError if the context is cropped meanwhile.
    """
    size = space.block_tokens
    for at, key in zip(range(first * size, (first + len(keys)) * size, size), keys):
        if at + size > context.n:
            raise EngineError(f"the context was cropped to {context.n} tokens while it was exported")
        writer = BlockWriter(
            layout,
            kind="block",
            space=space.digest,
            key=key,
            parent=parent,
            end=at + size,
            tokens=context.tokens[at : at + size],
            level=context.provenance.worst_level(at, at + size),
            rope_at=at,
        )
        fill(writer, at)
        yield writer.seal()
        parent = key
