"""A card: what calibration learnt about one model's K and V, and what each lossy level of it costs.

The scheme (each step kept because it lowered the bits at equal divergence): keys before rotary embedding; minus the
channel's mean; divided by the token's RMS; then a linear map ``y = A x`` in which an error of given length does the
same damage whatever its direction. With M the Fisher information of the next token's distribution with respect to a
cached vector and S the covariance of the vectors, R = M^(1/2) and U the eigenvectors of R S R, that is A = U^T R: the
Karhunen-Loève transform under the model's own metric. One step for all components of all layers is then the best
allocation of bits (reverse water-filling, Cover & Thomas, section 10.3.3), and components of little variance cost none.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.codec.levels import LevelInfo
from ctxreuse.model import ModelSpace

__all__ = ["SINKS", "Card", "CardLevel", "ChannelGroup", "Coding", "PlaneCard", "Rope", "model_digest"]

#: First tokens of a context are kept as they are: attention leans on them, and 0.08 bit a value buys a fifth of the KL.
SINKS = 4

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Rope(msgspec.Struct, frozen=True, eq=False):
    """Rotary embedding of a layer's keys: ``half`` pairs (i, i + r/2), ``pairs`` (2i, 2i + 1), ``none`` leaves K alone.

    ``inv_freq`` float64 [r/2]: the angle at position p is p * inv_freq. ``scale``: the factor that the model puts on
    cosine and sine (YaRN's attention factor).
    """

    style: Literal["half", "pairs", "none"]
    inv_freq: npt.NDArray[np.float64]
    scale: float = 1.0


class ChannelGroup(msgspec.Struct, frozen=True, eq=False):
    """One transform: the channels of ``heads`` heads from ``first`` on, C = heads * dim, head by head.

    ``mean`` and ``gain`` float32 [C]; ``forward`` float32 [n, C], largest variance first; ``basis`` int16 [n, C],
    within ±8191 so that sums of 16-bit products stay in 32 bits. ``log_rms``: log2 of the usual RMS of a centred token.
    """

    first: int
    heads: int
    log_rms: float
    mean: Floats
    gain: Floats
    forward: Floats
    basis: npt.NDArray[np.int16]


class PlaneCard(msgspec.Struct, frozen=True, eq=False):
    """K or V of one layer: ``rope`` is the index of its rotation, -1 for V."""

    layer: int
    role: Literal["k", "v"]
    heads: int
    dim: int
    rope: int
    groups: tuple[ChannelGroup, ...]


class Coding(msgspec.Struct, frozen=True, eq=False):
    """How a level codes the components of a group: uint8 [n_a] each, for the first n_a components.

    ``table``: index of the component's table; ``shift``: low bits that are stored as they are; ``refine`` (of a level
    with a base): tables of the refinement's symbols, one for each component that the base codes.
    """

    table: Bytes
    shift: Bytes
    refine: Bytes


class CardLevel(msgspec.Struct, frozen=True, eq=False):
    """A level: its step in the metric of the transform, measured figures, and one Coding a group, in plane order."""

    info: LevelInfo
    step: float
    codings: tuple[Coding, ...]


class Card(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What a calibration measured; immutable, named by the SHA-256 of its bytes (card_bytes.py).

    ``model`` is model_digest of the spaces it serves; ``tables`` uint8 [tables, 32], frequencies of 256. ``notes`` says
    when and from what text it was made. Levels stand from coarse to fine.
    """

    model: bytes
    ropes: tuple[Rope, ...]
    planes: tuple[PlaneCard, ...]
    tables: Bytes
    levels: tuple[CardLevel, ...]
    notes: dict[str, str] = {}

    @cached_property
    def index(self) -> dict[tuple[int, str], int]:
        """Number of the plane of (layer, role)."""
        return {(plane.layer, plane.role): i for i, plane in enumerate(self.planes)}

    @cached_property
    def first_group(self) -> tuple[int, ...]:
        """For each plane, the number of its first group in the ``codings`` of a level."""
        return tuple(np.cumsum([0, *(len(plane.groups) for plane in self.planes)])[:-1].tolist())

    def number(self, name: str) -> int:
        """Index of the level ``name``; KeyError if the card has none."""
        for i, level in enumerate(self.levels):
            if level.info.name == name:
                return i
        raise KeyError(name)


def model_digest(space: ModelSpace) -> bytes:
    """SHA-256 of what a card depends on: the same weights in another numeric type or page size have the same card."""
    body = msgspec.msgpack.encode([space.weights, space.architecture, space.rope, space.layers])
    return hashlib.sha256(b"ctxreuse/card" + body).digest()
