"""Planes of K and V to coded streams and back: rotation, channel groups and types around the cells."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.planes import PlaneCoder, raw_type
from ctxreuse.codec.stream import CELL, Cell, Coder, join_cells, write_cell
from ctxreuse.rope import Rotary
from oracle.codec.cells import quantise, reconstruct
from oracle.kernels.reference import convert

__all__ = ["decode", "encode", "from_bits", "refine", "take_apart", "to_bits"]

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
_BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
Floats = npt.NDArray[np.float32]


def from_bits(plane: npt.NDArray[np.generic], dtype: str) -> Floats:
    """An array of ``dtype``'s bits as float32, exactly."""
    bits = np.ascontiguousarray(plane).view(_BITS[dtype])
    return convert(bits, _CODES[dtype], 0).view(np.float32)


def to_bits(values: Floats, dtype: str) -> npt.NDArray[np.generic]:
    """float32 as the bits of ``dtype``, rounded to nearest even."""
    return convert(np.ascontiguousarray(values).view(np.uint32), 0, _CODES[dtype])


def rope_tables(rope: Rotary, start: int, tokens: int, *, undo: bool) -> tuple[Floats, Floats]:
    """(cos, sin) float32 [tokens, r/2] for positions from ``start``; ``undo`` gives those that take a rotation back.

    Angles are products in float64: in float32 an angle of 10^5 rad is off by up to 0.004 rad.
    """
    angles = np.arange(start, start + tokens)[:, None] * np.array(rope.inv_freq)
    factor = 1 / rope.scale if undo else rope.scale
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * (-factor if undo else factor)).astype(
        np.float32
    )


def _rotate(x: Floats, rope: Rotary, tables: tuple[Floats, Floats]) -> Floats:
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


def _turned(x: Floats, planes: PlaneCoder, start: int, *, undo: bool) -> Floats:
    """x [heads of all parts, tokens, dim] with the K among them rotated."""
    parts = np.split(x, len(planes.ropes))
    for i, rope in enumerate(planes.ropes):
        if rope is not None:
            parts[i] = _rotate(parts[i], rope, rope_tables(rope, start, x.shape[1], undo=undo))
    return np.concatenate(parts)


def _heads(planes: PlaneCoder, coder: Coder) -> npt.NDArray[np.intp]:
    """A channel group's heads among those of all parts."""
    own = np.arange(coder.group.first, coder.group.first + coder.group.heads)
    return np.concatenate([own + part * planes.plane.heads for part in range(len(planes.ropes))])


def encode(planes: PlaneCoder, bits: npt.NDArray[np.generic], dtype: str, start: int) -> bytes:
    """The stream of bits [heads, tokens, dim], of all parts; row 0 stands, and is rotated, at position ``start``."""
    return planes.join(bits.shape[1], take_apart(planes, bits, dtype, start))


def refine(planes: PlaneCoder, bits: npt.NDArray[np.generic], dtype: str, start: int) -> bytes:
    """The refinement's stream: what leads from the base level to this one."""
    assert planes.base is not None
    fine, base = take_apart(planes, bits, dtype, start), take_apart(planes.base, bits, dtype, start)
    pairs = []
    for i, (f, b) in enumerate(zip(fine, base)):
        q = np.where(f.raw & ~b.raw, 0, f.q)  # a token that only the finer level finds out of range stays as it was
        q[: len(b.q)] = np.where(f.raw & ~b.raw, 3 * b.q, q[: len(b.q)])
        pairs.append(write_cell(f._replace(q=q, raw=b.raw), planes.coder(i), base=b.q))
    return join_cells(planes.number, 1, bits.shape[1], pairs)


def take_apart(planes: PlaneCoder, bits: npt.NDArray[np.generic], dtype: str, start: int) -> list[Cell]:
    """Quantise a plane: its cells, token group by token group."""
    tokens = bits.shape[1]
    x = from_bits(bits, dtype).reshape(bits.shape)
    x = _turned(x, planes, start, undo=True)
    cells = []
    for at in range(0, tokens, CELL):
        rows = slice(at, min(at + CELL, tokens))
        sink = np.arange(start + rows.start, start + rows.stop) < planes.plane.sinks
        for coder in planes.coders:
            of = _heads(planes, coder)
            vectors = np.ascontiguousarray(x[of, rows].transpose(1, 0, 2)).reshape(len(sink), -1)
            q, codes, raw = quantise(vectors, coder, sink)
            kept = np.ascontiguousarray(bits[of, rows].transpose(1, 0, 2)[raw])
            if raw_type(dtype) != dtype:
                kept = to_bits(from_bits(kept, dtype), raw_type(dtype))
            cells.append(Cell(q, codes, raw, kept.tobytes()))
    return cells


def decode(
    planes: PlaneCoder, data: memoryview, dtype: str, start: int, refinement: memoryview | None = None
) -> npt.NDArray[np.generic]:
    """Bits [heads of all parts, tokens, dim] of a stream, K rotated for positions from ``start``."""
    tokens, cells = planes.read(data, refinement)
    plane = planes.plane
    x = np.empty((len(planes.ropes) * plane.heads, tokens, plane.dim), np.float32)
    kept = []
    for i, cell in enumerate(cells):
        coder, at = planes.coder(i), i // len(planes.coders) * CELL
        of, rows = _heads(planes, coder), slice(at, at + len(cell.raw))
        with np.errstate(all="ignore"):
            values = reconstruct(cell.q, cell.codes, coder)
        x[of, rows] = values.reshape(len(cell.raw), -1, plane.dim).transpose(1, 0, 2)
        kept.append((of, rows, cell))
    x = _turned(x, planes, start, undo=False)
    bits = to_bits(x, dtype).reshape(x.shape).copy()
    for of, rows, cell in kept:
        if cell.raw.any():
            given = np.frombuffer(cell.rows, _BITS[raw_type(dtype)])
            if raw_type(dtype) != dtype:
                given = to_bits(from_bits(given, raw_type(dtype)), dtype)
            given = given.reshape(int(cell.raw.sum()), -1, plane.dim)
            bits[np.ix_(of, rows.start + np.flatnonzero(cell.raw))] = given.transpose(1, 0, 2)
    return bits
