"""The chunk profile: what calibration measured of a model whose chunks are relocated; written as checked bytes.

::

    offset  size  field (little-endian)
    0       8     magic "CTXRCHNK"
    8       4     version (1)
    12      4     body length b
    16      8     xxh3-64 of the body
    24      b     MessagePack of the profile; nothing follows
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import xxhash

from ctxreuse.codec.profile_store import SingleProfileStore
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.reuse.inplace.pages import Selection
from ctxreuse.reuse.recompute import SHARE, parse_policy

__all__ = [
    "MAX_PROFILE",
    "ChunkKind",
    "ChunkProfile",
    "ChunkProfileStore",
    "InPlaceMeasurement",
    "PolicyMeasurement",
    "read_chunk_profile",
    "write_chunk_profile",
]

#: Where a run stood when it was computed: at the ``head`` of its prompt, among the tokens that all others attend to
#: (attention sinks), or ``behind`` it.
ChunkKind: TypeAlias = Literal["head", "behind"]

MAGIC, VERSION = b"CTXRCHNK", 1
MAX_PROFILE = 1 << 20
_PRELUDE = struct.Struct("<8sIIQ")
_MOST = 1024
#: Kinds of policies that version 0.1.0 could measure; such measurements are read over.
_RETIRED = re.compile(
    rf"random-{SHARE}|last-{SHARE}|ask\*[kv]-{SHARE}(@\d+)?"
    rf"|[kv]-{SHARE}(>{SHARE}(@\d+(>\d+)+)?|(>{SHARE})*(@\d+(>\d+)*)?/\d+)",
    re.ASCII,
)


class PolicyMeasurement(msgspec.Struct, frozen=True):
    """One recompute policy on runs of one kind, over ``windows`` texts of ``chunks`` runs of ``tokens`` tokens each.

    ``kl``: nats a token against full prefill, mean over the windows; ``kl_high``: upper bound of that mean
    (90 %), or the mean of the worst kind of text or half of the worst window where that is more.
    ``top1``: share of equal first choices. ``dnll``: nats a token that the text became less likely. ``recomputed``:
    layer-tokens recomputed, as a share of those of the runs.
    """

    policy: str = msgspec.field(name="repair")
    kind: ChunkKind
    chunks: int
    tokens: int
    kl: float
    kl_high: float
    top1: float
    dnll: float
    recomputed: float
    windows: int


class InPlaceMeasurement(msgspec.Struct, frozen=True):
    """Attention to runs pinned in ``format``, reading all of their pages (``selection`` None) or some.

    Measured over ``windows`` texts after ``tokens`` pinned ones that were not relocated; figures as in
    `PolicyMeasurement`.
    """

    format: Literal["stored", "int8", "int4"]
    selection: Selection | None
    tokens: int
    kl: float
    kl_high: float
    top1: float
    dnll: float
    windows: int

    @property
    def words(self) -> str:
        """For people: ``int8``, ``25% of int8, pages of 16``."""
        if self.selection is None:
            return self.format
        return f"{self.selection.share:.0%} of {self.format}, pages of {self.selection.page}"


class ChunkProfile(msgspec.Struct, frozen=True):
    """What is known of one model.

    ``model``: its `model_digest`, the same for all numeric types and block sizes. ``limits``: by kind, the largest
    deviation at which a run may still be used: the squared distance of probe rows of V at layer ``probe_layer`` from
    freshly computed ones, over their squared length. ``notes``: of what, when and by whom, for people. ``in_place``:
    what attention to pinned runs costs, as far as that was measured.
    """

    model: bytes
    probe_layer: int
    limits: Mapping[ChunkKind, float]
    measured: tuple[PolicyMeasurement, ...]
    notes: Mapping[str, str] = {}
    in_place: tuple[InPlaceMeasurement, ...] = msgspec.field(name="reads", default=())


def write_chunk_profile(profile: ChunkProfile) -> bytes:
    """The bytes of a profile. Raises FormatError for one that could not be read back."""
    body = msgspec.msgpack.encode(profile, order="deterministic")
    data = _PRELUDE.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body
    read_chunk_profile(data)
    return data


def read_chunk_profile(data: bytes | bytearray | memoryview) -> ChunkProfile:
    """Read a profile; raises FormatError with the reason for other bytes."""
    view = memoryview(data)
    if not _PRELUDE.size <= len(view) <= MAX_PROFILE:
        raise _fail(f"of {len(view)} bytes")
    magic, version, length, check = _PRELUDE.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise _fail(f"has magic {bytes(magic)!r} and version {version}, this reads version {VERSION}")
    body = view[_PRELUDE.size :]
    if length != len(body) or xxhash.xxh3_64_intdigest(body) != check:
        raise _fail("is damaged")
    try:
        profile = msgspec.msgpack.decode(body, type=ChunkProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _fail(f"is malformed: {error}") from None
    _check(profile)
    kept = tuple(one for one in profile.measured if _known(one.policy))
    return profile if len(kept) == len(profile.measured) else msgspec.structs.replace(profile, measured=kept)


def _known(policy: str) -> bool:
    """False for a policy that the version before could measure; raises FormatError for any other unknown name."""
    parts = policy.removesuffix("+drift").split("+")
    current = [part for part in parts if not _RETIRED.fullmatch(part)]
    try:
        parse_policy(policy if len(current) == len(parts) else "+".join(current) or "none")
    except ConfigError as error:
        raise _fail(f"names {error.what}") from None
    return len(current) == len(parts)


def _check(profile: ChunkProfile) -> None:
    if len(profile.model) != KEY_BYTES or not 0 <= profile.probe_layer < 1 << 16 or len(profile.measured) > _MOST:
        raise _fail("has impossible counts")
    if not all(math.isfinite(limit) and limit >= 0 for limit in profile.limits.values()):
        raise _fail("has a limit out of range")
    if len(profile.notes) > 64 or any(len(text) > 4096 for note in profile.notes.items() for text in note):
        raise _fail("has too many or too long notes")
    for one in profile.measured:
        counts = 0 < one.chunks < 1 << 16 and 0 < one.tokens < 1 << 24 and 0 < one.windows < 1 << 24
        if not (_sound(one) and counts and 0 <= one.recomputed <= 1):
            raise _fail(f"has figures of {one.policy[:64]} out of range")
    if len({(one.policy, one.kind, one.chunks, one.tokens) for one in profile.measured}) != len(profile.measured):
        raise _fail("has a measurement twice")
    for read in profile.in_place:
        pages = read.selection
        if not (_sound(read) and 0 < read.tokens < 1 << 24 and 0 < read.windows < 1 << 24):
            raise _fail(f"has figures of {read.format} in place out of range")
        if pages is not None and not (0 < pages.share <= 1 and min(pages.page, pages.least, pages.queries) > 0):
            raise _fail("has a selection out of range")
    distinct = {(read.format, read.selection) for read in profile.in_place}
    if len(profile.in_place) > _MOST or len(distinct) != len(profile.in_place):
        raise _fail("has an in-place measurement twice")


def _sound(one: PolicyMeasurement | InPlaceMeasurement) -> bool:
    # Comparisons with a NaN are false, so none gets through.
    return 0 <= one.kl <= one.kl_high < 1e4 and 0 <= one.top1 <= 1 and abs(one.dnll) < 1e4


def _fail(what: str) -> FormatError:
    return FormatError(f"chunk profile {what}", fix="Calibrate again: `ctxreuse calibrate NAME --chunks`")


class ChunkProfileStore(SingleProfileStore[ChunkProfile]):
    """The chunk profiles of this user, one file a model beside its codec profiles."""

    def __init__(self, folder: Path | str | None = None) -> None:
        super().__init__(folder, "chunks.measured", read_chunk_profile, write_chunk_profile, most=MAX_PROFILE)
