"""Whole blocks to coded bytes and back on one core, at every level of the model's card, against memcpy.

Blocks of a real text are encoded and then decoded into an engine's memory, checksums compared, as a load does it. GB/s
count the K/V as 16-bit floats (10^9 bytes), by the processor time of the thread, which has one processor: joint levels
would use more. The bound is memcpy of as many bytes. The notes say where the time goes, as the native coder tells it of
another pass, and how many products of its transform a value takes. A core of an EPYC makes 270 G/s of those of 16 bits
(VPDPWSSD, all of encoding) and 530 G/s of those of bytes (VPDPBUSD, most of decoding) where it is a Zen 5, 109 and 226
where it is a Zen 4. There encoding is at that limit, one more product a value costs 9.2 ps, and decoding at 81 % of it;
at kl-0.05 the products alone take .75 of the 1.0 ns that a value may take to encode at 2 GB/s, and .36 of the .5 ns to
decode at 4. Encoding by bytes would halve it, for 5 % (kl-0.05) to 20 % (kl-0.01) more squared error.

Options: ``--model``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ctxreuse import kernels
from ctxreuse.bench.measure import Options, aligned, processor_time
from ctxreuse.bench.report import Figure
from ctxreuse.errors import ConfigError
from ctxreuse.kernels import klt

__all__ = ["OPTIONS", "run"]

OPTIONS = frozenset({"model"})
_MODEL, _DTYPE = "smollm2", "bfloat16"
#: GB/s of 16-bit K/V that one core must reach.
_DECODE_BAR, _ENCODE_BAR = 4.0, 2.0
_PARTS = {"encode": klt.ENCODE_PARTS, "decode": klt.DECODE_PARTS}


class _Blocks:
    """Blocks of a text, the same coded at a level, and memory as an engine has it."""

    def __init__(self, engine: Any, count: int) -> None:
        from benchmarks.rate.texts import held_out, tokens_of
        from ctxreuse.block.format import parse

        space = engine.space
        size = count * space.block_tokens
        found = [tokens_of(engine.text, text, size) for text in held_out().values()]
        ids = next((ids for ids in found if ids is not None), None)
        if ids is None:
            raise ConfigError(f"no text here has {size} tokens", where=space.architecture)
        context = engine.new_context(size)
        engine.prefill(context, ids)
        keys = [bytes([i + 1]) * 32 for i in range(count)]
        self.views = [parse(block) for block in engine.export(context, keys, bytes(32), 0)]
        self.values = sum(int(np.prod(plane.shape)) for view in self.views for plane in view.layout.planes)
        self.target = {
            (layer, role): aligned(spec.kv_heads, size, dim // 2).view(np.uint16)
            for layer, spec in enumerate(space.layers)
            if spec.blocked
            for role, dim in (("k", spec.k_dim), ("v", spec.v_dim))
        }
        self.coded = self.views

    def encode(self, codec: Any, level: str) -> None:
        from ctxreuse.block.format import parse

        self.coded = [parse(codec.encode(view, level)) for view in self.views]

    def shares(self, codec: Any, level: str, rounds: int) -> dict[str, str]:
        """Where the time of "encode" and of "decode" goes, in words; ``target`` must hold a context."""
        from ctxreuse.codec.planes import plane_coder

        tables, number = kernels.RansTables(codec.profile.tables), codec.profile.number(level)
        planes = codec.profile.planes_of(codec.profile.levels[number]).planes
        places = [plane.parts[0].place for plane in planes]
        coders = [plane_coder(codec.profile, number, layer, role, tables) for layer, role in places]
        passes = [self._timed(codec.space, coders) for _ in range(rounds)]
        told = {}
        for name, parts in _PARTS.items():
            spent = np.median([times[name] for times in passes], 0)
            told[name] = ", ".join(f"{part} {100 * t / spent.sum():.0f} %" for part, t in zip(parts, spent))
        return told

    def _timed(self, space: Any, coders: Sequence[Any]) -> dict[str, Any]:
        """Nanoseconds of each part of the native coder for all planes, encoded and decoded once."""
        from ctxreuse.codec.planes import raw_type

        raw, counts = raw_type(space.dtype), [space.block_tokens] * len(self.views)
        spent = {name: np.zeros(len(parts), np.int64) for name, parts in _PARTS.items()}
        for coder in coders:
            target = np.stack([self.target[place] for place in coder.places])
            rows, dim = target.shape[2:]
            ropes = list(dict.fromkeys(rope for rope in coder.ropes if rope is not None))
            layout = [
                [i * target[0].nbytes, rows * dim, dim, 1, -1 if rope is None else ropes.index(rope)]
                for i, rope in enumerate(coder.ropes)
            ]
            planes = kernels.KltPlanes.of([coder.native], np.array(layout, np.int64))
            data, spans = planes.encode(
                target, space.dtype, counts, raw_first=coder.plane.sinks, raw_dtype=raw, times=spent["encode"],
                angles=[rope.span_tables(0, rows, undo=True) for rope in ropes],
            )  # fmt: skip
            sources = [(count, data, span, None, None, None, None) for count, span in zip(counts, spans, strict=True)]
            rotations = [rope.span_tables(0, rows) for rope in ropes]
            planes.decode(target, space.dtype, sources, raw, angles=rotations, times=spent["decode"])
        return spent

    def decode(self, codec: Any) -> None:
        for (layer, role), target in self.target.items():
            codec.fill(self.coded, layer, role, target, 0)


def _products(profile: Any, level: Any) -> float:
    """Products that a value takes: the components of its group."""
    planes = profile.planes_of(level)
    sizes = [
        (len(level.codings[first + i].table), len(plane.parts) * group.heads * plane.dim)
        for plane, first in zip(planes.planes, planes.first_group)
        for i, group in enumerate(plane.groups)
    ]
    return float(sum(n * channels for n, channels in sizes) / sum(channels for _, channels in sizes))


@contextmanager
def _one_processor() -> Iterator[None]:
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


@_one_processor()
def run(options: Options) -> list[Figure]:
    """Figures in GB/s of 16-bit K/V, one core; medians of rounds that take turns with memcpy."""
    from ctxreuse.engines.torch_hf import TorchEngine

    model = options.model or _MODEL
    options.step(f"opening {model}")
    engine = TorchEngine.open(model, dtype=_DTYPE, threads=1)
    codec = engine.codec
    levels, profile = [info.name for info in codec.levels if info.lossy], codec.profile
    if not levels or profile is None:
        raise ConfigError(f"there is no card of {model}", fix=f"Run: ctxreuse calibrate {model}")
    widest = max(spec.kv_heads * max(spec.k_dim, spec.v_dim) for spec in engine.space.layers)
    alone = klt.PARALLEL_VALUES // (widest * engine.space.block_tokens)
    blocks = _Blocks(engine, min(options.pick(4, 16), alone))
    gigabytes = 2 * blocks.values / 1e9
    source, sink = np.ones(2 * blocks.values, np.uint8), np.ones(2 * blocks.values, np.uint8)
    figures: list[Figure] = []
    rounds = options.pick(3, 15)
    for level in levels:
        options.step(level)
        blocks.encode(codec, level)
        spent = processor_time(
            {
                "memcpy": lambda: np.copyto(sink, source),
                "decode": lambda: blocks.decode(codec),
                "encode": lambda n=level: blocks.encode(codec, n),  # type: ignore[misc]
            },
            rounds=rounds,
        )
        shares = blocks.shares(codec, level, rounds)
        bits = 8 * sum(len(view.buffer) for view in blocks.coded) / blocks.values
        products = _products(profile, profile.levels[profile.number(level)])
        for name, bar in (("decode", _DECODE_BAR), ("encode", _ENCODE_BAR)):
            rate = products * blocks.values / spent[name] / 1e9
            figures.append(
                Figure(
                    metric=f"{name}, {level}",
                    value=gigabytes / spent[name],
                    unit="GB/s",
                    bound=gigabytes / spent["memcpy"],
                    bar=bar,
                    note=f"{bits:.2f} bits and {products:.0f} products a value ({rate:.0f} G/s); bound: memcpy;"
                    f" {shares[name]}",
                )
            )
    return figures
