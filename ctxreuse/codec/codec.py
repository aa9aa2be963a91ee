"""Encode and decode whole blocks and states of one model space, at every level that its card knows."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block import BlockView, Layout, Plane, reseal
from ctxreuse.codec import lossless
from ctxreuse.codec.card import Card, model_digest
from ctxreuse.codec.levels import LevelInfo, LevelName, parse_level
from ctxreuse.codec.planes import PlaneCoder, plane_coder
from ctxreuse.codec.shelf import Shelf
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.levels import EXACT, PACKED, approx, damage, short
from ctxreuse.model import ModelSpace

__all__ = ["Codec"]

Bytes = npt.NDArray[np.uint8]
_BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


class Codec:
    """The levels of one model space. Immutable but for caches; any thread may call anything.

    ``card`` is what lossy levels need; without one only the exact levels are there. Blocks that were coded with an
    older card of the same model are read as long as ``shelf`` has it.
    """

    def __init__(self, space: ModelSpace, card: tuple[str, Card] | None = None, *, shelf: Shelf | None = None) -> None:
        if card is not None and card[1].model != model_digest(space):
            raise ConfigError("the card belongs to another model", where=space.architecture, fix=_ADVICE)
        self.space, self.shelf = space, shelf
        self.digest = "" if card is None else card[0]
        self.card = None if card is None else card[1]
        self._coders: dict[str, _Coders] = {}
        self._packed = 0.75  # share of the raw bytes that "exact+rans" takes; follows what is encoded
        if card is not None:
            self._coders[card[0][:16]] = _Coders(card[1])

    @classmethod
    def open(cls, space: ModelSpace, shelf: Shelf | None = None) -> Codec:
        """The codec of a space with the newest card that the shelf (default: the user's) has of its model, if any."""
        shelf = shelf or Shelf()
        return cls(space, shelf.newest(space), shelf=shelf)

    @property
    def levels(self) -> tuple[LevelInfo, ...]:
        """Levels that blocks can be encoded at: the exact ones, then the card's from coarse to fine."""
        wide = 32 if self.space.dtype == "float32" else 16
        exact = (LevelInfo(EXACT, False, wide), LevelInfo(PACKED, False, wide * self._packed))
        return exact if self.card is None else exact + tuple(level.info for level in self.card.levels)

    def info(self, level: str) -> LevelInfo:
        """What a level costs and does; ConfigError if there is no such level here. ``level``: with or without card."""
        name = short(level).rpartition(">")[2]
        for info in self.levels:
            if info.name == name:
                return info
        if self.card is None and 0 < damage(name) < inf:
            raise ConfigError(f"level {name} needs a card", where=self.space.architecture, fix=_ADVICE)
        names = ", ".join(info.name for info in self.levels)
        raise ConfigError(f"no such level: {name!r}", where=self.space.architecture, fix=f"There are {names}")

    def allowed(self, most: str) -> tuple[LevelInfo, ...]:
        """Levels that do no more damage than ``most``, exact ones first, then coarse to fine; "" allows exact only.

        ConfigError if ``most`` is no level here.
        """
        limit = damage(self.info(most).name) if most else 0.0
        return tuple(info for info in self.levels if damage(info.name) <= limit)

    def nbytes(self, level: str, tokens: int | None = None) -> int:
        """Expected bytes of one block of ``tokens`` (default: the space's block) at a level."""
        info, count = self.info(level), self.space.block_tokens if tokens is None else tokens
        item = 4 if self.space.dtype == "float32" else 2
        return round(self.space.token_nbytes // item * count * info.bits / 8)

    def knows(self, level: str) -> bool:
        """True if a block whose header says ``level`` can be read here."""
        name = parse_level(level)
        return not name.card or self._card(name.card) is not None

    # ---- whole blocks

    def encode(self, view: BlockView, level: str, *, into: Bytes | None = None) -> Bytes:
        """The block or state ``view`` (raw planes) at ``level``: the same key, tokens and place.

        ``into``: memory for the result if it is large enough. Raises ConfigError for a level that is not here,
        FormatError for a view whose planes are coded, damaged or not of this space.
        """
        name = self.info(level).name
        if view.header.level != EXACT:
            # Coding what is lossy already would add damage that no card has measured, or call it exact.
            raise FormatError(f"block of level {view.header.level!r} cannot be encoded as {name}")
        if name == EXACT:
            return np.frombuffer(view.buffer, np.uint8)
        if name == PACKED:
            return self._pack(view, into)
        return self._write(view, LevelName(name, self.digest[:16]), into)

    def refinement(self, view: BlockView, level: str) -> Bytes:
        """What leads from the base of ``level`` to it, as a block of its own; ConfigError if ``level`` has no base."""
        info = self.info(level)
        if not info.base:
            raise ConfigError(f"level {info.name} refines no other", where=self.space.architecture)
        return self._write(view, LevelName(info.name, self.digest[:16], info.base), None)

    def merge(self, view: BlockView, refinement: BlockView) -> Bytes:
        """A base block and its refinement as one block of the finer level: the bytes that encode would have given."""
        coders, name = self._pair(view, refinement)
        planes, streams = [], []
        for plane in view.layout.planes:
            coder = coders.plane(name.name, plane.layer, plane.role) if plane.dtype == "uint8" else None
            data = view.plane(plane.layer, plane.role)
            if coder is not None:
                tokens, cells = coder.read(data, self.space.dtype, refinement.plane(plane.layer, plane.role))
                data = memoryview(coder.join(tokens, cells))
            planes.append(Plane(plane.layer, plane.role, plane.dtype, (len(data),) if coder else plane.shape))
            streams.append(data)
        return self._seal(view, planes, streams, str(LevelName(name.name, name.card)), None)

    def decode(self, view: BlockView, refinement: BlockView | None = None, *, into: Bytes | None = None) -> Bytes:
        """The block with raw planes: level "exact", or "approx~LEVEL" if the level is lossy.

        Raises FormatError for damaged bytes or an unknown card.
        """
        name = parse_level(view.header.level)
        if not name.coded:
            return np.frombuffer(view.buffer, np.uint8)
        planes, streams = [], []
        for plane in view.layout.planes:
            # A block of a model without full layers has one plane of no bytes, which no card knows.
            if plane.dtype != "uint8" or not plane.nbytes:
                planes.append(plane)
                streams.append(view.plane(plane.layer, plane.role))
                continue
            if name.name == PACKED:
                array, dtype = lossless.unpack_plane(view.plane(plane.layer, plane.role))
            else:
                array, dtype = self._decoded(view, plane, refinement), self.space.dtype
            planes.append(Plane(plane.layer, plane.role, dtype, array.shape))
            streams.append(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
        reached = name.name if refinement is None else parse_level(refinement.header.level).name
        return self._seal(view, planes, streams, EXACT if name.exact else approx(reached), into)

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
        """Decode a run of alike views in one native call; returns how many rows that were."""
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
        coder = self._coder(views[0], more[0], layer, role)
        data = [view.plane(layer, role, verify=False) for view in views]
        sums = [view.checksum(layer, role) for view in views]
        counts = [_rows(view, coder.tokens(stream)) for view, stream in zip(views, data)]
        first = views[0].header.end - counts[0]
        if any(v.header.end != first + sum(counts[: i + 1]) for i, v in enumerate(views)):
            raise FormatError("coded blocks do not follow each other")
        if more[0] is None:
            coder.fill(target, row, self.space.dtype, first, data, sums)
        else:
            extra = [m.plane(layer, role, verify=False) for m in more if m is not None]
            extra_sums = [m.checksum(layer, role) for m in more if m is not None]
            coder.fill(target, row, self.space.dtype, first, data, sums, extra, extra_sums)
        return sum(counts)

    def _decoded(self, view: BlockView, plane: Plane, refinement: BlockView | None) -> npt.NDArray[Any]:
        coder = self._coder(view, refinement, plane.layer, plane.role)
        count = _rows(view, coder.tokens(view.plane(plane.layer, plane.role)))
        bits = np.empty((coder.plane.heads, count, coder.plane.dim), _BITS[self.space.dtype])
        self._fill([view], [refinement], plane.layer, plane.role, bits, 0)
        return bits

    def _coder(self, view: BlockView, refinement: BlockView | None, layer: int, role: str) -> PlaneCoder:
        if refinement is not None:
            coders, name = self._pair(view, refinement)
        else:
            name = parse_level(view.header.level)
            if name.base:
                raise FormatError("a refinement without its base", where=view.header.key.hex()[:16])
            coders = self._required(name.card)
        return coders.plane(name.name, layer, role)

    def _pair(self, view: BlockView, refinement: BlockView) -> tuple[_Coders, LevelName]:
        name, base = parse_level(refinement.header.level), parse_level(view.header.level)
        if not name.base or (base.name, base.card, base.base) != (name.base, name.card, ""):
            raise FormatError(f"{refinement.header.level!r} does not refine {view.header.level!r}")
        if refinement.header.key != view.header.key:
            raise FormatError("a refinement of another block", where=view.header.key.hex()[:16])
        return self._required(name.card), name

    # ---- inner parts

    def _card(self, card16: str) -> _Coders | None:
        coders = self._coders.get(card16)
        if coders is not None or self.shelf is None:
            return coders
        found = self.shelf.find(self.space, card16)
        return None if found is None else self._coders.setdefault(card16, _Coders(found[1]))

    def _required(self, card16: str) -> _Coders:
        coders = self._card(card16)
        if coders is None:
            raise FormatError(
                f"card {card16} is not here", where=self.space.architecture, fix="It can be fetched from its maker"
            )
        return coders

    def _write(self, view: BlockView, name: LevelName, into: Bytes | None) -> Bytes:
        coders = self._coders[name.card]
        planes, streams = [], []
        for plane in view.layout.planes:
            data = view.plane(plane.layer, plane.role)
            if (plane.layer, plane.role) in coders.card.index and plane.shape[-2]:
                coder = coders.plane(name.name, plane.layer, plane.role)
                bits = view.array(plane.layer, plane.role, verify=False).reshape(plane.shape[-3:])
                if (coder.plane.heads, coder.plane.dim) != (bits.shape[0], bits.shape[2]):
                    raise FormatError(f"plane {plane.role!r} of layer {plane.layer} has shape {plane.shape}")
                start = view.header.end - bits.shape[1]
                data = coder.code(bits, self.space.dtype, start, refinement=bool(name.base))
                plane = Plane(plane.layer, plane.role, "uint8", (len(data),))
            planes.append(plane)
            streams.append(data)
        return self._seal(view, planes, streams, str(name), into)

    def _pack(self, view: BlockView, into: Bytes | None) -> Bytes:
        planes, streams = [], []
        for plane in view.layout.planes:
            data = lossless.pack_plane(view.plane(plane.layer, plane.role), plane.dtype, plane.shape)
            planes.append(Plane(plane.layer, plane.role, "uint8", (len(data),)))
            streams.append(memoryview(data))
        raw, packed = sum(plane.nbytes for plane in view.layout.planes), sum(len(data) for data in streams)
        self._packed += (packed / max(raw, 1) - self._packed) / 16
        return self._seal(view, planes, streams, PACKED, into)

    def _seal(
        self, view: BlockView, planes: list[Plane], streams: Sequence[memoryview], level: str, into: Bytes | None
    ) -> Bytes:
        named = {(plane.layer, plane.role): data for plane, data in zip(planes, streams)}
        return reseal(view, named, layout=Layout(tuple(planes)), level=level, into=into)


_ADVICE = "Run `ctxreuse calibrate MODEL` once on this machine, or fetch the card from a node that has it"


def _runs(views: Sequence[BlockView], more: Sequence[BlockView | None]) -> list[slice]:
    """Cuts views into runs of one level each, with or without refinements throughout."""
    alike = [(view.header.level, extra is None or extra.header.level) for view, extra in zip(views, more, strict=True)]
    cuts = [i for i in range(len(views)) if i == 0 or alike[i] != alike[i - 1]]
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(views)])]


def _rows(view: BlockView, count: int) -> int:
    """The rows that a stream says it has; FormatError unless a block's are its tokens, and a state's are before it.

    Fewer would leave numbers of another context in an engine's memory, more would overwrite what stands behind.
    """
    header = view.header
    if (header.kind == "block" and count != len(header.tokens) // 4) or not 0 < count <= header.end:
        raise FormatError(f"stream of {count} rows in a {header.kind} that ends at {header.end}")
    return count


class _Coders:
    """Coders of a card, made when first used."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.tables = kernels.RansTables(card.tables)
        self._made: dict[tuple[str, int, str], PlaneCoder] = {}

    def plane(self, level: str, layer: int, role: str) -> PlaneCoder:
        """The coder of a plane; FormatError if the card has none such."""
        made = self._made.get((level, layer, role))
        if made is None:
            try:
                made = plane_coder(self.card, self.card.number(level), layer, role, self.tables)
            except KeyError:
                raise FormatError(f"the card has no level {level} for plane {role!r} of layer {layer}") from None
            self._made[level, layer, role] = made
        return made
