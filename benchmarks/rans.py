"""Entropy coding of quantised values on one core, per instruction set, against zstd -1 and memcpy, with its bits.

Symbols are Gaussian and Laplace values, rounded to 16 or 32 steps and of eight spreads, a table for each; runs of steps
share one, as the channels of a class do. G symbols/s are 10^9 a second. zstd -1 gets two symbols a byte where there are
16 (the packing is not counted), else one. memcpy copies one byte a symbol. Bits stand against the entropy of the
symbols given their class; the 128 bytes of seeds in a stream are the caller's, not its cost. A call: what one from
Python takes for one stream of 512 symbols, which is in the speeds above.

Encoding with AVX-512 takes some 105 instructions for 64 symbols, half of them multiplications, shuffles and shifts, of
which Zen 4 does one of 512 bits a cycle or less: 51 cycles. It waits for nothing: four streams in turns, which decode
1.25 times as fast as two, encode .85 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxreuse import kernels
from ctxreuse.bench.measure import Options, paired
from ctxreuse.bench.report import Figure
from ctxreuse.errors import ConfigError
from ctxreuse.kernels import RansTables

__all__ = ["run"]

_CLASSES = 8
_SEED_BYTES = 128
_AMOUNT = kernels.PARALLEL_SYMBOLS
#: Times that each call runs in a round: what ran before it has emptied the caches.
_REPEATS = 8
#: Bars of `encode` and `decode`, by the implementation's name.
_BARS = {"avx512": 6.0, "avx2": 2.0}
_ZSTD_BAR = 1.4


class _Data:
    """Streams of symbols with their tables, encoded by us and by zstd."""

    def __init__(self, alphabet: int, size: int, streams: int, zstd: Any) -> None:
        random = np.random.default_rng(alphabet + size)
        self.size, self.counts = size, np.full(streams, size)
        steps = size // kernels.LANES  # sizes are whole steps
        classes = np.sort(np.arange(steps) % _CLASSES).astype(np.uint16)
        self.steps = np.tile(classes, streams)
        spread = np.geomspace(alphabet / 16, alphabet / 5, _CLASSES)[np.repeat(classes, kernels.LANES)]
        gauss = random.standard_normal((streams, size)) * spread
        values = np.where(np.arange(streams)[:, None] % 2, gauss, random.laplace(size=(streams, size)) * spread / 1.4)
        self.symbols = np.clip(np.rint(values + alphabet / 2), 0, alphabet - 1).astype(np.uint8)
        seen = kernels.rans_count(self.symbols, self.steps, _CLASSES)
        frequencies = [_frequencies(row, alphabet) for row in seen]
        self.tables = RansTables(frequencies)
        self.entropy, self.rounded = _bits_of(seen, seen), _bits_of(seen, np.array(frequencies))
        self.seeds = random.integers(0, 1 << 16, (streams, kernels.LANES), dtype=np.uint16)
        self.room = np.ones(streams * kernels.rans_bound(size), np.uint8)
        self.out = np.ones(streams * size, np.uint8)
        self.flat = self.symbols.reshape(-1)
        data, self.offsets = self.encode()
        self.data = data.copy()
        packed = self.symbols[:, ::2] | self.symbols[:, 1::2] << 4 if alphabet <= 16 else self.symbols
        self.packed = [row.tobytes() for row in packed]
        self.compressor, self.decompressor = zstd.ZstdCompressor(level=1), zstd.ZstdDecompressor()
        self.zipped = [self.compressor.compress(row) for row in self.packed]

    def encode(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return kernels.rans_encode_many(self.flat, self.counts, self.tables, self.steps, self.seeds, out=self.room)

    def decode(self) -> None:
        kernels.rans_decode_many(self.data, self.offsets, self.counts, self.tables, self.steps, out=self.out)

    def check(self) -> None:
        """What is measured is right."""
        self.out[:] = 255
        self.decode()
        assert (self.out == self.flat).all()
        assert self.encode()[0].tobytes() == self.data.tobytes()

    def zip(self) -> None:
        for row in self.packed:
            self.compressor.compress(row)

    def unzip(self) -> None:
        for row in self.zipped:
            self.decompressor.decompress(row)

    @property
    def bits(self) -> float:
        return (self.data.size - _SEED_BYTES * len(self.counts)) * 8 / self.flat.size

    @property
    def zstd_bits(self) -> float:
        return sum(map(len, self.zipped)) * 8 / self.flat.size


def run(options: Options) -> list[Figure]:
    """Figures in G symbols/s of one core, then bits; medians of paired rounds. ConfigError without zstandard."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError("the bench rans compares with zstd", fix="Run pip install 'ctxreuse[bench]'") from error
    figures: list[Figure] = []
    before = kernels.active()
    try:
        for alphabet in (16, 32):
            for size in (12_288, 65_536):
                # What one thread takes: above, the calls would use every core.
                streams = _AMOUNT // size
                data = _Data(alphabet, size, streams, zstandard)
                figures += _speeds(data, f"{alphabet} symbols, streams of {size:,}", options)
                figures.append(_bits(data, f"{alphabet} symbols, streams of {size:,}"))
        kernels.use(before)
        figures += _calls(_Data(16, _CLASSES * kernels.LANES, 1, zstandard), options)
    finally:
        kernels.use(before)
    return figures


def _speeds(data: _Data, what: str, options: Options) -> list[Figure]:
    figures = []
    target = np.ones_like(data.flat)
    packed = "nibbles" if len(data.packed[0]) < data.size else "bytes"
    for table in kernels.available():
        kernels.use(table)
        name = kernels.rans_name()
        options.step(f"{what}, {table}")
        data.check()
        calls: dict[str, Callable[[], object]] = {
            "encode": data.encode,
            "decode": data.decode,
            "zstd encode": data.zip,
            "zstd decode": data.unzip,
            "memcpy": partial(np.copyto, target, data.flat),
        }
        often = {key: partial(_repeat, call) for key, call in calls.items()}
        spent = paired(often, rounds=options.pick(3, 41))
        speed = {key: data.flat.size * _REPEATS / seconds / 1e9 for key, seconds in spent.items()}
        figures += [
            Figure(
                metric=f"{way}, {name}: {what}",
                value=speed[way],
                unit="G symbols/s",
                peer=speed[f"zstd {way}"],
                bound=speed["memcpy"],
                bar=_BARS.get(name),
                note=f"peer: zstd -1 on {packed}; bound: memcpy",
            )
            for way in ("encode", "decode")
        ]
        if packed == "nibbles" and table == kernels.available()[0]:
            figures.append(
                Figure(
                    metric=f"decode against zstd -1 on nibbles: {what}",
                    value=speed["decode"] / speed["zstd decode"],
                    unit="x",
                    bar=_ZSTD_BAR,
                )
            )
    return figures


def _calls(data: _Data, options: Options) -> list[Figure]:
    calls = {"encode": partial(_repeat, data.encode), "decode": partial(_repeat, data.decode)}
    spent = paired(calls, rounds=options.pick(3, 41))
    return [
        Figure(metric=f"a call: {way}", value=seconds / _REPEATS * 1e6, unit="us", better="lower")
        for way, seconds in spent.items()
    ]


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        call()


def _bits(data: _Data, what: str) -> Figure:
    # The states' own cost, some 68 bytes a stream, is more than 1 % of a short one.
    return Figure(
        metric=f"bits a symbol: {what}",
        value=data.bits,
        unit="bits",
        peer=data.zstd_bits,
        bound=data.entropy,
        better="lower",
        bar=1.01 * data.entropy if data.size > 20_000 else None,
        note=f"bound: entropy given the class, {data.rounded:.4f} where probabilities have 8 bits; peer: zstd -1",
    )


def _bits_of(seen: NDArray[np.uint32], weights: NDArray[Any]) -> float:
    """Bits a symbol, given its class, whose symbols have probabilities by ``weights``."""
    counts = seen.astype(np.float64)
    shares = weights / weights.sum(1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return float(-(counts * logs).sum() / counts.sum())


def _frequencies(seen: NDArray[np.uint32], alphabet: int) -> list[int]:
    """Counts scaled to a sum of 256, at least 1 for each symbol of the alphabet that occurs or lies between such."""
    present = np.flatnonzero(seen[:alphabet])
    used = np.arange(present[0], max(present[-1], present[0] + 1) + 1)
    exact = seen[used] / seen[used].sum() * 256
    freq = np.maximum(np.rint(exact).astype(int), 1)
    while freq.sum() != 256:
        # Where a unit more or less costs the fewest bits.
        step = 1 if freq.sum() < 256 else -1
        room = freq + step >= 1
        cost = np.where(room, -exact * (np.log2(np.maximum(freq + step, 1)) - np.log2(freq)), np.inf)
        freq[cost.argmin()] += step
    row = np.zeros(kernels.SYMBOLS, int)
    row[used] = freq
    return [int(f) for f in row]
