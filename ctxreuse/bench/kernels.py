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
from ctxreuse.bench import cuda
from ctxreuse.bench.measure import Options, aligned, paired
from ctxreuse.bench.report import Figure
from ctxreuse.cuda import open_device
from ctxreuse.kernels import reference

__all__ = ["OPTIONS", "run"]

OPTIONS = ("gpu",)

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
        size = _HEADS * _BLOCK * _DIM * 4
        self.offsets = [16 + i * size for i in range(layers)]
        self.buffers = [np.ones(16 + layers * size, np.uint8) for _ in range(blocks)]
        self.strides = ((tokens + _ROOM) * _DIM, _DIM)
        self.counts = [_BLOCK] * blocks
        self.nbytes = layers * blocks * size
        self.shape = (_HEADS, tokens, _DIM)
        self.gather(self.buffers)
        # The rotations change the layers; what is gathered then goes elsewhere, as the checksums are of these buffers.
        self.sink = [np.ones(b.nbytes, np.uint8) for b in self.buffers]
        self.sums = [[xxhash.xxh3_64_intdigest(b[at : at + size].data) for b in self.buffers] for at in self.offsets]
        self.cos, self.sin = kernels.shift_tables(kernels.inverse_frequencies(1e5, _DIM), 64)

    def gather(self, into: list[Any]) -> None:
        for layer, at in zip(self.layers, self.offsets, strict=True):
            offsets = [at] * len(into)
            kernels.gather_run(layer, "fp32", 0, self.strides, into, offsets, "fp32", _HEADS, _DIM, self.counts)

    def scatter(self) -> None:
        for layer, at in zip(self.layers, self.offsets, strict=True):
            offsets = [at] * len(self.buffers)
            kernels.scatter_run(
                layer, "fp32", 0, self.strides, self.buffers, offsets, "fp32", _HEADS, _DIM, self.counts
            )

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

    def narrow(self, into: Any) -> None:
        for layer in self.layers:
            kernels.copy3(into, layer, self.shape, dst_dtype="bf16", src_dtype="fp32", src_strides=self.strides)

    def numpy(self) -> dict[str, Callable[[], object]]:
        """The same work in numpy, one layer of it: the whole would take minutes."""
        layer, at = self.layers[0], self.offsets[0]
        run = (self.buffers, [at] * len(self.buffers), 0, _HEADS, _DIM, self.counts)
        out = (self.sink, *run[1:])
        rope = (layer, 0, 0, self.strides, layer, 0, 0, self.strides, self.shape, self.cos, self.sin)
        into = np.zeros(self.shape, np.uint16)
        return {
            "gather": lambda: reference.gather_run(layer, 0, 0, self.strides, *out),
            "scatter": lambda: reference.scatter_run(layer, 0, 0, self.strides, *run),
            "scatter, checked": lambda: reference.scatter_checked(layer, 0, 0, self.strides, *run, self.sums[0]),
            "rope, halves": lambda: reference.rope_shift(*rope, False),
            "rope, pairs": lambda: reference.rope_shift(*rope, True),
            "fp32 to bf16": lambda: reference.copy3(
                into, 2, 0, (self.shape[1] * _DIM, _DIM, 1), layer, 0, 0, (*self.strides, 1), self.shape
            ),
        }


def run(options: Options) -> list[Figure]:
    """Figures in GB/s read, one core; medians of paired rounds. With ``gpu`` those of the device after them.

    ConfigError, before anything is measured, if ``gpu`` is asked for and no device is there.
    """
    if options.gpu:
        open_device()
    layers, blocks = options.pick(8, 60), 32
    rounds = options.pick(3, 9)
    options.step("making data")
    data = _Data(layers, blocks)
    source, target = np.ones(data.nbytes, np.uint8), np.ones(data.nbytes, np.uint8)
    into = np.ones(data.shape, np.uint16)
    ours: dict[str, Callable[[], object]] = {
        "scatter": data.scatter,
        "scatter, checked": data.checked,
        "rope, halves": partial(data.rotate, False),
        "rope, pairs": partial(data.rotate, True),
        "gather": partial(data.gather, data.sink),
        "fp32 to bf16": partial(data.narrow, into),
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
                    baseline=data.nbytes / layers / baseline[name] / 1e9,
                    bound=bound,
                    note="baseline: numpy; bound: memcpy" if not figures else "",
                )
                for name in ours
            ]
    finally:
        kernels.use(before)
    return figures + (cuda.run(options) if options.gpu else [])
