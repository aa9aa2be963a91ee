"""The exit profile: the ramps of one model as calibration made them; written as checked bytes.

::

    offset  size  field (little-endian)
    0       8     magic "CTXREXIT"
    8       4     version (1)
    12      4     header length h
    16      8     xxh3-64 of all that follows
    24      h     header: MessagePack, see _Header
    ...           per ramp, without padding: candidates int32 [n], codes int8 [n, width], scales float32 [n],
                  bias float32 [n]
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ctxreuse.codec.profile_store import SingleProfileStore
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.linear import Weights

__all__ = ["MAX_PROFILE", "ExitProfile", "ExitProfileStore", "Ramp", "read_exit_profile", "write_exit_profile"]

MAGIC, VERSION = b"CTXREXIT", 1
MAX_PROFILE = 1 << 28
_PRELUDE = struct.Struct("<8sIIQ")
_MOST_RAMPS, _MOST_WIDTH = 8, 1 << 16


class Ramp(msgspec.Struct, frozen=True):
    """A light head behind some of a model's layers.

    Attributes:
        depth: layers before it.
        candidates: the tokens that it can say, int32 [n], ascending.
        head: int8 [n, width] with scales and bias: times the hidden state, divided by its root mean square, the logits.
        agrees: the share of held-out tokens of which it says what the model says.
    """

    depth: int
    candidates: npt.NDArray[np.int32]
    head: Weights
    agrees: float


class ExitProfile(msgspec.Struct, frozen=True):
    """The ramps of one model, by depth. ``model``: its `model_digest`, the same for all numeric types; ``width``: of
    its hidden states; ``layers``: how many it has; ``notes``: of what, when and by whom, for people."""

    model: bytes
    width: int
    layers: int
    ramps: tuple[Ramp, ...]
    notes: Mapping[str, str] = {}


class _Ramp(msgspec.Struct, array_like=True, frozen=True):
    depth: int
    candidates: int
    agrees: float


class _Header(msgspec.Struct, array_like=True, frozen=True):
    model: bytes
    width: int
    layers: int
    vocabulary: int
    ramps: tuple[_Ramp, ...]
    notes: dict[str, str]


def write_exit_profile(profile: ExitProfile) -> bytes:
    """Return the bytes of a profile; equal profiles give equal bytes. FormatError if they could not be read back."""
    vocabulary = max((int(ramp.candidates.max(initial=0)) + 1 for ramp in profile.ramps), default=1)
    ramps = tuple(_Ramp(ramp.depth, len(ramp.candidates), float(ramp.agrees)) for ramp in profile.ramps)
    notes = dict(sorted(profile.notes.items()))
    header = msgspec.msgpack.encode(_Header(profile.model, profile.width, profile.layers, vocabulary, ramps, notes))
    parts = [header]
    for ramp in profile.ramps:
        head = ramp.head
        parts += [ramp.candidates.astype("<i4").tobytes(), np.ascontiguousarray(head.data, np.int8).tobytes()]
        parts += [np.ascontiguousarray(of, "<f4").tobytes() for of in (head.scales, head.bias)]
    body = b"".join(parts)
    data = _PRELUDE.pack(MAGIC, VERSION, len(header), xxhash.xxh3_64_intdigest(body)) + body
    read_exit_profile(data)
    return data


def read_exit_profile(data: bytes | bytearray | memoryview) -> ExitProfile:
    """Parse a profile. Raises FormatError with the reason. Arrays are read-only."""
    view = memoryview(data).toreadonly()
    if not _PRELUDE.size <= len(view) <= MAX_PROFILE:
        raise _fail(f"of {len(view)} bytes")
    magic, version, length, check = _PRELUDE.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise _fail(f"has magic {bytes(magic)!r} and version {version}, this reads version {VERSION}")
    body = view[_PRELUDE.size :]
    if length > len(body) or xxhash.xxh3_64_intdigest(body) != check:
        raise _fail("is damaged")
    try:
        header = msgspec.msgpack.decode(body[:length], type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _fail(f"is malformed: {error}") from None
    if len(header.model) != KEY_BYTES or not 0 < header.width <= _MOST_WIDTH or len(header.ramps) > _MOST_RAMPS:
        raise _fail("has impossible counts")
    if len(header.notes) > 64 or any(len(text) > 4096 for note in header.notes.items() for text in note):
        raise _fail("has too many or too long notes")
    if any(a.depth >= b.depth for a, b in pairwise(header.ramps)):
        raise _fail("has ramps that do not follow each other")
    take, ramps = _Taker(body, length), []
    for one in header.ramps:
        if not (0 < one.depth < header.layers <= 1 << 16 and 0 <= one.agrees <= 1):
            raise _fail(f"has a ramp behind layer {one.depth} of {header.layers}")
        if not 1 < one.candidates <= header.vocabulary <= 1 << 22:
            raise _fail(f"has a ramp of {one.candidates} tokens")
        candidates, codes = take("i4", one.candidates), take("i1", one.candidates * header.width)
        if candidates[0] < 0 or candidates[-1] >= header.vocabulary or (np.diff(candidates) <= 0).any():
            raise _fail("names tokens that there cannot be")
        scales, bias = take("f4", one.candidates), take("f4", one.candidates)
        if not (np.isfinite(scales).all() and np.isfinite(bias).all()):
            raise _fail("has a number that is not finite")
        head = Weights(codes.reshape(one.candidates, header.width), scales, bias)
        ramps.append(Ramp(one.depth, candidates, head, one.agrees))
    if take.at != len(body):
        raise _fail("has bytes left over")
    return ExitProfile(header.model, header.width, header.layers, tuple(ramps), header.notes)


class _Taker:
    """Reads arrays in sequence; FormatError where the bytes end too early."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view, self.at = view, at

    def __call__(self, dtype: str, count: int) -> npt.NDArray[Any]:
        kind = np.dtype("<" + dtype)
        end = self.at + count * kind.itemsize
        if end > len(self._view):
            raise _fail("is cut off")
        array = np.frombuffer(self._view, kind, count, self.at)
        self.at = end
        return array if array.flags.aligned else array.copy()  # kernels read vectors of whole numbers


def _fail(what: str) -> FormatError:
    return FormatError(f"exit profile {what}", fix="Calibrate again: `ctxreuse calibrate NAME --exits`")


class ExitProfileStore(SingleProfileStore[ExitProfile]):
    """The exit profiles of this user, one file a model beside its codec profiles."""

    def __init__(self, folder: Path | str | None = None) -> None:
        super().__init__(folder, "exits.ramps", read_exit_profile, write_exit_profile, most=MAX_PROFILE)

    def fits(self, profile: ExitProfile, space: ModelSpace) -> bool:
        """See `SingleProfileStore.fits`; its ramps must also be of this model's layers and say only its tokens."""
        last = max((int(ramp.candidates[-1]) for ramp in profile.ramps), default=0)
        return super().fits(profile, space) and profile.layers == len(space.layers) and last < space.vocab_size
