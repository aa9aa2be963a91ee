"""Planes of K and V to coded streams and back, in numpy: rotation, channel groups and types around the cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ctxreuse import kernels
from ctxreuse.codec.card import SINKS, Card, PlaneCard, Rope
from ctxreuse.codec.stream import (
    CELL,
    Cell,
    Coder,
    join_cells,
    quantise,
    read_cell,
    reconstruct,
    split_cells,
    write_cell,
)
from ctxreuse.errors import FormatError
from ctxreuse.kernels import reference

__all__ = ["PlaneCoder", "from_bits", "plane_coder", "raw_type", "rope_tables", "to_bits"]

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
_BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
Floats = npt.NDArray[np.float32]


def from_bits(plane: npt.NDArray[np.generic], dtype: str) -> Floats:
    """An array of ``dtype``'s bits as float32, exactly."""
    bits = np.ascontiguousarray(plane).view(_BITS[dtype])
    return reference.convert(bits, _CODES[dtype], 0).view(np.float32)


def to_bits(values: Floats, dtype: str) -> npt.NDArray[np.generic]:
    """float32 as the bits of ``dtype``, rounded to nearest even."""
    return reference.convert(np.ascontiguousarray(values).view(np.uint32), 0, _CODES[dtype])


def rope_tables(rope: Rope, start: int, tokens: int, *, undo: bool) -> tuple[Floats, Floats]:
    """(cos, sin) float32 [tokens, r/2] for positions from ``start``; ``undo`` gives those that take a rotation back.

    Angles are products in float64: in float32 an angle of 10^5 rad is off by up to 0.004 rad.
    """
    angles = np.arange(start, start + tokens)[:, None] * rope.inv_freq
    factor = 1 / rope.scale if undo else rope.scale
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * (-factor if undo else factor)).astype(
        np.float32
    )


def _rotate(x: Floats, rope: Rope, tables: tuple[Floats, Floats]) -> Floats:
    """x [heads, tokens, dim] rotated: out1 = x1*cos - x2*sin, out2 = x2*cos + x1*sin over the pairs of the style."""
    cos, sin = tables
    half = cos.shape[1]
    pairs = (
        (slice(0, half), slice(half, 2 * half))
        if rope.style == "half"
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    out = x.copy()
    with np.errstate(all="ignore"):
        out[..., pairs[0]] = x[..., pairs[0]] * cos - x[..., pairs[1]] * sin
        out[..., pairs[1]] = x[..., pairs[1]] * cos + x[..., pairs[0]] * sin
    return out


def raw_type(dtype: str) -> str:
    """The type in which tokens stand raw in lossy streams: never wider than 16 bits.

    Four sinks in float32 would be .08 bit a value at 768 tokens, more than the low levels' whole side data.
    """
    return "bfloat16" if dtype == "float32" else dtype


class PlaneCoder(NamedTuple):
    """One plane at one level; ``number`` is the level's index in the card, ``coders`` one a channel group.

    ``native`` does the work where the extension is built; what stands here in numpy gives the same bytes and bits.
    """

    plane: PlaneCard
    number: int
    rope: Rope | None
    coders: list[Coder]
    base: PlaneCoder | None = None
    native: kernels.KltPlane | None = None
    angles: kernels.RopeAngles | None = None

    def code(self, bits: npt.NDArray[Any], dtype: str, start: int, *, refinement: bool = False) -> memoryview:
        """The stream of a plane's bits [heads, tokens, dim], or what leads to it from the base level's stream.

        Row 0 stands, and is rotated, at position ``start``.
        """
        if self.native is None:
            return memoryview((self.refine if refinement else self.encode)(bits, dtype, start))
        tokens, bits = bits.shape[1], np.ascontiguousarray(bits)
        data, _ = self.native.encode(
            bits, dtype, 0, (tokens * bits.shape[2], bits.shape[2]), [tokens], raw_first=max(SINKS - start, 0),
            raw_dtype=raw_type(dtype), angles=None if self.angles is None else self.angles.undo(start, tokens),
            refinement=refinement,
        )  # fmt: skip
        return data.data

    def fill(
        self,
        target: npt.NDArray[Any],
        row: int,
        dtype: str,
        start: int,
        streams: Sequence[memoryview],
        sums: Sequence[int],
        refinements: Sequence[memoryview] | None = None,
        more_sums: Sequence[int] | None = None,
    ) -> None:
        """Decode streams of consecutive rows, the first at position ``start``, into ``target`` [heads, capacity, dim].

        ``sums``: XXH3-64 of the streams, which are compared. Raises FormatError; StreamError says which stream it was.
        """
        counts = [self.tokens(stream) for stream in streams]
        if row + sum(counts) > target.shape[1]:
            raise FormatError(f"streams of {sum(counts)} tokens for {target.shape[1] - row} rows")
        if self.native is not None:
            strides = [step // target.itemsize for step in target.strides]
            self.native.decode(
                target, dtype, row * target.strides[1], strides, streams, counts, raw_type(dtype),
                angles=None if self.angles is None else self.angles.rotate(start, sum(counts)), checksums=sums,
                refinements=refinements, refinement_checksums=more_sums,
            )  # fmt: skip
            return
        for i, (data, count) in enumerate(zip(streams, counts)):
            more = None if refinements is None else refinements[i]
            for part, expected in ((data, sums[i]), (more, more_sums[i] if more_sums else 0)):
                if part is not None and xxhash.xxh3_64_intdigest(part) != expected:
                    raise FormatError("coded plane is corrupt", where=f"stream {i}", fix="It is recomputed")
            target[:, row : row + count] = self.decode(data, dtype, start, more).view(target.dtype)
            row, start = row + count, start + count

    def encode(self, bits: npt.NDArray[np.generic], dtype: str, start: int) -> bytes:
        """The stream of a plane's bits [heads, tokens, dim]; row 0 stands, and is rotated, at position ``start``."""
        return self.join(bits.shape[1], self.take_apart(bits, dtype, start))

    def refine(self, bits: npt.NDArray[np.generic], dtype: str, start: int) -> bytes:
        """The refinement's stream: what leads from the base level to this one."""
        assert self.base is not None
        fine, base = self.take_apart(bits, dtype, start), self.base.take_apart(bits, dtype, start)
        pairs = []
        for i, (f, b) in enumerate(zip(fine, base)):
            q = np.where(f.raw & ~b.raw, 0, f.q)  # a token that only the finer level finds out of range stays as it was
            q[: len(b.q)] = np.where(f.raw & ~b.raw, 3 * b.q, q[: len(b.q)])
            pairs.append(write_cell(f._replace(q=q, raw=b.raw), self._coder(i), base=b.q))
        return join_cells(self.number, 1, bits.shape[1], pairs)

    def take_apart(self, bits: npt.NDArray[np.generic], dtype: str, start: int) -> list[Cell]:
        """Quantise a plane: its cells, token group by token group."""
        tokens = bits.shape[1]
        x = from_bits(bits, dtype).reshape(bits.shape)
        if self.rope is not None:
            x = _rotate(x, self.rope, rope_tables(self.rope, start, tokens, undo=True))
        cells = []
        for at in range(0, tokens, CELL):
            rows = slice(at, min(at + CELL, tokens))
            sink = np.arange(start + rows.start, start + rows.stop) < SINKS
            for coder in self.coders:
                of = slice(coder.group.first, coder.group.first + coder.group.heads)
                vectors = np.ascontiguousarray(x[of, rows].transpose(1, 0, 2)).reshape(len(sink), -1)
                q, codes, raw = quantise(vectors, coder, sink)
                kept = np.ascontiguousarray(bits[of, rows].transpose(1, 0, 2)[raw])
                if raw_type(dtype) != dtype:
                    kept = to_bits(from_bits(kept, dtype), raw_type(dtype))
                cells.append(Cell(q, codes, raw, kept.tobytes()))
        return cells

    def join(self, tokens: int, cells: list[Cell]) -> bytes:
        """The stream of cells."""
        return join_cells(self.number, 0, tokens, [write_cell(cell, self._coder(i)) for i, cell in enumerate(cells)])

    def tokens(self, data: memoryview) -> int:
        """Tokens that a stream says it has; FormatError if it has no head."""
        if len(data) < 8 or not (count := int.from_bytes(data[4:6], "little")):
            raise FormatError(f"{len(data)} bytes are no coded plane")
        return count

    def _coder(self, cell: int) -> Coder:
        return self.coders[cell % len(self.coders)]

    def read(self, data: memoryview, dtype: str, refinement: memoryview | None = None) -> tuple[int, list[Cell]]:
        """Tokens and cells of a stream, with its refinement if given: then ``data`` is the base's stream.

        Raises FormatError for bytes that are no such stream.
        """
        size = np.dtype(_BITS[raw_type(dtype)]).itemsize
        widths = [len(coder.group.mean) * size for coder in self.coders]
        if refinement is None:
            tokens, parts = split_cells(data, self.number, 0, self.coders, widths)
            old: list[Cell | None] = [None] * len(parts)
        else:
            assert self.base is not None
            tokens, base = self.base.read(data, dtype)
            found, parts = split_cells(refinement, self.number, 1, self.coders, widths)
            if found != tokens:
                raise FormatError(f"refinement of {found} tokens for a base of {tokens}")
            old = list(base)
        cells = []
        for i, ((entry, body), before) in enumerate(zip(parts, old)):
            here = min(CELL, tokens - i // len(self.coders) * CELL)
            cells.append(read_cell(body, entry, here, widths[i % len(widths)], self._coder(i), before))
        return tokens, cells

    def decode(
        self, data: memoryview, dtype: str, start: int, refinement: memoryview | None = None
    ) -> npt.NDArray[np.generic]:
        """Bits [heads, tokens, dim] of a stream, K rotated for positions from ``start``."""
        tokens, cells = self.read(data, dtype, refinement)
        plane = self.plane
        x = np.empty((plane.heads, tokens, plane.dim), np.float32)
        kept = []
        for i, cell in enumerate(cells):
            coder, at = self._coder(i), i // len(self.coders) * CELL
            of, rows = slice(coder.group.first, coder.group.first + coder.group.heads), slice(at, at + len(cell.raw))
            with np.errstate(all="ignore"):
                values = reconstruct(cell.q, cell.codes, coder)
            x[of, rows] = values.reshape(len(cell.raw), -1, plane.dim).transpose(1, 0, 2)
            kept.append((of, rows, cell))
        if self.rope is not None:
            x = _rotate(x, self.rope, rope_tables(self.rope, start, tokens, undo=False))
        bits = to_bits(x, dtype).reshape(x.shape).copy()
        for of, rows, cell in kept:
            if cell.raw.any():
                given = np.frombuffer(cell.rows, _BITS[raw_type(dtype)])
                if raw_type(dtype) != dtype:
                    given = to_bits(from_bits(given, raw_type(dtype)), dtype)
                given = given.reshape(int(cell.raw.sum()), -1, plane.dim)
                bits[of, rows][:, cell.raw] = given.transpose(1, 0, 2)
        return bits


def plane_coder(card: Card, number: int, layer: int, role: str, tables: kernels.RansTables) -> PlaneCoder:
    """The coder of a plane at a level; KeyError if the card has no such plane."""
    index = card.index[layer, role]
    plane, level, first = card.planes[index], card.levels[number], card.first_group[index]
    base = card.number(level.info.base) if level.info.base else -1
    nested = any(other.info.base == level.info.name for other in card.levels)
    coders = []
    for i, group in enumerate(plane.groups, first):
        below = card.levels[base].codings[i] if base >= 0 else None
        coders.append(Coder(group, level.codings[i], tables, level.step, below, nested))
    rope = card.ropes[plane.rope] if plane.rope >= 0 and card.ropes[plane.rope].style != "none" else None
    under = plane_coder(card, base, layer, role, tables) if base >= 0 else None
    made = PlaneCoder(plane, number, rope, coders, under)
    return (
        made
        if not kernels.klt_ready()
        else made._replace(
            native=_native(made, tables),
            angles=None if rope is None else kernels.RopeAngles.shared(rope.inv_freq, rope.scale),
        )
    )


def _native(coder: PlaneCoder, tables: kernels.RansTables) -> kernels.KltPlane:
    groups = [
        kernels.KltGroup(
            c.group.first, c.group.heads, c.group.log_rms, c.group.mean, c.group.gain, c.group.forward, c.group.basis,
            c.coding.table, c.coding.shift, None if c.base is None else c.coding.refine,
        )
        for c in coder.coders
    ]  # fmt: skip
    return kernels.KltPlane(
        tables, coder.plane.dim, groups, coder.number, coder.coders[0].step, nested=coder.coders[0].nested,
        base=None if coder.base is None else coder.base.native, rope="none" if coder.rope is None else coder.rope.style,
    )  # fmt: skip
