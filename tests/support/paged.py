"""An engine's pages as numpy has them, and the blocks of a request in them."""

from __future__ import annotations

from typing import Any

import numpy as np
from ctxreuse_cloud.connectors.pages import LayerPages, PageShape, layout_of_pages
from ctxreuse_cloud.connectors.requests import PagedBlock

from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.identity.model import LayerSpec, ModelSpace

#: Numpy's types for the bits of a dtype.
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def page_shape(layout: str, *, pages: int = 12, heads: int = 3, tokens: int = 32, dim: int = 16,
               dtype: str = "bfloat16") -> PageShape:  # fmt: skip
    """The shape of a tensor [pages, heads, tokens, 2 * dim]; fused ones have heads inside of tokens, as on GPUs."""
    page = heads * tokens * 2 * dim
    inner = (2 * dim, heads * 2 * dim) if layout == "fused" else (tokens * 2 * dim, 2 * dim)
    return PageShape(pages, heads, tokens, dim, dtype, (page, *inner, 1))


def write_page(memory: Any, shape: PageShape, layout: str, page: int, k: Any, v: Any) -> None:
    """Write K and V [heads, tokens, dim], as bits, where an engine of that layout would: the oracle."""
    place = memory.view(BITS[shape.dtype])[page * shape.strides[0] : (page + 1) * shape.strides[0]]
    heads, tokens, dim = k.shape
    if layout == "fused":
        place.reshape(tokens, heads, 2, dim)[:] = np.stack([k, v], 2).transpose(1, 0, 2, 3)
    else:
        halves = place.reshape(heads, 2, tokens * dim)
        halves[:, 0] = (k.transpose(0, 2, 1) if layout == "transposed" else k).reshape(heads, -1)
        halves[:, 1] = v.reshape(heads, -1)


def made_up(shape: PageShape, rng: np.random.Generator) -> Any:
    """Bits of K or V [heads, tokens, dim] without a pattern."""
    box = shape.heads, shape.tokens, shape.dim
    return rng.integers(0, np.iinfo(BITS[shape.dtype]).max, box, BITS[shape.dtype], endpoint=True)


class PagedEngine:
    """Memory of some layers, random at first, in one layout."""

    def __init__(self, layout: str = "transposed", layers: int = 2, seed: int = 0, **shape: Any) -> None:
        self.shape = page_shape(layout, **shape)
        self.rng = np.random.default_rng(seed)
        found = layout_of_pages(layout, self.shape)
        assert found is not None
        self.memory = [self.rng.integers(0, 256, self.shape.nbytes, np.uint8) for _ in range(layers)]
        self.pages = [LayerPages(memory, self.shape, found) for memory in self.memory]
        spec = LayerSpec("full", self.shape.heads, self.shape.dim, self.shape.dim)
        self.space = ModelSpace(
            "w", "a", "t", self.shape.dtype, (spec,) * layers, "null", 1000, 4096, self.shape.tokens
        )

    def bytes_of(self, page: int) -> list[bytes]:
        """What a page holds, layer by layer."""
        size = self.shape.nbytes // self.shape.pages
        return [memory[page * size : (page + 1) * size].tobytes() for memory in self.memory]

    def run(self, tokens: Tokens, pages: list[int], tenant: str = "") -> list[PagedBlock]:
        """The blocks of a context in these pages."""
        size = self.shape.tokens
        keys = prefix_keys(self.space.digest, tenant_salt(tenant), tokens, size)
        ids = [tokens[i * size : (i + 1) * size].tobytes() for i in range(len(keys))]
        parents = [ROOT, *keys]
        return [PagedBlock(keys[i], parents[i], ids[i], (i + 1) * size, page) for i, page in enumerate(pages)]
