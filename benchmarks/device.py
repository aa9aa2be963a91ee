"""Contexts of the torch engine on a GPU: restored from blocks instead of computed, and kept quantised while they wait.

A model of the shape of Llama 3.2 3B (28 layers, 24 / 8 heads of 128) with random weights in bfloat16: what is computed
and moved is measured, not what it says. Blocks lie in the host's memory; their planes are Gaussian with falling
spreads, coded at about 1.5 bits a value by the codec (rows of one block stand for those of all).

First token: of a question of 32 tokens behind 2k, 8k and 32k others. Baseline: computing all of them. Peer: the same
blocks raw. Bound: their bytes at the speed of this device's own copies from pinned memory. Quantised: a context's
memory against bfloat16's, and the time of one token with its rows read in place; baseline: bfloat16 rows by torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.cuda import one_layer_profile
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockView, BlockWriter, block_layout, parse
from ctxreuse.codec import Codec, CodecProfile, model_digest
from ctxreuse.cuda import open_device
from ctxreuse.engines.chunks import CompressedFormat
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["run"]

_LEVEL: Final = "kl-0.01"
_QUESTION, _BLOCK, _CHUNK = 32, 64, 2048
_FORMATS: Final[tuple[CompressedFormat, ...]] = ("int8", "int4")
_MOST: Final = 40_960


def run(options: Options) -> list[Figure]:
    """Figures of the current device; ConfigError, which says what is missing, without one."""
    open_device()
    lengths = options.pick((2_048,), (2_048, 8_192, 32_768))
    rounds = options.pick(2, 5)
    options.step("a model of random weights")
    bench = _Bench(_engine(options.pick(4, 28)))
    speed = _copy_speed()
    figures = [Figure(metric="copy from pinned memory", value=speed / 1e9, unit="GB/s")]
    for i, tokens in enumerate(lengths):
        options.step(f"contexts of {tokens} tokens", i, len(lengths))
        figures += bench.restored(tokens, speed, rounds)
    for i, tokens in enumerate(lengths):
        options.step(f"{tokens} quantised tokens", i, len(lengths))
        figures += bench.quantised(tokens, rounds)
    return figures


def _engine(layers: int) -> TorchEngine:
    import torch
    import transformers as hf

    if not torch.cuda.is_available():
        raise ConfigError("this torch is built without CUDA")
    config = hf.LlamaConfig(
        vocab_size=32_768, hidden_size=3072, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=_MOST, rope_theta=5e5,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = hf.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return TorchEngine(model.eval(), block_tokens=_BLOCK, chunk=_CHUNK)


def _copy_speed() -> float:
    """Bytes a second from pinned memory."""
    import torch

    source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return int(source.nbytes) / _seconds(lambda: target.copy_(source), 5)


def _seconds(call: Callable[[], object], rounds: int, after: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a call, the device's work included; once more before, and ``after`` each unmeasured."""
    import torch

    times = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn:
            times.append(time.perf_counter() - start)
        after()
    return statistics.median(times)


class _Bench:
    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.space = engine, engine.space
        engine.codec = Codec(self.space, ("0" * 64, _profile(self.space)))
        random = np.random.default_rng(0)
        self.ids: Tokens = random.integers(1, self.space.vocab_size, _MOST).astype(np.int32)
        self.raw = _raw_block(self.space, self.ids[:_BLOCK])
        self.coded = bytes(engine.codec.encode(parse(self.raw), _LEVEL))

    def blocks(self, data: bytes, tokens: int) -> list[BlockView]:
        """Blocks of all positions, each of the same planes."""
        return [_at(data, self.ids, start) for start in range(0, tokens, _BLOCK)]

    def restored(self, tokens: int, speed: float, rounds: int) -> list[Figure]:
        """The first token behind ``tokens`` that are computed, loaded raw, and loaded coded."""
        engine, question = self.engine, self.ids[tokens : tokens + _QUESTION]
        context: Any = engine.new_context(tokens + _QUESTION)

        def back() -> None:
            engine.crop(context, 0)

        def loaded(views: Sequence[BlockView]) -> Callable[[], None]:
            def call() -> None:
                engine.load(context, views)
                engine.prefill(context, question)

            return call

        computed = _seconds(lambda: engine.prefill(context, self.ids[: tokens + _QUESTION]), min(rounds, 2), back)
        raw = _seconds(loaded(self.blocks(self.raw, tokens)), rounds, back)
        coded = _seconds(loaded(self.blocks(self.coded, tokens)), rounds, back)
        whole = tokens * self.space.token_nbytes
        share = len(self.coded) / len(self.raw)
        note = f"{16 * share:.2f} bits a value; baseline: computed; peer: loaded raw"
        return [
            Figure(
                metric=f"first token behind {tokens // 1024}k, loaded raw", value=raw * 1e3, unit="ms", better="lower",
                baseline=computed * 1e3, bound=whole / speed * 1e3,
            ),
            Figure(
                metric=f"first token behind {tokens // 1024}k, loaded coded", value=coded * 1e3, unit="ms",
                better="lower", baseline=computed * 1e3, peer=raw * 1e3, bound=whole * share / speed * 1e3, note=note,
            ),
        ]  # fmt: skip

    def quantised(self, tokens: int, rounds: int) -> list[Figure]:
        """Memory and the time of a token, of contexts that are kept as they were computed and quantised."""
        engine, spent, size = self.engine, dict[str, float](), dict[str, int]()
        views, figures = self.blocks(self.coded, tokens), list[Figure]()
        for format in (None, *_FORMATS):
            name, context = format or "bfloat16", engine.new_context(tokens + 16 * rounds + _QUESTION)
            engine.load(context, views).wait()
            if format is not None:
                started = time.perf_counter()
                engine.chunks.compress(context, format, "approx~kl-0.05")
                figures.append(
                    Figure(
                        metric=f"{tokens // 1024}k tokens to {format}", value=(time.perf_counter() - started) * 1e3,
                        unit="ms", better="lower",
                    )
                )  # fmt: skip
            size[name] = context.nbytes if format else tokens * self.space.token_nbytes
            one_token = partial(engine.prefill, context, self.ids[:1])
            one_token()
            spent[name] = _seconds(one_token, 5 * rounds)
            del context, one_token
        for format in _FORMATS:
            figures += [
                Figure(
                    metric=f"contexts of {tokens // 1024}k in {format} for one in bfloat16",
                    value=size["bfloat16"] / size[format], unit="x",
                ),
                Figure(
                    metric=f"a token behind {tokens // 1024}k in {format}", value=spent[format] * 1e3, unit="ms",
                    better="lower", baseline=spent["bfloat16"] * 1e3,
                ),
            ]  # fmt: skip
        return figures


def _profile(space: ModelSpace) -> CodecProfile:
    """The one-layer profile, for every layer of the space."""
    one = one_layer_profile()
    planes = tuple(
        msgspec.structs.replace(plane, layer=layer) for layer in range(len(space.layers)) for plane in one.planes
    )
    (level,) = one.levels
    codings = level.codings * len(space.layers)
    return CodecProfile(
        model_digest(space), one.ropes, planes, one.tables, (msgspec.structs.replace(level, codings=codings),)
    )


def _raw_block(space: ModelSpace, ids: Tokens) -> bytes:
    """A block of the first tokens whose vectors have the profile's statistics."""
    import torch

    writer = BlockWriter(
        block_layout(space), kind="block", space=space.digest, key=_key(0), parent=ROOT, end=_BLOCK, tokens=ids,
        rope_at=0,
    )  # fmt: skip
    random, group = np.random.default_rng(2), one_layer_profile().planes[0].groups[0]
    spread = 3 * 0.965 ** np.arange(len(group.forward))
    for plane in writer.layout.planes:
        heads, tokens, dim = plane.shape
        pairs = heads * dim // len(group.mean)
        y = random.standard_normal((pairs, tokens, len(spread))) * spread
        x = (y @ group.forward + group.mean).reshape(pairs, tokens, -1, dim).transpose(0, 2, 1, 3)
        rows = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16)
        writer.plane(plane.layer, plane.role)[:] = rows.view(torch.uint8).numpy().reshape(-1)
    return bytes(writer.seal())


def _key(start: int) -> bytes:
    return (start + 1).to_bytes(32, "little")


def _at(data: bytes, ids: Tokens, start: int) -> BlockView:
    """The block at another position."""
    view = parse(data)
    head = view.header
    writer = BlockWriter(
        view.layout, kind="block", space=head.space, key=_key(start), parent=_key(start - _BLOCK) if start else ROOT,
        end=start + _BLOCK, tokens=ids[start : start + _BLOCK], level=head.level, rope_at=start,
    )  # fmt: skip
    for plane in view.layout.planes:
        writer.plane(plane.layer, plane.role)[:] = np.frombuffer(view.plane(plane.layer, plane.role), np.uint8)
    return parse(writer.seal())
