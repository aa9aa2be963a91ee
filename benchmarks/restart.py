"""First tokens of agents whose server was killed and started again, against llama.cpp's own with the same GGUF.

Each agent has had two turns as in ``agents_http``; three seconds later the server gets SIGKILL, and when another one is
ready all of them ask at once. The peer keeps slots in memory only. The median of three runs with prompts of their own.
``--model``: a GGUF file, or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.agents_http import SLOT_TOKENS, Daemon, made, talk
from benchmarks.children import Child
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_COUNTS, _RUNS = (4,), 3
#: Share of the peer's seconds that is the bar.
_BAR = 0.07


def run(options: Options) -> list[Figure]:
    """Fresh servers and prompts for each number of agents and each run."""
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    threads, counts, runs = os.cpu_count() or 1, options.pick((2,), _COUNTS), options.pick(1, _RUNS)
    figures: list[Figure] = []
    for step, count in enumerate(counts):
        pairs: list[tuple[float, float]] = []
        for number in range(runs):
            options.step(f"{count} agents", step * runs + number, len(counts) * runs)
            pairs.append(_restarted(path, threads, count, 90 + 10 * step + number))
        ours, theirs = (statistics.median(values) for values in zip(*pairs))
        figures.append(
            Figure(
                metric=f"{count} agents",
                value=ours,
                unit="s",
                peer=theirs,
                better="lower",
                bar=_BAR * theirs,
                note="mean first token of the next turn of each, all at once; of each run, ours and the peer's: "
                + ", ".join(f"{one:.2f} and {other:.1f}" for one, other in pairs),
            )
        )
    return figures


def _restarted(path: Path, threads: int, count: int, seed: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        agents, store = made(count, seed), Path(folder) / "store"
        daemon = Daemon(str(path), store, threads)
        asyncio.run(talk(daemon.url, agents, 2))
        time.sleep(3)  # pauses are longer than that; KV is written in them
        daemon.kill()
        daemon = Daemon(str(path), store, threads)
        ours = asyncio.run(talk(daemon.url, agents, 1))
        daemon.close()
    agents = made(count, seed)
    for turns in (2, 1):
        with Child("benchmarks.llama_server", path, threads, count, SLOT_TOKENS) as peer:
            theirs = asyncio.run(talk(peer.said, agents, turns))
    return statistics.mean(ours.starts()), statistics.mean(theirs.starts())
