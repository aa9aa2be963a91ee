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
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.levels import LevelInfo, is_joint
from ctxreuse.identity.model import ModelSpace
from ctxreuse.rope import Rotary

__all__ = [
    "JOINT_SINKS",
    "MOST_CHANNELS",
    "SINKS",
    "ChannelGroup",
    "CodecProfile",
    "Coding",
    "JointGroup",
    "JointProfile",
    "KindFigures",
    "Place",
    "PlanePart",
    "PlaneProfile",
    "PlaneSet",
    "ProfileLevel",
    "model_digest",
]

#: Most channels of a group.
MOST_CHANNELS = 4096
#: First tokens of a context are kept as they are: attention leans on them, and 0.08 bit a value buys a fifth of the KL.
SINKS = 4
#: The same at joint levels: three more, .06 bits a value of 768 tokens, change the KL by less than a hundredth there.
JOINT_SINKS = 1

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
#: A layer, and ``"k"`` or ``"v"``.
Place = tuple[int, str]


class ChannelGroup(msgspec.Struct, frozen=True, eq=False):
    """One transform: the channels of ``heads`` heads from ``first`` on, C = heads * dim, head by head.

    ``mean`` and ``gain`` float32 [C]; ``forward`` float32 [n, C], largest variance first; ``basis`` int16 [n, C],
    within ±8191 so that sums of 16-bit products stay in 32 bits. ``log_rms``: log2 of the usual RMS of a centred token.
    ``large``: it is that of the largest, and smaller tokens are not scaled (`JointGroup`).
    """

    first: int
    heads: int
    log_rms: float
    mean: Floats
    gain: Floats
    forward: Floats
    basis: npt.NDArray[np.int16]
    large: bool = False

    def rounded(self, narrow: int) -> ChannelGroup:
        """Return the group with the basis of components from ``narrow`` on rounded to multiples of 64.

        Such rows fit a byte, which decoders multiply twice as fast.
        """
        if narrow >= len(self.basis):
            return self
        tail = np.clip(np.rint(self.basis[narrow:] / 64), -127, 127) * 64
        return msgspec.structs.replace(self, basis=np.concatenate([self.basis[:narrow], tail.astype(np.int16)]))


class JointGroup(msgspec.Struct, frozen=True, eq=False):
    """A transform of several planes: heads as in `ChannelGroup`, of each of the planes, which come one after another.

    It has thousands of channels, so it is kept in as few bytes as it is used with: ``rows`` int16 [n, C] and
    ``exponents`` int32 [n] of a `WholeForward`; of the basis the first w components as ``basis`` int16 [w, C], the
    others, which every level rounds, as ``tail`` int8 [n - w, C], a 64th of them. ``log_rms``: of the largest token.
    """

    first: int
    heads: int
    log_rms: float
    mean: Floats
    gain: Floats
    rows: npt.NDArray[np.int16]
    exponents: npt.NDArray[np.int32]
    basis: npt.NDArray[np.int16]
    tail: npt.NDArray[np.int8]

    def rounded(self, narrow: int) -> ChannelGroup:
        """Return the group as a level decodes with it, see `ChannelGroup.rounded`; without a forward map."""
        basis = np.concatenate([self.basis, self.tail.astype(np.int16) * np.int16(64)])
        forward = np.empty((0, len(self.mean)), np.float32)
        group = ChannelGroup(self.first, self.heads, self.log_rms, self.mean, self.gain, forward, basis, large=True)
        return group.rounded(narrow)


class PlaneProfile(msgspec.Struct, frozen=True, eq=False):
    """K or V of one layer: ``rope`` is the index of its rotation, -1 for V."""

    layer: int
    role: Literal["k", "v"]
    heads: int
    dim: int
    rope: int
    groups: tuple[ChannelGroup, ...]

    #: How many first tokens of a context are kept as they are.
    sinks: ClassVar[int] = SINKS

    @property
    def parts(self) -> tuple[PlanePart, ...]:
        """The plane."""
        return (PlanePart(self.layer, self.role, self.rope),)


class PlanePart(msgspec.Struct, frozen=True, array_like=True):
    """One of the planes that are coded as one, and what turns it."""

    layer: int
    role: Literal["k", "v"]
    rope: int

    @property
    def place(self) -> Place:
        return self.layer, self.role


class JointProfile(msgspec.Struct, frozen=True, eq=False):
    """K and V of several layers that are coded as one, of ``heads`` heads each; the stream stands in the first's place.

    ``parts``: the planes, in the order of the groups' channels.
    """

    parts: tuple[PlanePart, ...]
    heads: int
    dim: int
    groups: tuple[JointGroup, ...]

    #: See `PlaneProfile`.
    sinks: ClassVar[int] = JOINT_SINKS


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

    @property
    def joint(self) -> bool:
        """True if the planes are `CodecProfile.joint`."""
        return is_joint(self.info.name)


class PlaneSet(NamedTuple):
    """The planes of a level. ``number``: that of the plane by place; ``first_group``: each one's, of all groups."""

    planes: tuple[PlaneProfile | JointProfile, ...]
    number: dict[Place, int]
    first_group: tuple[int, ...]

    @classmethod
    def of(cls, planes: tuple[PlaneProfile | JointProfile, ...]) -> PlaneSet:
        """Number planes and their groups."""
        number = {part.place: i for i, plane in enumerate(planes) for part in plane.parts}
        return cls(planes, number, tuple(np.cumsum([0, *(len(plane.groups) for plane in planes)])[:-1].tolist()))


class CodecProfile(msgspec.Struct, frozen=True, eq=False, dict=True, weakref=True):
    """What a calibration measured; immutable, named by the SHA-256 of its bytes (profile_bytes.py).

    ``model`` is model_digest of the spaces it serves; ``tables`` uint8 [tables, 32], frequencies of 256. ``notes``:
    when and from which text it was made. Levels are in order from coarse to fine. ``seen``: one bit a token id, those
    of the calibration texts (empty in profiles of 0.1.0); ``unseen``: the share of other ids from which on a block
    counts as text of an unknown kind. ``version``: 1; 2, where blocks are encoded by a `WholeForward` and levels
    round their basis; 3, where there are ``joint`` planes: the same K and V, those of several layers coded as one.
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
    joint: tuple[JointProfile, ...] = ()

    def planes_of(self, level: ProfileLevel) -> PlaneSet:
        """Return the planes as a level codes them."""
        return self.together if level.joint else self.alone

    @cached_property
    def alone(self) -> PlaneSet:
        """``planes``, numbered."""
        return PlaneSet.of(self.planes)

    @cached_property
    def together(self) -> PlaneSet:
        """``joint``, numbered."""
        return PlaneSet.of(self.joint)

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
