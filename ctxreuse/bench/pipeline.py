"""Whole blocks to coded bytes and back on one core, at every level of the model's card, against memcpy.

Blocks of a real text are encoded and then decoded into an engine's memory, checksums compared, as a load does it. GB/s
count the K/V as 16-bit floats (10^9 bytes), whatever the engine keeps, by the processor time of the one thread that
works; the bound is memcpy of as many bytes. Options: ``--model``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxreuse.bench.measure import Options, aligned, processor_time
from ctxreuse.bench.report import Figure
from ctxreuse.errors import ConfigError

__all__ = ["OPTIONS", "run"]

OPTIONS = frozenset({"model"})
_MODEL, _DTYPE = "smollm2", "bfloat16"
#: GB/s of 16-bit K/V that one core must reach.
_DECODE_BAR, _ENCODE_BAR = 4.0, 2.0


class _Blocks:
    """Blocks of a text, the same coded at a level, and memory as an engine has it."""

    def __init__(self, engine: Any, count: int) -> None:
        from ctxreuse.bench.rate.texts import held_out, tokens_of
        from ctxreuse.block import parse

        space = engine.space
        size = count * space.block_tokens
        found = [tokens_of(engine.text, text, size) for text in held_out().values()]
        ids = next((ids for ids in found if ids is not None), None)
        if ids is None:
            raise ConfigError(f"no text here has {size} tokens", where=space.architecture)
        live = engine.start(size)
        engine.prefill(live, ids)
        keys = [bytes([i + 1]) * 32 for i in range(count)]
        self.views = [parse(block) for block in engine.export(live, keys, bytes(32), 0)]
        self.values = sum(int(np.prod(plane.shape)) for view in self.views for plane in view.layout.planes)
        self.target = {
            (layer, role): aligned(spec.kv_heads, size, dim).view(np.uint16)[..., :dim]
            for layer, spec in enumerate(space.layers)
            if spec.blocked
            for role, dim in (("k", spec.k_dim), ("v", spec.v_dim))
        }
        self.coded = self.views

    def encode(self, codec: Any, level: str) -> None:
        from ctxreuse.block import parse

        self.coded = [parse(codec.encode(view, level)) for view in self.views]

    def decode(self, codec: Any) -> None:
        for (layer, role), target in self.target.items():
            codec.fill(self.coded, layer, role, target, 0)


def run(options: Options) -> list[Figure]:
    """Figures in GB/s of 16-bit K/V, one core; medians of rounds that take turns with memcpy."""
    from ctxreuse.codec import Codec
    from ctxreuse.engines import open_engine

    model = options.model or _MODEL
    options.step(f"opening {model}")
    engine = open_engine(model, dtype=_DTYPE, threads=1)
    codec = Codec.open(engine.space)
    levels = [info.name for info in codec.levels if info.lossy]
    if not levels:
        raise ConfigError(f"there is no card of {model}", fix=f"Run: ctxreuse calibrate {model}")
    blocks = _Blocks(engine, options.pick(4, 16))
    gigabytes = 2 * blocks.values / 1e9
    source, sink = np.ones(2 * blocks.values, np.uint8), np.ones(2 * blocks.values, np.uint8)
    figures: list[Figure] = []
    for level in levels:
        options.step(level)
        blocks.encode(codec, level)
        spent = processor_time(
            {
                "memcpy": lambda: np.copyto(sink, source),
                "decode": lambda: blocks.decode(codec),
                "encode": lambda n=level: blocks.encode(codec, n),  # type: ignore[misc]
            },
            rounds=options.pick(3, 15),
        )
        bits = 8 * sum(len(view.buffer) for view in blocks.coded) / blocks.values
        for name, bar in (("decode", _DECODE_BAR), ("encode", _ENCODE_BAR)):
            figures.append(
                Figure(
                    metric=f"{name}, {level}",
                    value=gigabytes / spent[name],
                    unit="GB/s",
                    bound=gigabytes / spent["memcpy"],
                    bar=bar,
                    note=f"{bits:.2f} bits a value; bound: memcpy",
                )
            )
    return figures
