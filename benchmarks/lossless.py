"""The lossless level on real K/V, bfloat16 and float32, one core: ratio and GB/s against zstd and Blosc2, and memcpy.

Blocks of 64 tokens of a real text, K rotated as engines keep it; each plane of a block is packed alone, by all. The
ratio counts everything that is stored. Decoding goes into an engine's memory with checksums compared for ours, into
memory of the plane's size for the others. GB/s are raw bytes (10^9) by the processor time of the one thread that works.
Blosc2 knows the element size. Options: ``--model``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from ctxreuse import kernels
from ctxreuse.bench.measure import Options, processor_time
from ctxreuse.bench.report import Figure
from ctxreuse.codec import lossless
from ctxreuse.errors import ConfigError

__all__ = ["OPTIONS", "run"]

OPTIONS = frozenset({"model"})
_MODEL = "smollm2"
_TYPES = ("bfloat16", "float32")
#: GB/s of raw bytes that one core must reach, both ways, where AVX-512 is.
_BAR = 1.0
Planes = list[NDArray[np.generic]]


def run(options: Options) -> list[Figure]:
    """Ratios, then GB/s with their peers; medians of rounds that take turns. ConfigError without the rivals."""
    rivals = _rivals()
    figures: list[Figure] = []
    for dtype in _TYPES:
        options.step(f"K/V in {dtype}")
        planes = _planes(options.model or _MODEL, dtype, options.pick(2, 12))
        figures += _measure(planes, dtype, rivals, options)
    return figures


def _measure(planes: Planes, dtype: str, rivals: dict[str, Rival], options: Options) -> list[Figure]:
    raw = sum(plane.nbytes for plane in planes)
    work: dict[str, Callable[[], object]] = {}
    packed: dict[str, int] = {}
    source = np.concatenate([plane.reshape(-1) for plane in planes])
    sink = source.copy()
    ours = _Ours(planes, dtype)
    work |= {"memcpy": lambda: np.copyto(sink, source), "ours+": ours.encode, "ours-": ours.decode}
    packed["ours"] = sum(stream.nbytes for stream in ours.streams)
    ours.check()
    for name, make in rivals.items():
        options.step(f"{dtype}: {name}")
        pack, unpack = make(planes[0].itemsize)
        items = [plane.tobytes() for plane in planes]
        streams = _pack_all(pack, items)
        room = np.empty(max(plane.nbytes for plane in planes), np.uint8)
        packed[name] = sum(len(stream) for stream in streams)
        work[f"{name}+"] = partial(_pack_all, pack, items)
        work[f"{name}-"] = partial(_unpack_all, unpack, streams, room)
    options.step(f"{dtype}: all in turns")
    spent = processor_time(work, rounds=options.pick(2, 7))
    speed = {name: raw / seconds / 1e9 for name, seconds in spent.items()}
    best = min(rivals, key=lambda name: packed[name])
    table = kernels.active()
    figures = [
        Figure(
            metric=f"ratio, {dtype}",
            value=raw / packed["ours"],
            unit="x",
            baseline=raw / packed["zstd -1"],
            peer=raw / packed[best],
            bar=raw / packed[best],
            note=f"{8 * planes[0].itemsize * packed['ours'] / raw:.2f} bits a value; baseline: zstd -1; peer: {best}",
        )
    ]
    for sign, way in (("+", "encode"), ("-", "decode")):
        figures.append(
            Figure(
                metric=f"{way}, {dtype}, {table}",
                value=speed[f"ours{sign}"],
                unit="GB/s",
                baseline=speed[f"zstd -1{sign}"],
                peer=speed[f"{best}{sign}"],
                bound=speed["memcpy"],
                bar=_BAR if table == "avx512" else None,
                note=f"baseline: zstd -1; peer: {best}; bound: memcpy",
            )
        )
    figures += [
        Figure(
            metric=f"ratio of {name}, {dtype}",
            value=raw / packed[name],
            unit="x",
            note=f"encodes {speed[f'{name}+']:.2f}, decodes {speed[f'{name}-']:.2f} GB/s",
        )
        for name in rivals
    ]
    return figures


class _Ours:
    """The streams of one plane after the other, decoded into one tensor as an engine has it."""

    def __init__(self, planes: Planes, dtype: str) -> None:
        self.planes, self.dtype = planes, dtype
        self.streams = self.encode()
        self.sums = [xxhash.xxh3_64_intdigest(stream.data) for stream in self.streams]
        self.counts = [plane.shape[1] for plane in planes]
        heads, _, dim = planes[0].shape
        self.target = np.zeros((heads, sum(self.counts), dim), planes[0].dtype)

    def encode(self) -> list[NDArray[np.uint8]]:
        return [lossless.encode_plane(plane, self.dtype, plane.shape) for plane in self.planes]

    def decode(self) -> None:
        """A few blocks a call, as one layer of a context is: more would be spread over threads."""
        each, row = 16, 0
        for at in range(0, len(self.streams), each):
            part = slice(at, at + each)
            streams, counts = self.streams[part], self.counts[part]
            sizes = [stream.size for stream in streams]
            run = (streams, [0] * len(streams), sizes, counts, self.dtype)
            lossless.unpack_run(*run, self.target, row, self.sums[part])
            row += sum(counts)

    def check(self) -> None:
        """What is measured is right."""
        self.decode()
        assert self.target.tobytes() == np.concatenate(self.planes, axis=1).tobytes()


Pack: TypeAlias = Callable[[bytes], bytes]
Unpack: TypeAlias = Callable[[bytes, NDArray[np.uint8]], object]
Rival: TypeAlias = Callable[[int], tuple[Pack, Unpack]]
"""For an element size: how to pack, and how to unpack into memory of at least the plane's size."""


def _pack_all(pack: Pack, items: list[bytes]) -> list[bytes]:
    return [pack(item) for item in items]


def _unpack_all(unpack: Unpack, streams: list[bytes], room: NDArray[np.uint8]) -> None:
    for stream in streams:
        unpack(stream, room)


def _rivals() -> dict[str, Rival]:
    try:
        import blosc2
        import zstandard
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", fix="pip install 'ctxreuse[bench]'") from None

    def zstd(level: int) -> Rival:
        pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return lambda item: (pack.compress, lambda stream, room: unpack.decompress(stream))

    def blosc(codec: Any, shuffle: Any, level: int) -> Rival:
        settings = {"codec": codec, "clevel": level, "filters": [shuffle], "filters_meta": [0], "nthreads": 1}
        return lambda item: (
            lambda data: blosc2.compress2(data, typesize=item, **settings),
            lambda stream, room: blosc2.decompress2(stream, dst=room[: int.from_bytes(stream[4:8], "little")]),
        )

    rivals: dict[str, Rival] = {"zstd -1": zstd(1), "zstd -3": zstd(3)}
    shuffles = {"shuffle": blosc2.Filter.SHUFFLE, "bitshuffle": blosc2.Filter.BITSHUFFLE}
    # Higher levels of its zstd take five times as long and save nothing here, lower ones of its LZ4 gain no speed.
    for codec, number, level in (("zstd", blosc2.Codec.ZSTD, 1), ("lz4", blosc2.Codec.LZ4, 5)):
        for name, shuffle in shuffles.items():
            rivals[f"Blosc2 {codec} {level}, {name}"] = blosc(number, shuffle, level)
    return rivals


def _planes(model: str, dtype: str, blocks: int) -> Planes:
    """K and V of every layer and block of a text, as bits [heads, 64, dim]."""
    from benchmarks.rate.texts import held_out, tokens_of
    from ctxreuse.block.format import parse
    from ctxreuse.engines import open_engine

    engine = open_engine(model, dtype=dtype, threads=1)
    if engine.text is None:
        raise ConfigError("the model has no tokenizer", where=model)
    size = blocks * engine.space.block_tokens
    found = [tokens_of(engine.text, text, size) for text in held_out().values()]
    ids = next((ids for ids in found if ids is not None), None)
    if ids is None:
        raise ConfigError(f"no text here has {size} tokens", where=model)
    context = engine.new_context(size)
    engine.prefill(context, ids)
    keys = [bytes([i + 1]) * 32 for i in range(blocks)]
    views = [parse(block) for block in engine.export(context, keys, bytes(32), 0)]
    kinds = {"bfloat16": np.uint16, "float32": np.uint32}
    planes: Planes = []
    for plane in views[0].layout.planes:
        planes += [view.array(plane.layer, plane.role).view(kinds[dtype]) for view in views if plane.role in "kv"]
    return [plane for plane in planes if plane.shape == planes[0].shape]
