"""Where K and V lie in a chunk of LMCache, and at which position its tokens stood: found in the numbers themselves.

LMCache names a chunk by a hash and hands over its bytes [1 or 2, layers, tokens, width]; neither says at which position
K was rotated, nor how an engine ordered K and V within a width. A calibration profile knows the mean of K before rotary
embedding. In the right order and turned back from the right position, K is near it. For each frequency f the products
of the mean with K, summed over tokens, are one complex number, and turning it by ``position * f`` gives the fit of that
position. Of SmolLM2's K the mean explains three quarters at the right position and less than half at any other; in the
wrong order it explains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.codec import CodecProfile, PlaneProfile
from ctxreuse.errors import ConfigError
from ctxreuse.kernels.convert import to_float32

__all__ = ["ChunkPlace", "PlaceFinder", "join_planes", "split_planes"]

Bits = npt.NDArray[Any]

#: Tokens of a chunk that are looked at: 16 were enough for each of 632 chunks of five kinds of text.
_TOKENS = 64
#: Positions below this one are looked for.
_POSITIONS = 1 << 17
#: The share of K that the mean must explain, and explain more of than at the second best position.
_LEAST_FIT, _LEAST_LEAD = 0.1, 0.05
_ADVICE = "Choose level exact+rans, without a model"
#: Tokens of a page in which K may be transposed.
_PAGES = tuple(1 << n for n in range(4, 13))


class ChunkPlace(NamedTuple):
    """A chunk's first ``position``, and the order of its numbers.

    ``page`` 0: a row has K of its token, and V is behind each head's K, or in the other half of the chunk. Else pages
    of so many tokens hold of each head K as [dim, tokens] and V behind it, as vLLM writes them on x86 CPUs.
    """

    position: int
    page: int


def split_planes(chunk: Bits, heads: int, dim: int, page: int) -> tuple[Bits, Bits]:
    """Return K and V, [layers, heads, tokens, dim] each, of a chunk [1 or 2, layers, tokens, width]; maybe views."""
    halves, layers, tokens, _ = chunk.shape
    if halves == 2:
        rows = chunk.reshape(2, layers, tokens, heads, dim).swapaxes(2, 3)
        return rows[0], rows[1]
    if not page:
        rows = chunk.reshape(layers, tokens, heads, 2, dim).transpose(3, 0, 2, 1, 4)
        return rows[0], rows[1]
    pages = chunk.reshape(layers, tokens // page, page, heads, 2 * dim).transpose(0, 3, 1, 2, 4)
    flat = pages.reshape(layers, heads, tokens // page, 2, page * dim)
    whole = layers, heads, tokens, dim
    k = flat[:, :, :, 0].reshape(layers, heads, tokens // page, dim, page).swapaxes(3, 4)
    return k.reshape(whole), flat[:, :, :, 1].reshape(whole)


def join_planes(k: Bits, v: Bits, chunk: Bits, page: int) -> None:
    """Write K and V, [layers, heads, tokens, dim] each, to a chunk; the reverse of `split_planes`."""
    layers, heads, tokens, dim = k.shape
    if not page:
        to_k, to_v = split_planes(chunk, heads, dim, 0)  # views
        to_k[:], to_v[:] = k, v
        return
    flat = np.empty((layers, heads, tokens // page, 2, page * dim), chunk.dtype)
    turned = k.reshape(layers, heads, tokens // page, page, dim).swapaxes(3, 4)
    flat[:, :, :, 0] = turned.reshape(layers, heads, tokens // page, page * dim)
    flat[:, :, :, 1] = v.reshape(layers, heads, tokens // page, page * dim)
    pages = flat.reshape(layers, heads, tokens // page, page, 2 * dim).transpose(0, 2, 3, 1, 4)
    chunk[:] = pages.reshape(chunk.shape)


class PlaceFinder:
    """Finds the place of chunks by a profile. Any thread may call.

    Args:
        profile: of the model; all layers keep all tokens and have heads of one shape.

    Attributes:
        layers, heads, dim: of a chunk of the whole model.

    Raises ConfigError for a model whose chunks cannot be coded.
    """

    def __init__(self, profile: CodecProfile) -> None:
        planes = {(plane.layer, plane.role): plane for plane in profile.planes}
        shapes = {(plane.heads, plane.dim) for plane in profile.planes}
        self.layers = 1 + max((plane.layer for plane in profile.planes), default=-1)
        keys = [planes.get((layer, "k")) for layer in range(self.layers)]
        values = [planes.get((layer, "v")) for layer in range(self.layers)]
        if len(shapes) != 1 or None in keys or None in values:
            raise ConfigError("chunks of a model whose layers differ cannot be coded", fix=_ADVICE)
        ((self.heads, self.dim),) = shapes
        #: Of layers whose K is turned by one rotation: numbers, frequencies, and their means as complex numbers.
        self._turns: list[tuple[list[int], npt.NDArray[np.float64], Bits, tuple[slice, slice]]] = []
        for number, rope in enumerate(profile.ropes):
            layers = [i for i, key in enumerate(keys) if key is not None and key.rope == number]
            if layers and rope.inv_freq:
                means = np.stack([_mean(plane) for plane in keys if plane is not None and plane.rope == number])
                means *= rope.scale
                self._turns.append((layers, np.array(rope.inv_freq), _complex(means, rope.pairs), rope.pairs))
        if not self._turns:
            raise ConfigError(
                "chunks of a model that does not rotate K cannot be coded: their positions are not known",
                fix=_ADVICE,
            )
        self._page = 0

    def find(self, chunk: Bits, dtype: str) -> ChunkPlace | None:
        """Return the place of a chunk, bits [1 or 2, layers, tokens, width] of ``dtype``; None if nothing fits well.

        A chunk begins at a multiple of its tokens. It must have the ``layers`` and the width of this model.
        """
        tokens = chunk.shape[2]
        for page in self._pages(chunk):
            seen = max(_TOKENS, page) // page * page if page else _TOKENS
            k = to_float32(split_planes(chunk[:, :, : min(seen, tokens)], self.heads, self.dim, page)[0], dtype)
            fits = self._fits(k, np.arange(0, _POSITIONS, tokens))
            best = int(np.argmax(fits))
            if fits[best] > max(_LEAST_FIT, np.delete(fits, best).max(initial=0.0) + _LEAST_LEAD):
                # What stood between two multiples may fit at one of them, but fits better in between.
                near = np.arange(max(best - 1, 0) * tokens, (best + 1) * tokens)
                if near[np.argmax(self._fits(k, near))] != best * tokens:
                    return None
                self._page = page
                return ChunkPlace(best * tokens, page)
        return None

    def _pages(self, chunk: Bits) -> Iterator[int]:
        """Orders that a chunk may have, the one that was found last before the others."""
        possible = [0, *(page for page in _PAGES if chunk.shape[0] == 1 and chunk.shape[2] % page == 0)]
        last = self._page if self._page in possible else 0
        yield last
        yield from (page for page in possible if page != last)

    def _fits(self, k: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the share of K [layers, heads, tokens, dim] that the mean explains, by the position of the first."""
        explained, whole = np.zeros(len(positions)), 0.0
        with np.errstate(all="ignore"):  # numbers that are no numbers fit nowhere
            for layers, frequencies, means, pairs in self._turns:
                rows = _complex(k[layers], pairs)
                turn = np.exp(-1j * np.arange(k.shape[2])[:, None] * frequencies)
                products = (rows * turn).sum(2) * means.conj()
                # Layers count alike: each by the size of its K.
                weight = 1 / np.maximum((np.abs(rows) ** 2).sum((1, 2, 3)), 1e-30)
                summed = (products.sum(1) * weight[:, None]).sum(0)
                found = (np.exp(-1j * positions[:, None] * frequencies) @ summed).real
                own = (np.abs(means) ** 2).sum((1, 2)) * k.shape[2]
                explained += 2 * found - (own * weight).sum()
                whole += len(layers)
        return explained / whole


def _mean(plane: PlaneProfile) -> npt.NDArray[np.float64]:
    """The mean of a plane's rows, [heads, dim]."""
    mean = np.zeros((plane.heads, plane.dim))
    for group in plane.groups:
        mean[group.first : group.first + group.heads] = group.mean.reshape(group.heads, plane.dim)
    return mean


def _complex(rows: Bits, pairs: tuple[slice, slice]) -> Bits:
    return rows[..., pairs[0]] + 1j * rows[..., pairs[1]]
