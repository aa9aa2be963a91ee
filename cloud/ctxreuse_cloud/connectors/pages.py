"""The pages in which another engine keeps KV, and how their bytes become planes [heads, tokens, dim] and come back.

An engine with paged memory has for each layer a tensor [pages, heads, tokens, 2 * dim]. What its bytes mean is the
attention kernel's choice, not the shape's: on x86 CPUs vLLM keeps K of a head transposed, [dim, tokens], and V after
it. So a layout is not believed from its name: `find_layout` compares a page into which the engine wrote known K and V.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec
from ctxreuse.dtypes import BITS, ITEM_BYTES
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.kernels import copy_box, scatter_checked

__all__ = ["LAYOUTS", "LayerPages", "PageLayout", "PageShape", "find_layout", "host_memory"]

_Bytes = npt.NDArray[np.uint8]


class PageShape(NamedTuple):
    """One layer's pages: ``heads`` and ``tokens`` of a page, ``dim`` of K and of V, ``dtype`` as in a model space.

    ``strides`` are those of the engine's tensor [pages, heads, tokens, 2 * dim], in elements.
    """

    pages: int
    heads: int
    tokens: int
    dim: int
    dtype: str
    strides: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes from the tensor's first element to behind its last."""
        sizes = self.pages, self.heads, self.tokens, 2 * self.dim
        return (1 + sum((n - 1) * stride for n, stride in zip(sizes, self.strides))) * ITEM_BYTES[self.dtype]


class _Box(NamedTuple):
    """Where a plane lies in a page: the first element, and strides (heads, tokens, dim); in elements."""

    offset: int
    strides: tuple[int, int, int]


class PageLayout(NamedTuple):
    """Where K and V of a page lie."""

    name: str
    k: _Box
    v: _Box


#: ``fused``: K of a token, then its V. ``split``: of each head K of all tokens, then V. ``transposed``: as split, with
#: K as [dim, tokens].
LAYOUTS = ("fused", "split", "transposed")


def layout_of_pages(name: str, shape: PageShape) -> PageLayout | None:
    """Return the layout of that name for pages of this shape; None if they cannot have it."""
    _, heads, tokens, inner = shape.strides
    if inner != 1:
        return None
    if name == "fused":
        strides = heads, tokens, 1
        return PageLayout(name, _Box(0, strides), _Box(shape.dim, strides))
    if tokens != 2 * shape.dim:
        return None
    rows = _Box(0, (heads, shape.dim, 1))
    k = rows if name == "split" else _Box(0, (heads, 1, shape.tokens))
    return PageLayout(name, k, rows._replace(offset=shape.tokens * shape.dim))


def host_memory(address: int, nbytes: int) -> _Bytes:
    """Return the memory of another library's tensor as bytes, not a copy; the caller keeps the tensor."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class LayerPages:
    """The pages of one layer in host memory. Different pages may be read and written from different threads.

    A page holds one block or several: block ``i`` of page ``p`` is number ``p * n + i`` of all, where ``n`` is how many
    a page holds.
    """

    def __init__(self, memory: _Bytes, shape: PageShape, layout: PageLayout, block_tokens: int = 0) -> None:
        """Take memory of ``shape.nbytes`` bytes, of pages that hold whole blocks of ``block_tokens`` (0: one each).

        Raises ConfigError if it has another size.
        """
        if memory.nbytes != shape.nbytes:
            raise ConfigError(f"KV pages of {shape.nbytes} bytes lie in a buffer of {memory.nbytes}")
        self.shape, self.layout = shape, layout
        self._memory = memory
        size, item = block_tokens or shape.tokens, ITEM_BYTES[shape.dtype]
        self._box, self._count = (shape.heads, size, shape.dim), shape.tokens // size
        self._page_bytes = shape.strides[0] * item
        self._boxes = [
            (role, box.offset * item, box.strides, size * box.strides[1] * item)
            for role, box in (("k", layout.k), ("v", layout.v))
        ]

    def save(self, writer: BlockWriter, layer: int, number: int) -> None:
        """Copy K and V out of a block's place in a page. Raises ValueError for a place that does not exist."""
        page, part = self._place(number)
        for role, offset, strides, step in self._boxes:
            start = writer.offset(layer, role)
            copy_box(
                writer.buffer,
                self._memory,
                self.shape.dtype,
                self._box,
                dst_offset=start,
                src_offset=page + offset + part * step,
                src_strides=strides,
            )

    def load(self, view: BlockView, layer: int, number: int, codec: Codec | None = None) -> bool:
        """Copy or decode a block's planes of ``layer`` into its place; False if their bytes are damaged.

        The place's content is undefined then. ``codec`` knows the block's level, if its planes are no raw numbers.
        Raises ValueError for a place that does not exist.
        """
        heads, tokens, dim = self._box
        kind = self.shape.dtype
        page, part = self._place(number)
        for role, offset, strides, step in self._boxes:
            at = page + offset + part * step
            if codec is not None and not is_raw(view.header.level):
                rows = np.empty(self._box, BITS[kind])
                try:
                    codec.fill([view], layer, role, rows, 0)
                except FormatError:
                    return False
                copy_box(self._memory, rows, kind, self._box, dst_offset=at, dst_strides=strides)
                continue
            plane = [view.buffer], [view.offset(layer, role)], kind
            sums = [view.checksum(layer, role)]
            if scatter_checked(self._memory, kind, at, strides, *plane, heads, dim, [tokens], sums) >= 0:
                return False
        return True

    def _place(self, number: int) -> tuple[int, int]:
        """The byte at which a block's page begins, and which of its blocks it is."""
        page, part = divmod(number, self._count)
        if not 0 <= page < self.shape.pages:
            raise ValueError(f"page {page} of {self.shape.pages}")
        return page * self._page_bytes, part


def find_layout(memory: _Bytes, shape: PageShape, page: int, k: _Bytes, v: _Bytes) -> PageLayout:
    """Return the layout in which the engine wrote known K and V into a page.

    Args:
        memory: the layer's pages.
        shape: of these pages.
        page: the page that was written.
        k: bytes of K, [heads, tokens, dim] in C order, without a pattern that another order would share.
        v: the same of V.

    Raises ConfigError if no known layout explains the page.
    """
    box, size = (shape.heads, shape.tokens, shape.dim), ITEM_BYTES[shape.dtype]
    found = np.empty(k.nbytes, np.uint8)
    for name in LAYOUTS:
        layout = layout_of_pages(name, shape)
        if layout is None:
            continue
        planes: Sequence[tuple[_Box, _Bytes]] = ((layout.k, k), (layout.v, v))
        for (offset, strides), plane in planes:
            at = page * shape.strides[0] * size + offset * size
            copy_box(found, memory, shape.dtype, box, src_offset=at, src_strides=strides)
            if not np.array_equal(found, plane):
                break
        else:
            return layout
    raise ConfigError(
        f"the engine's KV pages have a layout that is none of {', '.join(LAYOUTS)}",
        where=f"[{', '.join(map(str, box))}] of {shape.dtype}",
        fix="Choose another attention backend, or run it without this connector",
    )
