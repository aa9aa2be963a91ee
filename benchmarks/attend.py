"""Attention over quantised rows on the processor: ours in each format against torch's, and against reading the bytes.

One layer's K and V of normal values: 9 query heads over 3 of 64, and 32 over 8 of 128; one new query (decoding), and 32
(a question). Milliseconds are wall time on all cores, medians of rounds in which all take turns; the baseline is
torch's scaled_dot_product_attention in float32, the peer the same in bfloat16, both with `enable_gqa`. The bound for
one query is reading our planes once on as many threads (XXH3 of them, which no memory keeps up with); many queries are
bound by arithmetic. Bars hold one thread against one by processor time, which other work on the machine changes less.
The error is the largest difference from torch's float32 over the dequantised values, as a share of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ctxreuse.bench.measure import Options, paired, processor_time
from ctxreuse.bench.report import Figure
from ctxreuse.kernels.attention import Part, Plane, attend, dequantise, quantise
from ctxreuse.kernels.threads import cores, spread

__all__ = ["run"]

_FORMATS = ("fp32", "fp16", "int8", "int4")
_LONG = 32_768
#: What int8 must reach over the longest context with one query, and what quantised arithmetic may cost.
_BARS = {"float32": 5.0, "bfloat16": 15.0}
_ERROR = 1e-3


class _Shape(NamedTuple):
    query_heads: int
    heads: int
    dim: int
    tokens: int
    queries: int

    def __str__(self) -> str:
        queries = "1 query" if self.queries == 1 else f"{self.queries} queries"
        return f"{self.query_heads}/{self.heads} x {self.dim}, {self.tokens // 1024}k, {queries}"


class _Layer:
    """K and V of a shape in every format, and torch's calls over them."""

    def __init__(self, shape: _Shape) -> None:
        import torch

        random = np.random.default_rng(shape.tokens)
        k, v = random.standard_normal((2, shape.heads, shape.tokens, shape.dim), np.float32)
        self.q = random.standard_normal((shape.query_heads, shape.queries, shape.dim), np.float32)
        self.parts = {name: Part(quantise(k, name), quantise(v, name)) for name in _FORMATS}
        self.torch: dict[str, Callable[[], Any]] = {
            name: self._call(*(torch.from_numpy(x)[None].to(getattr(torch, name)) for x in (self.q, k, v)))
            for name in _BARS
        }

    @staticmethod
    def _call(q: Any, k: Any, v: Any) -> Callable[[], Any]:
        from torch.nn.functional import scaled_dot_product_attention

        return partial(scaled_dot_product_attention, q, k, v, enable_gqa=True)

    def ours(self, threads: int | None) -> dict[str, Callable[[], object]]:
        return {name: partial(attend, self.q, [part], threads=threads) for name, part in self.parts.items()}

    def error(self, name: str) -> float:
        """Of one format against torch's float32 over the same values."""
        import torch

        part = self.parts[name]
        values = (torch.from_numpy(x)[None] for x in (self.q, dequantise(part.k), dequantise(part.v)))
        wanted: NDArray[np.float32] = self._call(*values)()[0].numpy()
        return float(np.abs(attend(self.q, [part]).o - wanted).max() / np.abs(wanted).max())


def _read(planes: list[NDArray[Any]]) -> None:
    """Reads arrays once, on all cores."""
    flat = [plane.reshape(-1).view(np.uint8) for plane in planes]

    def read(i: int) -> None:
        for data in flat:
            share = len(data) // cores()
            xxhash.xxh3_64_intdigest(data[i * share : (i + 1) * share].data)

    spread(read, cores())


def _arrays(*planes: Plane) -> list[NDArray[Any]]:
    return [x for plane in planes for x in (plane.data, plane.scales) if x is not None]


def run(options: Options) -> list[Figure]:
    """Milliseconds by shape and format, then int8's bars and the errors of quantised formats."""
    import torch

    threads = torch.get_num_threads()
    try:
        with torch.inference_mode():
            return _measured(options)
    finally:
        torch.set_num_threads(threads)


def _measured(options: Options) -> list[Figure]:
    import torch

    figures: list[Figure] = []
    lengths = options.pick((2_048,), (2_048, 8_192, _LONG))
    for heads in ((9, 3, 64), (32, 8, 128)):
        for tokens in lengths:
            for queries in (1, 32):
                shape = _Shape(*heads, tokens, queries)
                options.step(str(shape))
                layer = _Layer(shape)
                torch.set_num_threads(cores())
                figures += _times(options, shape, layer, first=not figures)
                if queries == 1 and tokens == lengths[-1]:
                    torch.set_num_threads(1)
                    figures += _bars(options, shape, layer)
    return figures


def _times(options: Options, shape: _Shape, layer: _Layer, *, first: bool) -> list[Figure]:
    parts = layer.parts if shape.queries == 1 else {}
    reads = {f"read {name}": partial(_read, _arrays(p.k, p.v)) for name, p in parts.items()}
    rounds = options.pick(3, 7 if shape.queries > 1 and shape.tokens == _LONG else 21)
    spent = paired({**layer.torch, **layer.ours(None), **reads}, rounds=rounds)
    return [
        Figure(
            metric=f"{name}, {shape}",
            value=spent[name] * 1e3,
            unit="ms",
            better="lower",
            baseline=spent["float32"] * 1e3,
            peer=spent["bfloat16"] * 1e3,
            bound=spent[f"read {name}"] * 1e3 if name in parts else None,
            note="baseline: torch float32; peer: torch bfloat16; bound: reading the planes" if first and not i else "",
        )
        for i, name in enumerate(_FORMATS)
    ]


def _bars(options: Options, shape: _Shape, layer: _Layer) -> list[Figure]:
    """Bars are those of the longest context; a quick run shows how shorter ones stand to them."""
    spent = processor_time({**layer.torch, "int8": layer.ours(1)["int8"]}, rounds=options.pick(3, 15))
    held = shape.tokens == _LONG
    ratios = [
        Figure(
            metric=f"int8 over torch {name}, one thread, {shape}",
            value=spent[name] / spent["int8"],
            unit="x",
            bar=bar if held else None,
        )
        for name, bar in _BARS.items()
    ]
    errors = [
        Figure(metric=f"{name} error, {shape}", value=layer.error(name), unit="of the peak", better="lower", bar=_ERROR)
        for name in ("int8", "int4")
    ]
    return ratios + errors
