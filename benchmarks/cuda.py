"""The CUDA kernels against what must move through memory, and cuBLAS.

Bound: the bytes that a kernel must read and write, at the speed of this device's own copy. Baseline of decoding: the
same linear map as CuPy does it (cuBLAS in fp32, then elementwise passes) from integers that are decoded already.

Data: keys and values of a layer of an 8B model, 8 heads of 128 in groups of two, Gaussian with falling spreads; about
90 of 256 components are coded. Before anything is timed, the first streams are compared with the CPU's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks import cuda_attend
from ctxreuse.bench.measure import Options, paired
from ctxreuse.bench.report import Figure
from ctxreuse.codec import ChannelGroup, CodecProfile, Coding, LevelInfo, PlaneProfile, ProfileLevel
from ctxreuse.cuda import (
    CodedPlane,
    Decoding,
    DeviceProfile,
    Launcher,
    PagedPlane,
    Pages,
    encode_planes,
    open_device,
)
from ctxreuse.rope import Rotary

__all__ = ["measure", "one_layer_profile", "run"]

_HEADS, _DIM, _PAIR, _PAGE = 8, 128, 2, 16
_LEVEL: Final = "kl-0.01"
_STEP: Final = 0.8
_CACHE: Final = 64 << 20  # bytes; the second cache of no device up to Hopper is larger


def run(options: Options) -> list[Figure]:
    """Figures of the current device; ConfigError, which says what is missing, without one."""
    launcher = open_device()
    options.step("CUDA")
    tokens = options.pick(4_096, 32_768)
    figures = measure(launcher, tokens=tokens, copied=options.pick(1 << 28, 1 << 30), rounds=9)
    lengths = options.pick((4_096, 32_768), (4_096, 16_384, 32_768, 131_072))
    cases = [cuda_attend.Case(n, group, kind) for kind in ("int8", "int4") for group in (1, 4, 8) for n in lengths]
    for i, case in enumerate(cases):
        options.step(f"{case.format} attention, {case.tokens} tokens", i, len(cases))
        figures += cuda_attend.measure(launcher, [case], figures[0].value * 1e9, cache=_CACHE, rounds=9)
    return figures


def measure(launcher: Launcher, *, tokens: int, copied: int, rounds: int) -> list[Figure]:
    """Figures in 10^9 bytes of 16-bit K and V a second; medians of paired rounds."""
    speed = _copy_speed(launcher, copied, rounds)
    figures = [Figure(metric="copy, read and written", value=speed / 1e9, unit="GB/s")]
    return figures + _planes(launcher, tokens, speed, rounds)


def _copy_speed(launcher: Launcher, size: int, rounds: int) -> float:
    """Bytes read and written in a second."""
    source, target = launcher.xp.ones(size, np.uint8), launcher.xp.empty(size, np.uint8)

    def copy() -> None:
        target[:] = source
        int(target[0])  # waits

    return 2 * size / paired({"copy": copy}, rounds=rounds)["copy"]


def _tables() -> npt.NDArray[np.uint8]:
    rows = []
    for sigma in (0.25, 0.5, 1, 2, 4, 8):
        weight = np.exp(-(((np.arange(31) - 15) / sigma) ** 2) / 2)
        row = np.append(np.floor(weight / weight.sum() * 220), 1).astype(int)
        row[15] += 256 - row.sum()
        rows.append(row)
    return np.array(rows, np.uint8)


def one_layer_profile() -> CodecProfile:
    """A profile of one layer; the transform is random but orthogonal, the spreads fall from 3 to 0.0003."""
    channels, random = _PAIR * _DIM, np.random.default_rng(1)
    turn = np.linalg.qr(random.normal(size=(channels, channels)))[0]
    spread = 3 * 0.965 ** np.arange(channels)
    active = int((spread > _STEP / 6).sum())
    table = np.abs(np.log2(spread[:active] / _STEP)[:, None] - np.arange(-2, 4)).argmin(1).astype(np.uint8)
    coding = Coding(table, np.zeros(active, np.uint8), np.zeros(0, np.uint8))
    group = {
        "log_rms": float(np.log2(np.sqrt((spread**2).mean()))),
        "mean": random.normal(size=channels).astype(np.float32),
        "gain": np.full(channels, 1 / 8191, np.float32),
        "forward": turn[:active].astype(np.float32),
        "basis": np.rint(turn[:active] * 8191).astype(np.int16),
    }
    groups = tuple(ChannelGroup(first, _PAIR, **group) for first in range(0, _HEADS, _PAIR))
    planes = (PlaneProfile(0, "k", _HEADS, _DIM, 0, groups), PlaneProfile(0, "v", _HEADS, _DIM, -1, groups))
    rope = Rotary("half", tuple(5e5 ** (-i / (_DIM // 2)) for i in range(_DIM // 2)))
    level = ProfileLevel(LevelInfo(_LEVEL, True, 2.0, 0.01), _STEP, (coding,) * (2 * len(groups)))
    return CodecProfile(b"", (rope,), planes, _tables(), (level,), version=2)


def _filled(launcher: Launcher, card: CodecProfile, plane: PlaneProfile, tokens: int) -> Pages:
    """fp16 pages whose vectors have the card's statistics (keys as if they stood at no angle)."""
    xp, random = launcher.xp, np.random.default_rng(2)
    memory = xp.empty((-(-tokens // _PAGE), _HEADS, _PAGE, _DIM), np.float16)
    group, spread = plane.groups[0], 3 * 0.965 ** np.arange(len(plane.groups[0].forward))
    forward, mean = xp.asarray(group.forward), xp.asarray(group.mean)
    for page in range(0, len(memory), 256):
        count = min(256, len(memory) - page)
        for head in range(0, _HEADS, _PAIR):
            y = xp.asarray((random.standard_normal((count * _PAGE, len(spread))) * spread).astype(np.float32))
            x = (y @ forward + mean).astype(np.float16).reshape(count, _PAGE, _PAIR, _DIM)
            memory[page : page + count, head : head + _PAIR] = x.transpose(0, 2, 1, 3)
    return Pages(memory, "float16", xp.arange(len(memory), dtype=np.int32))


def _planes(launcher: Launcher, tokens: int, speed: float, rounds: int) -> list[Figure]:
    xp, card = launcher.xp, one_layer_profile()
    device = DeviceProfile(launcher, card, _LEVEL, "float16")
    filled = [_filled(launcher, card, plane, tokens) for plane in card.planes]
    sources = [PagedPlane(p.layer, p.role, pages, tokens) for p, pages in zip(card.planes, filled, strict=True)]
    streams = encode_planes(device, sources)
    again = [Pages(xp.empty_like(pages.memory), "float16", pages.table) for pages in filled]
    coded = [CodedPlane(p.layer, p.role, data, to) for p, data, to in zip(card.planes, streams, again, strict=True)]
    decoding = Decoding(device, coded)
    values = 2 * tokens * _HEADS * _DIM
    bits = 8 * sum(data.size for data in streams) / values

    def decode() -> None:
        decoding.launch()
        decoding.finish()

    active, groups = len(card.levels[0].codings[0].table), len(card.planes[0].groups)
    group = card.planes[0].groups[0]
    q = xp.zeros((tokens, active), np.int8)
    scale, gain = xp.ones((tokens, 1), np.float32), xp.asarray(group.gain * np.float32(_STEP))
    basis, mean = xp.asarray(group.basis.astype(np.float32)), xp.asarray(group.mean)

    def plain() -> None:
        for _ in range(2 * groups):
            out = ((q.astype(np.float32) @ basis) * gain * scale + mean).astype(np.float16)
        float(out[0, 0])  # waits

    spent = paired({"decode": decode, "plain": plain, "encode": lambda: encode_planes(device, sources)}, rounds=rounds)
    size = 2 * values / 1e9
    floor = speed / 1e9 * 2 / (2 + bits / 8)
    return [
        Figure(
            metric="coded planes to pages",
            value=size / spent["decode"],
            unit="GB/s",
            baseline=size / spent["plain"],
            bound=floor,
            note=f"{bits:.2f} bits a value; baseline: cuBLAS and elementwise, without the entropy coder",
        ),
        Figure(
            metric="pages to coded planes",
            value=size / spent["encode"],
            unit="GB/s",
            bound=floor,
            note="with the copy of the streams to the host",
        ),
    ]
