"""A profile's transforms as the CUDA kernels read them: the structures of `native/cuda/klt.cuh`, field by field."""

from __future__ import annotations

from typing import Final, Literal, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.profile import ChannelGroup, Coding
from ctxreuse.kernels import WholeNumbers

__all__ = ["CELL", "GROUP", "NONE", "PLANE", "RUN", "Book", "forward_fragments", "fragments", "runs_of"]

TILE: Final = 32
NONE: Final = 0xFFFF
_U4, _U8, _F4 = "<u4", "<u8", "<f4"

RUN: Final = np.dtype(
    [("channel", "<u2", 2), ("dim", "<u2", 2), ("head", "<u2"), ("angle", "<u2"), ("spare", "<u2", 2)]
)
GROUP: Final = np.dtype(
    [(name, _U8) for name in ("basis", "runs", "mean", "gain", "coding", "refining", "forward", "quanta")]
    + [(name, _U4) for name in ("channels", "components", "tiles", "blocks", "coarse", "based", "nested")]
    + [("step", _F4), ("energy", "<f8"), ("unit", _F4), ("shifts", "<u2"), ("more_shifts", "<u2")]
)
PLANE: Final = np.dtype(
    [(name, _U8) for name in ("memory", "pages", "cosine", "sine")]
    + [(name, "<i8") for name in ("page_stride", "head_stride", "token_stride")]
    + [(name, _U4) for name in ("page_tokens", "entries", "limit", "row", "angles", "interleaved", "type", "raw_type")]
)
CELL: Final = np.dtype(
    [(name, _U8) for name in ("data", "raw", "more")]
    + [
        (name, _U4)
        for name in ("bytes", "escapes", "more_bytes", "more_escapes", "plane", "group", "base", "first", "tokens")
    ]
    + [("refined", _U4)]
)


class Book:
    """Arrays one after the other in one buffer, each at a multiple of 16.

    First come the powers 2^(i/32), float32 [32], then the half steps between scale codes, float64 [16].
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.add(np.exp2(np.arange(32) / 32).astype(_F4))
        self.add(np.exp2((np.arange(16) - 15.5) / 16))

    def add(self, array: npt.NDArray[np.generic]) -> int:
        """Append an array; returns its offset in bytes."""
        at, data = self._size, np.ascontiguousarray(array).tobytes()
        data += bytes(-len(data) % 16)
        self._parts.append(data)
        self._size += len(data)
        return at

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The whole."""
        return np.frombuffer(b"".join(self._parts), np.uint8)

    def group(
        self,
        group: ChannelGroup,
        coding: Coding,
        dim: int,
        rotary: tuple[Literal["half", "pairs", "none"], int],
        step: float,
        *,
        based: int = 0,
        nested: bool = False,
        whole: WholeNumbers | None = None,
    ) -> np.void:
        """One channel group at one level, GROUP, its arrays appended. ``rotary``: style and number of angles.

        ``based``: components that its base level codes; ``whole``: encode by it.
        ValueError for what the kernels cannot do.
        """
        components, channels = len(coding.table), group.heads * dim
        if components > 32 * TILE or channels > 0xFFF0:
            raise ValueError(f"a channel group of {channels} channels and {components} components is too large")
        runs = runs_of(group.first, group.heads, dim, rotary)
        tiles = -(-components // TILE)
        basis, coarse = fragments(group.basis[:components], runs, rotary[0] == "pairs", tiles)
        if whole is None:
            forward: npt.NDArray[np.generic] = np.zeros((channels, tiles * TILE), _F4)
            forward[:, :components] = group.forward[:components].T
        else:
            forward = forward_fragments(np.asarray(whole.rows)[:components], tiles)
        fine = np.float32(step) / np.float32(3) if nested else np.float32(step)
        quanta = np.full(tiles * TILE, np.float32(1) / fine, _F4)
        if whole is not None:
            quanta[:components] = whole.quantum
        out = np.zeros((), GROUP)
        out["basis"], out["runs"] = self.add(basis), self.add(runs)
        out["mean"], out["gain"] = self.add(group.mean.astype(_F4)), self.add(group.gain.astype(_F4))
        shift = coding.shift.copy()
        out["shifts"], out["more_shifts"] = int(shift.sum()), int(shift[based:].sum())
        out["coding"] = self.add(_codings(coding.table, shift))
        shift[:based] = 0
        refine = np.concatenate([coding.refine[:based], coding.table[based:]]) if based else coding.table
        out["refining"] = self.add(_codings(refine, shift))
        out["forward"] = self.add(forward)
        out["channels"], out["components"], out["tiles"] = channels, components, tiles
        out["blocks"], out["coarse"], out["based"], out["nested"] = len(runs) // 4, coarse, based, nested
        out["step"] = step
        out["energy"] = 2.0 ** (-2 * group.log_rms) / channels
        out["quanta"], out["unit"] = self.add(quanta), 0.0 if whole is None else whole.unit
        return cast(np.void, out[()])


def _codings(table: npt.NDArray[np.uint8], shift: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """table | shift << 8 | shifts before << 16 of each component; one more for the sum of all shifts."""
    before = np.concatenate([[0], np.cumsum(shift, dtype=np.uint32)]).astype(np.uint32)
    out = before << 16
    out[:-1] |= table.astype(np.uint32) | shift.astype(np.uint32) << 8
    return np.asarray(out, np.uint32)


def runs_of(
    first: int, heads: int, dim: int, rotary: tuple[Literal["half", "pairs", "none"], int]
) -> npt.NDArray[np.void]:
    """Which eight channels each thread of a quarter takes in each block of 32, RUN [4 * blocks].

    Rotary partners meet in one thread: with ``half`` the runs of four are (i, i + angles), else they are neighbours.
    ValueError unless heads and rotation are multiples of 8 channels.
    """
    style, angles = rotary
    rotated = 2 * angles if style != "none" else 0
    if dim % 8 or rotated % 8 or rotated > dim:
        raise ValueError(f"heads of {dim} channels, {rotated} of them rotated: the device needs multiples of 8")
    rows: list[tuple[int, int, int]] = []  # two runs of a head, and the angle
    for at in range(0, rotated, 8):
        one = at // 2 if style == "half" else at
        rows.append((one, one + (angles if style == "half" else 4), at // 2))
    rows += [(at, at + 4, NONE) for at in range(rotated, dim, 8)]
    out = np.zeros(-(-heads * len(rows) // 4) * 4, RUN)
    out["head"] = NONE
    for i, (head, (one, two, angle)) in enumerate((head, row) for head in range(heads) for row in rows):
        out[i] = ((head * dim + one, head * dim + two), (one, two), first + head, angle, (0, 0))
    return out


def fragments(
    basis: npt.NDArray[np.int16], runs: npt.NDArray[np.void], interleaved: bool, tiles: int
) -> tuple[npt.NDArray[np.int8], int]:
    """A basis int16 [components, channels] as the fragments of the matrix product, and which tiles are coarse.

    Two signed bytes a number, 64 * high + low; bytes [blocks, tiles, {low, high}, 2, 32 threads, 2, 2, 4], the channels
    ordered so that each thread gets its runs. Coarse: the tile's low bytes are all 0.
    """
    padded = np.zeros((tiles * TILE, basis.shape[1] + 1), np.int32)
    padded[: len(basis), :-1] = basis
    high = np.minimum((padded + 32) >> 6, 127)
    digits = np.stack([padded - 64 * high, high]).astype(np.int8)
    n, j = np.meshgrid(np.arange(4), np.arange(8), indexing="ij")
    thread, e = j // 2, j % 2
    chosen = runs.reshape(-1, 4)[:, thread]  # [blocks, 4, 8]
    if interleaved:
        channel = (
            np.where(n < 2, chosen["channel"][..., 0], chosen["channel"][..., 1]).astype(np.int64) + 2 * (n % 2) + e
        )
    else:
        channel = np.where(e == 0, chosen["channel"][..., 0], chosen["channel"][..., 1]).astype(np.int64) + n
    channel = np.where(chosen["head"] == NONE, basis.shape[1], channel)
    # [digit, tile, half, part, byte, block, n / 2, n % 2, column]: a thread is column * 4 + part.
    picked = digits[:, :, channel].reshape(2, tiles, 2, 4, 4, len(channel), 2, 2, 8)
    coarse = sum(1 << i for i in range(tiles) if not picked[0, i].any())
    ordered = picked.transpose(5, 1, 0, 6, 8, 3, 7, 2, 4)
    return np.ascontiguousarray(ordered).reshape(len(channel), tiles, 2, 2, 32, 2, 2, 4), coarse


def forward_fragments(rows: npt.NDArray[np.int16], tiles: int) -> npt.NDArray[np.uint8]:
    """A forward map int16 [components, channels] as the fragments of the matrix product that encodes.

    Two bytes a number, 256 * high + low, the high one signed; bytes [4 * tiles, channels / 32, 32 threads, {low, high},
    2, 4].
    """
    steps = -(-rows.shape[1] // TILE)
    padded = np.zeros((tiles * TILE, steps * TILE), np.int16)
    padded[: len(rows), : rows.shape[1]] = rows
    digits = np.stack([padded & 255, padded >> 8]).astype(np.uint8)
    # [digit, eight components, column, step, half, part, byte]: a thread is column * 4 + part.
    picked = digits.reshape(2, 4 * tiles, 8, steps, 2, 4, 4).transpose(1, 3, 2, 5, 0, 4, 6)
    return np.ascontiguousarray(picked).reshape(4 * tiles, steps, 32, 2, 2, 4)
