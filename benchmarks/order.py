"""Time to first token of 200 fetches over one shared link, by the order in which bytes are sent (simulation).

A simulation: the clock is virtual and the link an ideal pipe, but scheduler (`SendScheduler`), wire format and
receiving side (`FetchBuffer`) are the ones that run on real links, moving real blocks. What is modelled:

- **Link**: 10 Gbit/s out of one cloud, shared by all; no other delay.
- **Contexts**: 64 to 16,384 tokens, log-normal (median 2,048, sigma 1, so the mean is about 3,300), 128 KiB of K and V
  a token over 32 layers, as an 8-billion-parameter model with grouped heads has. Fetched in layer order.
- **Compute**: every receiver has its own accelerator and runs 512 new tokens through a layer in 6 ms, as soon as that
  layer is whole and the layer before is done. Time to first token is from the request to the end of the last layer.
- **Arrivals**: Poisson, at a rate that keeps the link busy for 0.5, 0.7 and 0.85 of the time.

The baseline is the same link serving one fetch after another, in layer order as well, so what is compared is the order
between fetches alone; fetches that are computed with only when they are whole come to more (noted). The bound is each
fetch alone on the link. To run in seconds, all bytes and the bandwidth are divided by 64.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import BlockWriter, block_layout, parse
from ctxreuse.bus.protocol.base import BlockSource
from ctxreuse.bus.protocol.messages import Payload
from ctxreuse.bus.protocol.wire import decode
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer, part_offsets
from ctxreuse.bus.transfer.send import SendPlan, SendScheduler, SendTransfer
from ctxreuse.errors import LinkError
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.identity.model import LayerSpec, ModelSpace

__all__ = ["run"]

_LAYERS, _BLOCK, _FETCHES, _SCALE = 32, 64, 200, 64
_LAYER_SECONDS = 0.006
_BANDWIDTH = 10e9 / 8 / _SCALE
#: Of 4 MiB before scaling: how finely fetches share the link.
_PAYLOAD = (4 << 20) // _SCALE
_LOADS = {0.5: 0.20, 0.7: 0.30, 0.85: 0.40}
_MOST_BLOCKS = 256


class _Held(BlockSource):
    """Blocks of one long context; a fetch is of its beginning."""

    def __init__(self) -> None:
        spec = LayerSpec("full", kv_heads=1, k_dim=8, v_dim=8)
        self.space = ModelSpace("0" * 64, "bench", "0" * 64, "float32", (spec,) * _LAYERS, "{}", 1, 1 << 20, _BLOCK)
        self.tokens = np.zeros(_MOST_BLOCKS * _BLOCK, "<i4")
        self.keys = prefix_keys(self.space.digest, bytes(16), self.tokens, _BLOCK)
        self.blocks = []
        for i, (parent, key) in enumerate(pairwise([ROOT, *self.keys])):
            writer = BlockWriter(
                block_layout(self.space),
                kind="block",
                space=self.space.digest,
                key=key,
                parent=parent,
                end=(i + 1) * _BLOCK,
                tokens=self.tokens[:_BLOCK],
            )
            self.blocks.append(writer.seal().data.toreadonly())
        self.offsets, self.count = part_offsets(parse(self.blocks[0])), len(self.blocks)

    def parts(self, item: int) -> tuple[int, ...]:
        return self.offsets

    def read(self, item: int, start: int, stop: int) -> memoryview:
        return self.blocks[item][start:stop]


class _Receiver:
    """One edge: notes when each layer became whole, and computes."""

    def __init__(self, held: _Held, blocks: int, asked: float) -> None:
        self.buffer = FetchBuffer(FetchRequest(held.space, held.tokens[: blocks * _BLOCK]), held.keys[:blocks])
        self.asked, self._computed, self._layer = asked, asked, 0

    def receive(self, frames: list[bytes | bytearray | memoryview], now: float) -> None:
        message, payload = decode(frames)
        assert isinstance(message, Payload)
        assert payload is not None
        self.buffer.write(message.pieces, payload)
        while self._layer < _LAYERS:
            try:
                self.buffer.wait_layer(self._layer, 0)
            except LinkError:
                return
            self._computed = max(self._computed, now) + _LAYER_SECONDS
            self._layer += 1

    @property
    def ttft(self) -> float:
        assert self.buffer.ended == ""
        return self._computed - self.asked


def _scheduled(held: _Held, sizes: list[int], arrivals: list[float]) -> float:
    """Mean time to first token with our scheduler."""
    scheduler, now, waiting = SendScheduler(), 0.0, list(zip(arrivals, sizes))
    heapq.heapify(waiting)
    receivers: list[_Receiver] = []
    while waiting or len(scheduler):
        if not len(scheduler):
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            asked, blocks = heapq.heappop(waiting)
            receivers.append(_Receiver(held, blocks, asked))
            plan = SendPlan(held, "layers", _PAYLOAD, items=range(blocks))
            transfer = SendTransfer(receivers[-1], 1, 1, plan, credit=1 << 30)
            scheduler.add(transfer)
        receiver = scheduler.turn()
        assert isinstance(receiver, _Receiver)
        best = scheduler.pick(receiver)
        assert best is not None
        frames = best.take()
        assert frames is not None
        scheduler.served(best)
        now += len(frames[1]) / _BANDWIDTH
        receiver.receive(frames, now)
    return sum(receiver.ttft for receiver in receivers) / len(receivers)


def _alone(held: _Held, blocks: int) -> tuple[float, float]:
    """Seconds of one fetch with the link to itself: on the link, and to the first token."""
    computed = 0.0
    for layer in range(_LAYERS):
        computed = max(computed, blocks * held.offsets[layer + 2] / _BANDWIDTH) + _LAYER_SECONDS
    return blocks * held.offsets[-1] / _BANDWIDTH, computed


def _in_turn(held: _Held, sizes: list[int], arrivals: list[float]) -> tuple[float, float]:
    """Mean time to first token one fetch after another: in layer order, and computing only when all is here."""
    free, layered, whole = 0.0, 0.0, 0.0
    for asked, blocks in zip(arrivals, sizes):
        start = max(free, asked)
        link, first = _alone(held, blocks)
        free = start + link
        layered += start + first - asked
        whole += free + _LAYERS * _LAYER_SECONDS - asked
    return layered / len(sizes), whole / len(sizes)


def run(options: Options) -> list[Figure]:
    """Mean seconds over seeds; the bars say how far under the baseline they must be."""
    held = _Held()
    figures = []
    seeds = options.pick(2, 6)
    for load, under in _LOADS.items():
        rows = []
        for seed in range(seeds):
            options.step(f"load {load}, seed {seed + 1} of {seeds}")
            rng = np.random.default_rng([seed, round(load * 100)])
            tokens = np.clip(rng.lognormal(np.log(2048), 1.0, _FETCHES), _BLOCK, _MOST_BLOCKS * _BLOCK)
            sizes = [int(n) // _BLOCK for n in tokens]
            alone = np.array([_alone(held, blocks) for blocks in sizes])
            gap = alone[:, 0].mean() / load
            arrivals = np.cumsum(rng.exponential(gap, _FETCHES)).tolist()
            rows.append((_scheduled(held, sizes, arrivals), *_in_turn(held, sizes, arrivals), alone[:, 1].mean()))
        ours, fifo, whole, bound = np.mean(rows, axis=0).tolist()
        note = f"mean of {seeds} x {_FETCHES} fetches; baseline: one after another; computing when whole: {whole:.3g} s"
        name = f"{round(load * 100)}"
        figures.append(
            Figure(
                metric=f"ttft_load_{name}", value=ours, unit="s", baseline=fifo, bound=bound, better="lower", note=note
            )
        )
        note = "how far the mean is under that of one fetch after another"
        figures.append(Figure(metric=f"saved_load_{name}", value=1 - ours / fifo, unit="share", bar=under, note=note))
    return figures
