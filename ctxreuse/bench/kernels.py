"""The native kernels on data larger than the caches, per instruction set, against memcpy of the same bytes.

One layer of a 135M model's K (3 heads of 64, float32), 64-token blocks, enough layers for 94 MB. A kernel that copies
reads and writes what memcpy does, so memcpy is its bound; a rotation in place reads and writes half as many bytes, so
its bound is the same number of GB/s. GB/s count the bytes read (10^9). The baseline is numpy doing the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ctxreuse import kernels
from ctxreuse.bench.measure import Options, aligned, paired
from ctxreuse.bench.report import Figure
from ctxreuse.rope import inverse_frequencies, shift_tables

__all__ = ["run"]

_HEADS, _DIM, _BLOCK = 3, 64, 64
_ROOM = _DIM  # tokens of room behind the context, as an engine has for the answer


class _Data:
    """Layers of an engine's K, the same as planes of blocks, and the checksums of those."""

    def __init__(self, layers: int, blocks: int) -> None:
        tokens = blocks * _BLOCK
        random = np.random.default_rng(0)
        self.layers = [aligned(_HEADS, tokens + _ROOM, _DIM) for _ in range(layers)]
        for layer in self.layers:
            layer[:] = random.standard_normal(layer.shape, np.float32)
        self.size = _HEADS * _BLOCK * _DIM * 4
        self.offsets = [16 + i * self.size for i in range(layers)]
        self.buffers = [np.ones(16 + layers * self.size, np.uint8) for _ in range(blocks)]
        self.strides = ((tokens + _ROOM) * _DIM, _DIM)
        self.counts = [_BLOCK] * blocks
        self.nbytes = layers * blocks * self.size
        self.shape = (_HEADS, tokens, _DIM)
        for i, layer in enumerate(self.layers):
            for j, plane in enumerate(self.planes(i)):
                plane[:] = layer[:, j * _BLOCK : (j + 1) * _BLOCK]
        self.sums = [[xxhash.xxh3_64_intdigest(plane.data) for plane in self.planes(i)] for i in range(layers)]
        self.cos, self.sin = shift_tables(inverse_frequencies(1e5, _DIM), 64)

    def planes(self, layer: int) -> list[Any]:
        """The planes of a layer in all blocks, [heads, tokens, dim], as views."""
        at = slice(self.offsets[layer], self.offsets[layer] + self.size)
        return [buffer[at].view(np.float32).reshape(_HEADS, _BLOCK, _DIM) for buffer in self.buffers]

    def checked(self) -> None:
        for layer, at, sums in zip(self.layers, self.offsets, self.sums, strict=True):
            run = (self.buffers, [at] * len(self.buffers), "fp32", _HEADS, _DIM, self.counts)
            assert kernels.scatter_checked(layer, "fp32", 0, self.strides, *run, sums) == -1

    def rotate(self, interleaved: bool) -> None:
        for layer in self.layers:
            kernels.rope_shift(
                layer,
                layer,
                self.shape,
                self.cos,
                self.sin,
                dst_dtype="fp32",
                dst_strides=self.strides,
                src_strides=self.strides,
                interleaved=interleaved,
            )

    def numpy(self) -> dict[str, Callable[[], object]]:
        """The same work in numpy."""
        layers = [(layer[:, : self.shape[1]], self.planes(i)) for i, layer in enumerate(self.layers)]

        def checked() -> None:
            for (_, planes), sums in zip(layers, self.sums, strict=True):
                assert [xxhash.xxh3_64_intdigest(plane.data) for plane in planes] == sums
            for rows, planes in layers:
                for i, plane in enumerate(planes):
                    rows[:, i * _BLOCK : (i + 1) * _BLOCK] = plane

        def rotate(one: slice, two: slice) -> None:
            for rows, _ in layers:
                a, b = rows[..., one].copy(), rows[..., two].copy()
                rows[..., one], rows[..., two] = a * self.cos - b * self.sin, b * self.cos + a * self.sin

        half = _DIM // 2
        return {
            "scatter, checked": checked,
            "rope, halves": partial(rotate, slice(0, half), slice(half, _DIM)),
            "rope, pairs": partial(rotate, slice(0, _DIM, 2), slice(1, _DIM, 2)),
        }


def run(options: Options) -> list[Figure]:
    """Figures in GB/s read, one core; medians of paired rounds."""
    layers, blocks = options.pick(8, 60), 32
    rounds = options.pick(3, 9)
    options.step("making data")
    data = _Data(layers, blocks)
    source, target = np.ones(data.nbytes, np.uint8), np.ones(data.nbytes, np.uint8)
    ours: dict[str, Callable[[], object]] = {
        "scatter, checked": data.checked,
        "rope, halves": partial(data.rotate, False),
        "rope, pairs": partial(data.rotate, True),
    }
    options.step("numpy")
    baseline = paired(data.numpy(), rounds=rounds)
    figures: list[Figure] = []
    before = kernels.active()
    try:
        for table in kernels.available():
            kernels.use(table)
            options.step(table)
            spent = paired({"memcpy": lambda: np.copyto(target, source), **ours}, rounds=rounds)
            bound = data.nbytes / spent["memcpy"] / 1e9
            figures += [
                Figure(
                    metric=f"{name}, {table}",
                    value=data.nbytes / spent[name] / 1e9,
                    unit="GB/s",
                    baseline=data.nbytes / baseline[name] / 1e9,
                    bound=bound,
                    note="baseline: numpy; bound: memcpy" if not figures else "",
                )
                for name in ours
            ]
    finally:
        kernels.use(before)
    return figures
