"""A calibration profile: what calibration learnt about one model's K and V, and what each lossy level of it costs.

The scheme (each step kept because it lowered the bits at equal divergence): keys before rotary embedding; minus the
channel's mean; divided by the token's RMS; then a linear map ``y = A x`` in which an error of given length costs the
same divergence whatever its direction. With M the Fisher information of the next token's distribution with respect to a
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

from ctxreuse.block.levels import LevelInfo
from ctxreuse.identity.model import ModelSpace
from ctxreuse.rope import Rotary

__all__ = [
    "MOST_CHANNELS",
    "SINKS",
    "ChannelGroup",
    "CodecProfile",
    "Coding",
    "KindFigures",
    "PlaneProfile",
    "ProfileLevel",
    "model_digest",
]

#: Most channels of a group.
MOST_CHANNELS = 4096
#: First tokens of a context are kept as they are: attention leans on them, and 0.08 bit a value buys a fifth of the KL.
SINKS = 4

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


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

    def rounded(self, narrow: int) -> ChannelGroup:
        """Return the group with the basis of components from ``narrow`` on rounded to multiples of 64.

        Such rows fit a byte, which decoders multiply twice as fast.
        """
        if narrow >= len(self.basis):
            return self
        tail = np.clip(np.rint(self.basis[narrow:] / 64), -127, 127) * 64
        return msgspec.structs.replace(self, basis=np.concatenate([self.basis[:narrow], tail.astype(np.int16)]))


class PlaneProfile(msgspec.Struct, frozen=True, eq=False):
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
    with a base): tables of the refinement's symbols, one for each component that the base codes. ``narrow``: from this
    component on, the level's basis is `ChannelGroup.rounded`.
    """

    table: Bytes
    shift: Bytes
    refine: Bytes
    narrow: int = MOST_CHANNELS


class KindFigures(msgspec.Struct, array_like=True, frozen=True):
    """What a level does to texts of one kind: mean KL in nats, bits a value."""

    kl: float
    bits: float


class ProfileLevel(msgspec.Struct, frozen=True, eq=False):
    """A level: its step in the metric of the transform, measured figures, and one Coding a group, in plane order.

    ``kinds``: the figures by kind of text; profiles of 0.1.0 have none. The name promises the worst of them.
    """

    info: LevelInfo
    step: float
    codings: tuple[Coding, ...]
    kinds: dict[str, KindFigures] = {}


class CodecProfile(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What a calibration measured; immutable, named by the SHA-256 of its bytes (profile_bytes.py).

    ``model`` is model_digest of the spaces it serves; ``tables`` uint8 [tables, 32], frequencies of 256. ``notes``:
    when and from which text it was made. Levels are in order from coarse to fine. ``seen``: one bit a token id, those
    of the calibration texts (empty in profiles of 0.1.0); ``unseen``: the share of other ids from which on a block
    counts as text of an unknown kind. ``version``: 1, or 2, where blocks are encoded by a `WholeForward` and levels
    round their basis.
    """

    model: bytes
    ropes: tuple[Rotary, ...]
    planes: tuple[PlaneProfile, ...]
    tables: Bytes
    levels: tuple[ProfileLevel, ...]
    notes: dict[str, str] = {}
    seen: bytes = b""
    unseen: float = 1.0
    version: int = 1

    @cached_property
    def index(self) -> dict[tuple[int, str], int]:
        """Number of the plane of (layer, role)."""
        return {(plane.layer, plane.role): i for i, plane in enumerate(self.planes)}

    @cached_property
    def first_group(self) -> tuple[int, ...]:
        """For each plane, the number of its first group in the ``codings`` of a level."""
        return tuple(np.cumsum([0, *(len(plane.groups) for plane in self.planes)])[:-1].tolist())

    def unseen_share(self, tokens: npt.NDArray[np.int32]) -> float:
        """Share of the ids that no calibration text had; 0 if the profile does not say which it had."""
        if not self.seen or not len(tokens):
            return 0.0
        # Ids beyond the bitmap were not seen either: take() clips them to the empty bit behind it.
        return 1.0 - float(self._seen.take(tokens, mode="clip").mean())

    @cached_property
    def _seen(self) -> npt.NDArray[np.bool_]:
        return np.append(np.unpackbits(np.frombuffer(self.seen, np.uint8)), 0).astype(bool)

    def number(self, name: str) -> int:
        """Index of the level ``name``; KeyError if the profile has none."""
        for i, level in enumerate(self.levels):
            if level.info.name == name:
                return i
        raise KeyError(name)


def model_digest(space: ModelSpace) -> bytes:
    """SHA-256 of what a profile depends on: neither the numeric type nor the page size is part of it."""
    body = msgspec.msgpack.encode([space.weights, space.architecture, space.rope, space.layers])
    return hashlib.sha256(b"ctxreuse/card" + body).digest()
