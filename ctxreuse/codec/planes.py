"""Coders of planes of K and V at one level of a profile: the native kernels, prepared, and the merging of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.codec.profile import ChannelGroup, CodecProfile, JointGroup, JointProfile, Place, PlaneProfile
from ctxreuse.codec.stream import CELL, Cell, Coder, join_cells, read_cell, split_cells, write_cell
from ctxreuse.codec.whole import WholeForward
from ctxreuse.errors import FormatError
from ctxreuse.rope import Rotary

__all__ = ["PlaneCoder", "plane_coder", "raw_type"]


def raw_type(dtype: str) -> str:
    """Return the type of raw tokens in lossy streams: never wider than 16 bits.

    Four sinks in float32 would be .08 bit a value at 768 tokens, more than the low levels' whole side data.
    """
    return "bfloat16" if dtype == "float32" else dtype


class PlaneCoder(NamedTuple):
    """One plane at one level, or those of a joint one, with the native kernels prepared.

    ``number``: the level's index in the profile; ``ropes``: what turns each part; ``coders``: one for each channel
    group; ``base``: the coder of the level that this one refines.
    """

    plane: PlaneProfile | JointProfile
    number: int
    ropes: tuple[Rotary | None, ...]
    coders: list[Coder]
    base: PlaneCoder | None
    native: kernels.KltPlane

    @classmethod
    def of(
        cls,
        plane: PlaneProfile | JointProfile,
        number: int,
        ropes: tuple[Rotary | None, ...],
        coders: list[Coder],
        base: PlaneCoder | None = None,
    ) -> PlaneCoder:
        """Prepare the native kernels for a plane."""
        groups = [
            kernels.KltGroup(
                c.group.first, c.group.heads, c.group.log_rms, c.group.mean, c.group.gain, c.group.forward,
                c.group.basis, c.coding.table, c.coding.shift, None if c.base is None else c.coding.refine,
                c.whole, large=c.group.large,
            )
            for c in coders
        ]  # fmt: skip
        styles = {rope.style for rope in ropes if rope is not None}
        if len(styles) > 1:
            raise FormatError(f"planes that are coded as one are turned in {len(styles)} ways")
        native = kernels.KltPlane(
            coders[0].tables, plane.dim, groups, number, coders[0].step, nested=coders[0].nested,
            base=None if base is None else base.native, rope=styles.pop() if styles else "none", parts=len(ropes),
        )  # fmt: skip
        return cls(plane, number, ropes, coders, base, native)

    @property
    def place(self) -> Place:
        """Where the stream stands."""
        return self.plane.parts[0].place

    @property
    def places(self) -> tuple[Place, ...]:
        """Layers and roles of all planes that are coded as one."""
        return tuple(part.place for part in self.plane.parts)

    def decode(
        self, target: npt.NDArray[Any], row: int, dtype: str, start: int, sources: Sequence[kernels.Source]
    ) -> None:
        """Decode streams of consecutive rows, the first at position ``start``, to rows from ``row`` of ``target``.

        ``target``: bits [parts, heads, capacity, dim]. Raises FormatError; a StreamError names the stream.
        """
        first, *strides = (step // target.itemsize for step in target.strides)
        turning = list(dict.fromkeys(rope for rope in self.ropes if rope is not None))
        layout = np.array(
            [
                [(i * first + row * strides[1]) * target.itemsize, *strides, turning.index(rope) if rope else -1]
                for i, rope in enumerate(self.ropes)
            ],
            np.int64,
        )
        tokens = sum(source[0] for source in sources)
        angles = [rope.span_tables(start, tokens) for rope in turning]
        kernels.KltPlanes.of([self.native], layout).decode(target, dtype, sources, raw_type(dtype), angles=angles)

    def merge(self, data: memoryview, refinement: memoryview) -> bytes:
        """Join the base level's stream and its refinement to this level's stream. Raises FormatError."""
        return self.join(*self.read(data, refinement))

    def join(self, tokens: int, cells: list[Cell]) -> bytes:
        """Return the stream of cells."""
        return join_cells(self.number, 0, tokens, [write_cell(cell, self.coder(i)) for i, cell in enumerate(cells)])

    def tokens(self, data: memoryview) -> int:
        """Return the number of tokens in a stream's head. Raises FormatError."""
        if len(data) < 8 or not (count := int.from_bytes(data[4:6], "little")):
            raise FormatError(f"corrupt stream: {len(data)} bytes without a valid head")
        return count

    def coder(self, cell: int) -> Coder:
        """Return the coder of cell number ``cell`` of a stream."""
        return self.coders[cell % len(self.coders)]

    def read(self, data: memoryview, refinement: memoryview | None = None) -> tuple[int, list[Cell]]:
        """Parse a stream into tokens and cells; with ``refinement``, ``data`` is the base's. Raises FormatError."""
        widths = [2 * len(coder.group.mean) for coder in self.coders]  # raw tokens take 16 bits a value
        if refinement is None:
            tokens, parts = split_cells(data, self.number, 0, self.coders, widths)
            old: list[Cell | None] = [None] * len(parts)
        else:
            assert self.base is not None
            tokens, base = self.base.read(data)
            found, parts = split_cells(refinement, self.number, 1, self.coders, widths)
            if found != tokens:
                raise FormatError(f"refinement of {found} tokens for a base of {tokens}")
            old = list(base)
        cells = []
        for i, ((entry, body), before) in enumerate(zip(parts, old)):
            here = min(CELL, tokens - i // len(self.coders) * CELL)
            cells.append(read_cell(body, entry, here, widths[i % len(widths)], self.coder(i), before))
        return tokens, cells


def plane_coder(profile: CodecProfile, number: int, layer: int, role: str, tables: kernels.RansTables) -> PlaneCoder:
    """Make the coder of a plane at a level; KeyError if the profile has no such plane."""
    level = profile.levels[number]
    planes = profile.planes_of(level)
    index = planes.number[layer, role]
    plane, first = planes.planes[index], planes.first_group[index]
    base = profile.number(level.info.base) if level.info.base else -1
    nested = any(other.info.base == level.info.name for other in profile.levels)
    coders = []
    groups: Sequence[ChannelGroup | JointGroup] = plane.groups
    for i, group in enumerate(groups, first):
        below = profile.levels[base].codings[i] if base >= 0 else None
        coding = level.codings[i]
        whole = None
        if profile.version > 1:
            whole = WholeForward.of(group, len(coding.table)).at(level.step, nested=nested)
        coders.append(Coder(group.rounded(coding.narrow), coding, tables, level.step, below, nested, whole))
    turns = [profile.ropes[part.rope] if part.rope >= 0 else None for part in plane.parts]
    ropes = tuple(None if rope is None or rope.style == "none" else rope for rope in turns)
    under = plane_coder(profile, base, layer, role, tables) if base >= 0 else None
    return PlaneCoder.of(plane, number, ropes, coders, under)
