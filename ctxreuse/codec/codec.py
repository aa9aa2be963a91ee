"""Encode and decode whole blocks and states of one model space at the levels of its profile."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block.format import BlockView, Layout, Plane, layout_of, reseal, rewriter
from ctxreuse.block.levels import (
    EXACT,
    PACKED,
    LevelInfo,
    LevelName,
    approx,
    expected_kl,
    family,
    is_exact,
    is_joint,
    parse_level,
)
from ctxreuse.codec import lossless
from ctxreuse.codec.blocks import BlockCoder, source_of
from ctxreuse.codec.joint import JointPlanes
from ctxreuse.codec.planes import PlaneCoder, plane_coder
from ctxreuse.codec.profile import CodecProfile, Place, model_digest
from ctxreuse.codec.profile_store import ProfileStore
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.identity.model import ModelSpace

__all__ = ["Codec", "CodecDevice"]

Bytes = npt.NDArray[np.uint8]


class CodecDevice(Protocol):
    """Encodes blocks elsewhere than on the CPU."""

    def encode(
        self, view: BlockView, profile: CodecProfile, level: str, dtype: str
    ) -> dict[tuple[int, str], memoryview] | None:
        """Return the coded planes of a raw block, those that the CPU gives; None if the CPU should encode it."""
        ...


class Codec:
    """Encoder and decoder of one model space. Immutable but for caches; any thread may call anything.

    ``profile``, (digest as hex, profile), is needed for lossy levels. Blocks coded with an older profile of the same
    model are read as long as ``profiles`` has it.
    """

    def __init__(
        self,
        space: ModelSpace,
        profile: tuple[str, CodecProfile] | None = None,
        *,
        profiles: ProfileStore | None = None,
    ) -> None:
        if profile is not None and profile[1].model != model_digest(space):
            raise ConfigError("the profile belongs to another model", where=space.architecture, fix=_ADVICE)
        self.space, self.profiles = space, profiles
        self.digest = "" if profile is None else profile[0]
        self.profile = None if profile is None else profile[1]
        #: Encodes blocks on a device where that is faster; None: the CPU encodes all.
        self.device: CodecDevice | None = None
        self._coders: dict[str, _Coders] = {}
        self._joint = JointPlanes()
        self._packed = 0.75  # share of the raw bytes that "exact+rans" takes; follows what is encoded
        if profile is not None:
            self._coders[profile[0][:16]] = _Coders(profile[1])

    @classmethod
    def open(cls, space: ModelSpace, profiles: ProfileStore | None = None) -> Codec:
        """Return the codec of a space with the newest profile of its model in ``profiles`` (default: the user's)."""
        profiles = profiles or ProfileStore()
        return cls(space, profiles.newest(space), profiles=profiles)

    @property
    def levels(self) -> tuple[LevelInfo, ...]:
        """Levels at which blocks can be encoded: the exact ones, then the profile's from coarse to fine."""
        wide = 32 if self.space.dtype == "float32" else 16
        exact = (LevelInfo(EXACT, False, wide), LevelInfo(PACKED, False, wide * self._packed))
        return exact if self.profile is None else exact + tuple(level.info for level in self.profile.levels)

    def info(self, level: str) -> LevelInfo:
        """Return what a level costs and does; ``level`` with or without digest. ConfigError for an unknown one."""
        name = family(level).rpartition(">")[2]
        for info in self.levels:
            if info.name == name:
                return info
        if self.profile is None and 0 < expected_kl(name) < inf:
            raise ConfigError(f"level {name} needs a profile", where=self.space.architecture, fix=_ADVICE)
        names = ", ".join(info.name for info in self.levels)
        raise ConfigError(f"no such level: {name!r}", where=self.space.architecture, fix=f"There are {names}")

    def allowed(self, most: str) -> tuple[LevelInfo, ...]:
        """Levels that do no more damage than ``most``, exact ones first, then coarse to fine; "" allows exact only.

        ConfigError if ``most`` is no level here.
        """
        limit = expected_kl(self.info(most).name) if most else 0.0
        return tuple(info for info in self.levels if expected_kl(info.name) <= limit)

    def nbytes(self, level: str, tokens: int | None = None) -> int:
        """Return the expected bytes of a block of ``tokens`` (default: the space's block) at a level."""
        info, count = self.info(level), self.space.block_tokens if tokens is None else tokens
        item = 4 if self.space.dtype == "float32" else 2
        return round(self.space.token_nbytes // item * count * info.bits / 8)

    def knows(self, level: str) -> bool:
        """Return True if a block whose header says ``level`` can be decoded."""
        name = parse_level(level)
        return not name.profile or self._profile(name.profile) is not None

    def profile_of(self, level: str) -> CodecProfile:
        """Return the profile that a block of this level, with its digest, was coded with. Raises FormatError."""
        return self._required(parse_level(level).profile).profile

    def level_for(self, view: BlockView, level: str) -> str:
        """Return the level that keeps for ``view`` what ``level`` promises, spelt like ``level``.

        That is ``level`` itself, but for tokens such as calibration has not seen: then a level of a third of the KL at
        most, and the lossless one where the profile has none. A refinement's level stays: its base decides.
        """
        plain, _, digest = level.partition("@")
        if self.profile is None or is_exact(level) or ">" in level:
            return level
        if self.profile.unseen_share(np.frombuffer(view.header.tokens, "<i4")) <= self.profile.unseen:
            return level
        most = expected_kl(plain) / _STRICTER
        joint = is_joint(plain)
        finer = [info.name for info in self.levels if info.lossy and expected_kl(info.name) <= most]
        if not joint:  # who asked for a quick level gets none that takes longer
            finer = [name for name in finer if not is_joint(name)]
        if not finer:
            return PACKED
        stricter = max(finer, key=lambda name: (is_joint(name) == joint, expected_kl(name)))
        return str(LevelName(stricter, digest))

    # ---- whole blocks

    def encode(self, view: BlockView, level: str, *, into: Bytes | None = None) -> Bytes:
        """Encode the block or state ``view`` (raw planes) at ``level``: the same key, tokens and position.

        ``into``: memory for the result if it is large enough. Raises ConfigError for a level that is not here,
        FormatError for a view whose planes are coded, corrupt or of another space.
        """
        name = self.info(level).name
        if view.header.level != EXACT:
            # Coding what is lossy already would add damage that no profile has measured, or call it exact.
            raise FormatError(f"block of level {view.header.level!r} cannot be encoded as {name}")
        if name == EXACT:
            return np.frombuffer(view.buffer, np.uint8)
        if name == PACKED:
            return self._pack(view, into)
        return self._write(view, LevelName(name, self.digest[:16]), into)

    def refinement(self, view: BlockView, level: str) -> Bytes:
        """Return the refinement from the base of ``level`` to it, as a block; ConfigError if ``level`` has no base."""
        info = self.info(level)
        if not info.base:
            raise ConfigError(f"level {info.name} refines no other", where=self.space.architecture)
        return self._write(view, LevelName(info.name, self.digest[:16], info.base), None)

    def merge(self, view: BlockView, refinement: BlockView) -> Bytes:
        """Merge a base block and its refinement into the block of the finer level, equal to encoding at that level."""
        coders, name = self._pair(view, refinement)
        planes, streams = [], []
        for plane in view.layout.planes:
            coded = plane.dtype == "uint8" and plane.nbytes
            coder = coders.plane(name.name, plane.layer, plane.role) if coded else None
            data = view.plane(plane.layer, plane.role)
            if coder is not None:
                data = memoryview(coder.merge(data, refinement.plane(plane.layer, plane.role)))
            planes.append(Plane(plane.layer, plane.role, plane.dtype, (len(data),) if coder else plane.shape))
            streams.append(data)
        return self._seal(view, planes, streams, str(LevelName(name.name, name.profile)), None)

    def decode(self, view: BlockView, refinement: BlockView | None = None, *, into: Bytes | None = None) -> Bytes:
        """Return the block with raw planes: level "exact", or "approx~LEVEL" if the level is lossy.

        Raises FormatError for damaged bytes or an unknown profile.
        """
        name = parse_level(view.header.level)
        if not name.coded:
            return np.frombuffer(view.buffer, np.uint8)
        if name.name == PACKED:
            return self._unpack(view, into)
        coders, reached = self._coders_of(view, refinement)
        # A block of a model without full layers has one plane of no bytes, which no profile knows.
        known = coders.index(reached)
        planes = tuple(
            self._raw(view, coders.plane(reached, plane.layer, plane.role), plane)
            if plane.dtype == "uint8" and (plane.nbytes or (plane.layer, plane.role) in known)
            else plane
            for plane in view.layout.planes
        )
        layout = layout_of(planes)
        writer = rewriter(view, layout=layout, level=approx(reached), into=into)
        for before, plane in zip(view.layout.planes, planes):
            if before is plane:
                writer.plane(plane.layer, plane.role)[:] = np.frombuffer(view.plane(plane.layer, plane.role), np.uint8)
        for block in coders.blocks(reached, layout, self.space.dtype):
            block.decode(view, refinement, writer.buffer, writer.start, self.space.dtype)
        return writer.seal()

    # ---- planes, into an engine's memory

    def fill(
        self,
        views: Sequence[BlockView],
        layer: int,
        role: str,
        target: npt.NDArray[Any],
        start: int,
        refinements: Sequence[BlockView | None] | None = None,
    ) -> None:
        """Decode plane (layer, role) of consecutive blocks to rows from ``start`` of ``target`` [heads, capacity, dim].

        ``target`` holds the bits of the space's type. Checksums are compared; FormatError at the first plane that is
        damaged: rows have been written then.
        """
        more = refinements or [None] * len(views)
        row = start
        for run in _runs(views, more):
            row += self._fill(views[run], more[run], layer, role, target, row)

    def _fill(
        self,
        views: Sequence[BlockView],
        more: Sequence[BlockView | None],
        layer: int,
        role: str,
        target: npt.NDArray[Any],
        row: int,
    ) -> int:
        """Decode a run of views of one level in one native call; returns the number of rows."""
        name = parse_level(views[0].header.level)
        if name.name == PACKED:
            streams, offsets = [view.buffer for view in views], [view.offset(layer, role) for view in views]
            sizes = [view.layout.planes[view.layout.index[layer, role]].nbytes for view in views]
            shapes = [lossless.plane_of(view.plane(layer, role, verify=False))[1] for view in views]
            if any(len(shape) != 3 for shape in shapes):
                raise FormatError("packed plane of K or V has not three axes")
            counts = [_rows(view, shape[1]) for view, shape in zip(views, shapes)]
            if row + sum(counts) > target.shape[1]:
                raise FormatError(f"packed planes of {sum(counts)} tokens for {target.shape[1] - row} rows")
            sums = [view.checksum(layer, role) for view in views]
            lossless.unpack_run(streams, offsets, sizes, counts, self.space.dtype, target, row, sums)
            return sum(counts)
        if not name.coded:
            for view in views:
                array = view.array(layer, role)
                count = array.shape[-2]
                target[:, row : row + count] = array.view(target.dtype).reshape(target.shape[0], count, -1)
                row += count
            return sum(view.array(layer, role, verify=False).shape[-2] for view in views)
        coders, level = self._coders_of(views[0], more[0])
        coder = coders.plane(level, layer, role)
        counts = [_tokens(view, coder) for view in views]
        end = first = views[0].header.end - counts[0]
        for view, count in zip(views, counts):
            end += count
            if view.header.end != end:
                raise FormatError("coded blocks do not follow each other")
        if row + end - first > target.shape[1]:
            raise FormatError(f"streams of {end - first} tokens for {target.shape[1] - row} rows")
        found = zip(views, more, counts, strict=True)
        if len(coder.ropes) == 1:
            sources = [source_of(view, extra, coder.place, count) for view, extra, count in found]
            coder.decode(target[None], row, self.space.dtype, first, sources)
            return end - first

        def decode() -> npt.NDArray[Any]:
            sources = [source_of(view, extra, coder.place, count) for view, extra, count in found]
            whole = np.empty((len(coder.ropes), target.shape[0], end - first, target.shape[2]), target.dtype)
            coder.decode(whole, 0, self.space.dtype, first, sources)
            return whole

        # Loads do not share planes: the bytes of one may be gone once it went on to the next layers.
        each = [(view.header.key, view.checksum(*coder.place)) for view in (*views, *more) if view is not None]
        run = id(views[0]), level, name.profile, first, target.dtype, *each
        target[:, row : row + end - first] = self._joint.take(run, views[0], coder.places, (layer, role), decode)
        return end - first

    def _raw(self, view: BlockView, coder: PlaneCoder, plane: Plane) -> Plane:
        count = _tokens(view, coder)
        return Plane(plane.layer, plane.role, self.space.dtype, (coder.plane.heads, count, coder.plane.dim))

    def _coders_of(self, view: BlockView, refinement: BlockView | None) -> tuple[_Coders, str]:
        """The coders of a coded block's profile, and the level that it has or that its refinement leads to."""
        if refinement is not None:
            coders, name = self._pair(view, refinement)
            return coders, name.name
        name = parse_level(view.header.level)
        if name.base:
            raise FormatError("refinement without its base", where=view.header.key.hex()[:16])
        return self._required(name.profile), name.name

    def _pair(self, view: BlockView, refinement: BlockView) -> tuple[_Coders, LevelName]:
        name, base = parse_level(refinement.header.level), parse_level(view.header.level)
        if not name.base or (base.name, base.profile, base.base) != (name.base, name.profile, ""):
            raise FormatError(f"{refinement.header.level!r} does not refine {view.header.level!r}")
        if refinement.header.key != view.header.key:
            raise FormatError("refinement of another block", where=view.header.key.hex()[:16])
        return self._required(name.profile), name

    # ---- inner parts

    def _profile(self, digest16: str) -> _Coders | None:
        coders = self._coders.get(digest16)
        if coders is not None or self.profiles is None:
            return coders
        found = self.profiles.find(self.space, digest16)
        return None if found is None else self._coders.setdefault(digest16, _Coders(found[1]))

    def _required(self, digest16: str) -> _Coders:
        coders = self._profile(digest16)
        if coders is None:
            raise FormatError(
                f"profile {digest16} is not here", where=self.space.architecture, fix="It can be fetched from its maker"
            )
        return coders

    def _write(self, view: BlockView, name: LevelName, into: Bytes | None) -> Bytes:
        coders, streams = self._coders[name.profile], dict[tuple[int, str], memoryview]()
        found = None
        if self.device is not None and not name.base and not is_joint(name.name):
            found = self.device.encode(view, coders.profile, name.name, self.space.dtype)
        for block in () if found is not None else coders.blocks(name.name, view.layout, self.space.dtype):
            streams |= block.encode(view, self.space.dtype, refinement=bool(name.base))
        streams |= found or {}
        planes = [
            plane if data is None else Plane(plane.layer, plane.role, "uint8", (len(data),))
            for plane in view.layout.planes
            for data in (streams.get((plane.layer, plane.role)),)
        ]
        return reseal(view, streams, layout=Layout(tuple(planes)), level=str(name), into=into)

    def _pack(self, view: BlockView, into: Bytes | None) -> Bytes:
        planes, streams = [], []
        for plane in view.layout.planes:
            data = lossless.encode_plane(view.plane(plane.layer, plane.role), plane.dtype, plane.shape).data
            planes.append(Plane(plane.layer, plane.role, "uint8", (len(data),)))
            streams.append(data)
        raw, packed = sum(plane.nbytes for plane in view.layout.planes), sum(len(data) for data in streams)
        self._packed += (packed / max(raw, 1) - self._packed) / 16
        return self._seal(view, planes, streams, PACKED, into)

    def _unpack(self, view: BlockView, into: Bytes | None) -> Bytes:
        planes, streams = [], []
        for plane in view.layout.planes:
            data = view.plane(plane.layer, plane.role)
            if plane.dtype == "uint8" and plane.nbytes:
                array, dtype = lossless.unpack_plane(data)
                plane = Plane(plane.layer, plane.role, dtype, array.shape)
                data = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
            planes.append(plane)
            streams.append(data)
        return self._seal(view, planes, streams, EXACT, into)

    def _seal(
        self, view: BlockView, planes: list[Plane], streams: Sequence[memoryview], level: str, into: Bytes | None
    ) -> Bytes:
        named = {(plane.layer, plane.role): data for plane, data in zip(planes, streams)}
        return reseal(view, named, layout=Layout(tuple(planes)), level=level, into=into)


#: Layouts whose coders are kept: blocks of a space look alike, and states have few sizes.
_MOST_LAYOUTS = 64
#: A name failed by up to three times on tokens as unlike those of calibration as they can be.
_STRICTER = 3.0
_ADVICE = "Run `ctxreuse calibrate MODEL` once on this machine, or fetch the profile from a node that has it"


def _runs(views: Sequence[BlockView], more: Sequence[BlockView | None]) -> list[slice]:
    """Cut views into runs of one level each, with or without refinements throughout."""
    alike = [(view.header.level, extra is None or extra.header.level) for view, extra in zip(views, more, strict=True)]
    cuts = [i for i in range(len(views)) if i == 0 or alike[i] != alike[i - 1]]
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(views)])]


def _rows(view: BlockView, count: int) -> int:
    """Check the number of rows of a stream: a block's tokens, or at most a state's position. Raises FormatError.

    Fewer would leave numbers of another context in an engine's memory, more would overwrite what follows.
    """
    header = view.header
    if (header.kind == "block" and count != len(header.tokens) // 4) or not 0 < count <= header.end:
        raise FormatError(f"stream of {count} rows in a {header.kind} that ends at {header.end}")
    return count


def _tokens(view: BlockView, coder: PlaneCoder) -> int:
    """The rows that a coded plane must have: a block's are those of its tokens, a state's stream says how many."""
    if view.header.kind == "block":
        return len(view.header.tokens) // 4
    return _rows(view, coder.tokens(view.plane(*coder.place, verify=False)))


class _Coders:
    """Coders of a profile, made at first use."""

    def __init__(self, profile: CodecProfile) -> None:
        self.profile = profile
        self.tables = kernels.RansTables(profile.tables)
        self._made: dict[tuple[str, int, str], PlaneCoder] = {}
        self._blocks: dict[tuple[str, str, bytes], tuple[BlockCoder, ...]] = {}

    def plane(self, level: str, layer: int, role: str) -> PlaneCoder:
        """Return the coder of a plane, one for all that are coded as one; FormatError if the profile has none."""
        try:
            number = self.profile.number(level)
            planes = self.profile.planes_of(self.profile.levels[number])
            place = planes.planes[planes.number[layer, role]].parts[0].place
        except KeyError:
            raise FormatError(f"the profile has no level {level} for plane {role!r} of layer {layer}") from None
        made = self._made.get((level, *place))
        if made is None:
            try:
                made = plane_coder(self.profile, number, *place, self.tables)
            except ValueError as error:  # numbers that no calibration writes
                raise FormatError(f"the profile's level {level} cannot be used: {error}") from None
            made = self._made.setdefault((level, *place), made)
        return made

    def index(self, level: str) -> Container[Place]:
        """Places of all planes that a level codes; none if the profile has no such level."""
        try:
            return self.profile.planes_of(self.profile.levels[self.profile.number(level)]).number
        except KeyError:
            return ()

    def blocks(self, level: str, layout: Layout, dtype: str) -> tuple[BlockCoder, ...]:
        """Return the coders of blocks of raw planes; FormatError if the profile's planes have other shapes."""
        key = level, dtype, layout.encoded
        made = self._blocks.get(key)
        if made is None:
            index = self.index(level)
            made = BlockCoder.of(layout, dtype, lambda place: self.plane(level, *place) if place in index else None)
            if len(self._blocks) >= _MOST_LAYOUTS:
                self._blocks.clear()
            self._blocks[key] = made
        return made
