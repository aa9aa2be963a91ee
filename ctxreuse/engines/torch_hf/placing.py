"""Rows of blocks copied to other positions of a context's memory, and their K turned there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ctxreuse import kernels
from ctxreuse.block import BlockView
from ctxreuse.codec import Codec
from ctxreuse.engines.gauge import Rotary
from ctxreuse.engines.moving import Move, MoveError
from ctxreuse.engines.torch_hf.arena import Lease
from ctxreuse.engines.torch_hf.blocks import Bits, bits, scatter
from ctxreuse.errors import FormatError
from ctxreuse.levels import is_raw

__all__ = ["fill_moves"]

_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def shift_of(move: Move) -> int:
    """By how many positions the rows move."""
    return move.start - (move.view.header.rope_at + move.row)


def fill_moves(
    lease: Lease,
    moves: Sequence[Move],
    rotaries: Mapping[int, Rotary],
    codec: Codec | None,
    dtype: str,
    *,
    turn: bool,
) -> None:
    """Check, copy or decode the moves' K and V of all layers to their rows; turn K with ``turn``.

    ``dtype`` names the space's type. Raises MoveError: rows have been written then, none of which the context counts.
    """
    for layer in lease.arena.k:
        for role, plane in (("k", lease.arena.k[layer]), ("v", lease.arena.v[layer])):
            target = bits(plane)
            _fill(target, moves, layer, role, codec)
            if role == "k" and turn:
                _turn(target, moves, rotaries[layer], _NAMES[dtype])


def _whole(move: Move) -> bool:
    return move.row == 0 and move.count == len(move.view.header.tokens) // 4


def _batches(moves: Sequence[Move]) -> Iterator[tuple[int, list[Move]]]:
    """The moves in order as (number of the first, moves that one call can copy): whole blocks, one behind another."""
    at = 0
    while at < len(moves):
        batch = [moves[at]]
        for move in moves[at + 1 :]:
            last = batch[-1]
            follows = (
                last.start + last.count == move.start and last.view.header.end + move.count == move.view.header.end
            )
            if not (follows and _whole(last) and _whole(move) and _raw(last) == _raw(move)):
                break
            batch.append(move)
        yield at, batch
        at += len(batch)


def _raw(move: Move) -> bool:
    return is_raw(move.view.header.level)


def _fill(target: Bits, moves: Sequence[Move], layer: int, role: str, codec: Codec | None) -> None:
    for first, batch in _batches(moves):
        views = [move.view for move in batch]
        copy = partial(_copy, codec if not _raw(batch[0]) else None, layer, role)
        try:
            if _whole(batch[0]):
                copy(target, batch[0].start, views)
            else:
                _copy_part(target, batch[0], layer, role, codec)
        except FormatError as error:
            at = next((i for i, view in enumerate(views) if _corrupt(view, layer, role)), 0)
            key = views[at].header.key
            raise MoveError(error.what, where=error.where, fix=error.fix, index=first + at, key=key) from error


def _copy(codec: Codec | None, layer: int, role: str, target: Bits, row: int, views: Sequence[BlockView]) -> None:
    if codec is None:
        scatter(target, row, views, layer, role)
    else:
        codec.fill(views, layer, role, target, row)


def _copy_part(target: Bits, move: Move, layer: int, role: str, codec: Codec | None) -> None:
    heads, _, dim = target.shape
    size = len(move.view.header.tokens) // 4
    if _raw(move):
        whole = np.frombuffer(move.view.plane(layer, role), target.dtype).reshape(heads, size, dim)
    else:
        assert codec is not None
        whole = np.empty((heads, size, dim), target.dtype)
        codec.fill([move.view], layer, role, whole, 0)
    target[:, move.start : move.start + move.count] = whole[:, move.row : move.row + move.count]


def _corrupt(view: BlockView, layer: int, role: str) -> bool:
    try:
        view.plane(layer, role)
    except FormatError:
        return True
    return False


def _turn(target: Bits, moves: Sequence[Move], rotary: Rotary, kind: str) -> None:
    """Turn K in place, once for each run of neighbours that move equally far."""
    if rotary.style == "none":
        return
    heads, capacity, dim = target.shape
    strides = (capacity * dim, dim)
    for start, end, shift in _runs(moves):
        if shift == 0:
            continue  # the very bits
        cos, sin = kernels.shift_tables(rotary.inv_freq, shift)
        at = start * dim * target.dtype.itemsize
        kernels.rope_shift(
            target,
            target,
            (heads, end - start, dim),
            cos,
            sin,
            dst_dtype=kind,
            dst_strides=strides,
            src_strides=strides,
            dst_offset=at,
            src_offset=at,
            interleaved=rotary.style == "pairs",
        )


def _runs(moves: Sequence[Move]) -> list[tuple[int, int, int]]:
    """(start, end, shift) of neighbouring moves that go equally far."""
    runs: list[tuple[int, int, int]] = []
    for move in moves:
        shift, end = shift_of(move), move.start + move.count
        if runs and runs[-1][1:] == (move.start, shift):
            runs[-1] = (runs[-1][0], end, shift)
        else:
            runs.append((move.start, end, shift))
    return runs
