"""One token's attention over quantised chunks on a device: against reading the bytes, torch and Triton.

32 query heads of 128 over 32, 8 and 4 K and V heads, 4k to 128k tokens. Microseconds of device time: many calls are
recorded into one CUDA graph, over as many copies of the data as exceed the device's cache several times, so that every
byte comes from memory and no launch is waited for. Bound: codes and scales at the speed of this device's own copy. Bar:
70 % of that speed from 32k tokens on. Baseline: torch's scaled_dot_product_attention in bfloat16; peer: flash decoding
in Triton over the same int8 rows (for int4, which it has not: over bfloat16), the best of three settings. Before it is
timed, each case is compared with the CPU's kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np

from ctxreuse.bench.report import Figure
from ctxreuse.cuda import Launcher
from ctxreuse.cuda.attention import ChunkAttention, DevicePart, plane_on
from ctxreuse.cuda.copies import on_host
from ctxreuse.kernels.attention import Part, Plane, attend, quantise

__all__ = ["Case", "measure"]

_HEADS, _DIM, _FAR = 32, 128, 32_768
_SHARE: Final = 0.7
_CALLS: Final = 24
_SETTINGS: Final = ((64, 4), (128, 4), (128, 8))
Call = Callable[[], object]


class Case(NamedTuple):
    """A shape to measure: ``group`` query heads share a K and V head."""

    tokens: int
    group: int
    format: str


def measure(launcher: Launcher, cases: Sequence[Case], speed: float, *, cache: int, rounds: int) -> list[Figure]:
    """Figures in microseconds. ``speed``: bytes a second that the device reads or writes; ``cache``: its bytes."""
    return [_figure(launcher, case, speed, cache, rounds) for case in cases]


def _figure(launcher: Launcher, case: Case, speed: float, cache: int, rounds: int) -> Figure:
    xp, random = launcher.xp, np.random.default_rng(case.tokens)
    heads = _HEADS // case.group
    # A thousand rows, again and again: the host need not make what only must be read.
    some = min(case.tokens, 1000)
    rows = [quantise(random.standard_normal((heads, some, _DIM), np.float32), case.format) for _ in range(2)]
    k, v = (_repeated(plane, case.tokens) for plane in rows)
    q = random.standard_normal((_HEADS, 1, _DIM), np.float32)
    asked = xp.asarray(q)
    copies = max(1, -(-4 * cache // (k.nbytes + v.nbytes)))
    parts = [DevicePart(plane_on(launcher, k), plane_on(launcher, v)) for _ in range(copies)]
    layouts = [ChunkAttention(launcher, [part], q.shape) for part in parts]
    rooms = [layout.room() for layout in layouts]
    got, want = layouts[0](asked), attend(q, [Part(k, v)])
    assert np.abs(on_host(got.o) - want.o).max() <= 1e-3 * np.abs(want.o).max()
    calls: list[Call] = [_call(layout, asked, room) for layout, room in zip(layouts, rooms, strict=True)]
    spent = _device_time(launcher, calls, rounds)
    baseline, peer, said = _rivals(launcher, case, parts, cache, rounds)
    bound = (k.nbytes + v.nbytes) / speed
    return Figure(
        metric=f"{case.format} attention, {_HEADS}/{heads} x {_DIM}, {case.tokens // 1024}k",
        value=spent * 1e6,
        unit="us",
        better="lower",
        baseline=baseline,
        peer=peer,
        bound=bound * 1e6,
        bar=bound * 1e6 / _SHARE if case.tokens >= _FAR else None,
        note=said,
    )


def _repeated(plane: Plane, tokens: int) -> Plane:
    at = np.arange(tokens) % plane.tokens
    scales = None if plane.scales is None else plane.scales.take(at, -1)
    return Plane(plane.format, plane.data.take(at, 1), scales)


def _call(layout: ChunkAttention, q: Any, room: Any) -> Call:
    return lambda: layout(q, room)


def _device_time(launcher: Launcher, calls: Sequence[Call], rounds: int) -> float:
    """Seconds of one call; where the device is no GPU, on this processor."""
    order = [calls[i % len(calls)] for i in range(max(_CALLS, len(calls)))]
    times: list[float] = []
    if launcher.xp is np:
        for _ in range(rounds):
            start = time.perf_counter()
            calls[0]()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in order:
            call()
        graph = stream.end_capture()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        for turn in range(rounds + 1):
            first.record(stream)
            graph.launch(stream)
            last.record(stream)
            last.synchronize()
            if turn:
                times.append(cupy.cuda.get_elapsed_time(first, last) / 1e3 / len(order))
    return statistics.median(times)


def _rivals(
    launcher: Launcher, case: Case, parts: Sequence[DevicePart], cache: int, rounds: int
) -> tuple[float | None, float | None, str]:
    """Microseconds of torch and of Triton, and what is missing or compared."""
    if launcher.xp is np or find_spec("torch") is None:
        return None, None, "torch is not installed, or the device is no GPU"
    import torch

    if not torch.cuda.is_available():
        return None, None, "this torch is built without CUDA"
    heads = _HEADS // case.group
    copies = max(1, -(-4 * cache // (4 * heads * case.tokens * _DIM)))
    shape, wide = (1, heads, case.tokens, _DIM), {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn((1, _HEADS, 1, _DIM), **wide)
    planes = [(torch.randn(shape, **wide), torch.randn(shape, **wide)) for _ in range(copies)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def plain(k: Any, v: Any) -> Call:
        return lambda: attention(q, k, v, enable_gqa=True)

    baseline = _torch_time([plain(k, v) for k, v in planes], rounds)
    if find_spec("triton") is None:
        return baseline, None, "baseline: torch bf16; Triton is not installed"
    from benchmarks.triton_decode import decode

    given: list[tuple[Any, Any, Any, Any]] = [(q[0, :, 0], k[0], v[0], None) for k, v in planes]
    if case.format == "int8":
        there = [[torch.from_dlpack(x) for x in (p.k.data, p.v.data, p.k.scales, p.v.scales)] for p in parts]
        given = [(q[0, :, 0].half(), k, v, (a, b)) for k, v, a, b in there]
    best = min(
        _torch_time([decode(*of, launcher.multiprocessors, block=block, warps=warps) for of in given], rounds)
        for block, warps in _SETTINGS
    )
    return baseline, best, f"baseline: torch bf16; peer: Triton {'int8' if case.format == 'int8' else 'bf16'}"


def _torch_time(calls: Sequence[Call], rounds: int) -> float:
    """Microseconds of one call."""
    import torch

    order = [calls[i % len(calls)] for i in range(max(_CALLS, len(calls)))]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in order:
            call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for turn in range(rounds + 1):
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        if turn:
            times.append(first.elapsed_time(last) * 1e3 / len(order))
    return statistics.median(times)
