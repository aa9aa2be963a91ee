"""Blocks served on twelve shapes of made-up traffic or real traces: the adaptive policy against the best single one.

A simulation on a virtual clock through the policy objects that the store runs. The shapes are hard for one policy or
another; nobody has such traffic, they are what a policy that was chosen on one trace may meet elsewhere. Seeded, blocks
of 64 tokens. With CTXREUSE_TRACES set to a folder of traces, those of it instead: a chat service, coding agents'
sessions, and the calls of a team of agents (prompts as text, of which 256 characters stand for a block).

The baseline is LRU, the peer the best of the adaptive policy's experts alone at that size, the bound a cache without
end. The bar: at most one point below that policy, everywhere. The constants of the adaptive policy were chosen while
seeing these rows; what the shapes give with other seeds was not looked at for that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TypeAlias

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab.generate import generate
from ctxreuse.lab.lines import read_lines
from ctxreuse.lab.mooncake import mooncake
from ctxreuse.lab.packed import Packed, pack
from ctxreuse.lab.replay import serve
from ctxreuse.lab.sessions import agent_sessions
from ctxreuse.lab.trace import Request, Trace
from ctxreuse.store.policy import DEFAULT_EXPERTS, make_policy
from ctxreuse.store.policy.native import NATIVE, NativeShadow

__all__ = ["SHAPES", "agent_team", "run", "shape"]

_TOKENS = 64
#: Points of block hits that the adaptive policy may be below the best single one.
_BEHIND = 1.0
#: Seeds of the shapes that its constants were not chosen on.
_OTHER_SEEDS = (3, 4)
#: Requests and capacities in blocks of the kinds of `ctxreuse.lab.generate`.
_GENERATED: dict[str, tuple[int, tuple[int, ...]]] = {
    "chat": (6_000, (1_562, 4_687, 15_625)),
    "documents": (6_000, (15_625, 46_875)),
    "agents": (1_000, (8_000, 15_000, 60_000)),
}
_CHAT_SERVICE = (976, 1_953, 5_078, 9_960, 19_921)
#: Sessions and capacities.
_CODING_AGENTS = (20, (2_500, 5_000, 7_500))
_AGENT_TEAM = (100, 200, 400)
#: Characters of a block of the last.
_CHARACTERS = 256
Prompts: TypeAlias = Iterator[Sequence[int]]


class _Ids:
    """Numbers for blocks: a document's blocks are consecutive, a fresh tail's too."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, blocks: int) -> range:
        first, self._next = self._next, self._next + blocks
        return range(first, self._next)


def _zipf(rng: np.random.Generator, many: int, exponent: float, draws: int) -> list[int]:
    weights = 1.0 / np.arange(1, many + 1) ** exponent
    found: list[int] = rng.choice(many, draws, p=weights / weights.sum()).tolist()
    return found


def _loop(rng: np.random.Generator) -> Prompts:
    """2,200 documents of 4 blocks, read in the same order again and again."""
    ids = _Ids()
    documents = [ids.take(4) for _ in range(2_200)]
    for _ in range(9):
        yield from documents


def _hot_and_scan(rng: np.random.Generator) -> Prompts:
    """Half of the prompts are of 4,000 documents by a Zipf law, half are new and never come again."""
    ids = _Ids()
    hot = [ids.take(4) for _ in range(4_000)]
    for chosen, old in zip(_zipf(rng, len(hot), 0.8, 20_000), rng.random(20_000) < 0.5):
        yield hot[chosen] if old else ids.take(4)


def _shift(rng: np.random.Generator) -> Prompts:
    """A working set of 300 documents of which one is replaced every eight prompts."""
    ids = _Ids()
    current = [ids.take(4) for _ in range(300)]
    for number, chosen in enumerate(_zipf(rng, 300, 0.9, 20_000)):
        if number % 8 == 0:
            current[int(rng.integers(300))] = ids.take(4)
        yield current[chosen]


def _alternate(rng: np.random.Generator) -> Prompts:
    """Phases of 1,500 prompts: a loop over 2,000 documents, then fresh conversations that grow."""
    ids = _Ids()
    loop = [ids.take(4) for _ in range(2_000)]
    at = 0
    for phase in range(12):
        if phase % 2 == 0:
            for _ in range(1_500):
                yield loop[at % len(loop)]
                at += 1
        else:
            open_ones: list[list[int]] = []
            for _ in range(1_500):
                if len(open_ones) < 100 or rng.random() < 0.2:
                    open_ones = [*open_ones[-99:], list(ids.take(2))]
                chosen = open_ones[int(rng.integers(len(open_ones)))]
                chosen.extend(ids.take(1))
                yield list(chosen)


def _tree(rng: np.random.Generator) -> Prompts:
    """40 trunks, each with 50 branches by a Zipf law, and a tail that never comes again."""
    ids = _Ids()
    trunks = [ids.take(6) for _ in range(40)]
    branches = {(i, j): ids.take(4) for i in range(40) for j in range(50)}
    for i, j in zip(_zipf(rng, 40, 0.7, 16_000), _zipf(rng, 50, 0.9, 16_000)):
        yield [*trunks[i], *branches[i, j], *ids.take(4)]


def _zipfian(rng: np.random.Generator) -> Prompts:
    """32,000 documents of one block by a Zipf law of .9."""
    for chosen in _zipf(rng, 32_000, 0.9, 90_000):
        yield (chosen,)


def _short(rng: np.random.Generator) -> Prompts:
    """300 short conversations behind one system prompt, 25 at a time, a turn or a few each."""
    ids = _Ids()
    system = ids.take(2)
    talks: list[list[int]] = [[*system] for _ in range(25)]
    for _ in range(500):
        chosen = int(rng.integers(len(talks)))
        talks[chosen] = [*talks[chosen], *ids.take(int(rng.integers(5, 40)))]
        yield talks[chosen]
        if rng.random() < 0.6:
            talks[chosen] = [*system]


def _grow(rng: np.random.Generator) -> Prompts:
    """120 conversations that grow by turns in random order, one replaced every tenth prompt."""
    ids = _Ids()
    talks = [list(ids.take(8)) for _ in range(120)]
    for number in range(12_000):
        chosen = int(rng.integers(120))
        if number % 10 == 0:
            talks[chosen] = list(ids.take(8))
        talks[chosen] = [*talks[chosen], *ids.take(2)]
        yield talks[chosen]


def _return(rng: np.random.Generator) -> Prompts:
    """Conversations that pause: half come back soon, half after about 600 prompts of others."""
    ids = _Ids()
    waiting: list[tuple[float, list[int]]] = []
    for number in range(12_000):
        due = [one for one in waiting if one[0] <= number]
        if due:
            one = min(due, key=lambda pair: pair[0])
            waiting.remove(one)
            path = one[1]
        else:
            path = list(ids.take(10))
        path = [*path, *ids.take(2)]
        if rng.random() < 0.85:
            waiting.append((number + (5 if rng.random() < 0.5 else rng.normal(600, 60)), path))
        yield path


SHAPES: dict[str, tuple[Callable[[np.random.Generator], Prompts], tuple[int, ...]]] = {
    "loop": (_loop, (2_000, 6_000, 8_000)),
    "hot and scan": (_hot_and_scan, (800, 2_400, 8_000)),
    "shifting set": (_shift, (400, 800, 2_400)),
    "alternating phases": (_alternate, (400, 2_000, 6_000, 8_400)),
    "tree with fresh tails": (_tree, (1_000, 4_000, 10_000, 30_000)),
    "zipf": (_zipfian, (400, 1_200, 4_000, 12_000)),
    "short conversations": (_short, (250, 500, 1_000)),
    "growing conversations": (_grow, (1_000, 4_000, 8_000)),
    "returning conversations": (_return, (1_000, 4_000, 8_000)),
}


def shape(name: str, seed: int = 0) -> Trace:
    """Return the made-up traffic of that name: a prompt a second, numbers below 2**31 as block ids."""

    def read() -> Iterator[Request]:
        for second, path in enumerate(SHAPES[name][0](np.random.default_rng(seed))):
            yield Request(float(second), np.asarray(path, np.int64), _TOKENS * len(path))

    return Trace(name, _TOKENS, read, format="made-up")


def agent_team(path: Path) -> Trace:
    """Return the trace of rows ``{"timestamp": µs, "input": the prompt as text}``, in the order of time."""

    def read() -> Iterator[Request]:
        rows = sorted((json.loads(line) for _, line in read_lines(path)), key=lambda row: int(row["timestamp"]))
        numbers: dict[tuple[int, str], int] = {}
        for row in rows:
            text, parent, ids = row["input"], -1, []
            for at in range(0, len(text) - _CHARACTERS + 1, _CHARACTERS):
                parent = numbers.setdefault((parent, text[at : at + _CHARACTERS]), len(numbers))
                ids.append(parent)
            seconds = (int(row["timestamp"]) - int(rows[0]["timestamp"])) / 1e6
            yield Request(seconds, np.asarray(ids, np.int64), _TOKENS * len(ids))

    return Trace(path.name, _TOKENS, read, format="texts")


def _traces() -> Path | None:
    folder = os.environ.get("CTXREUSE_TRACES")
    return Path(folder) if folder else None


def _suite(quick: bool) -> Iterator[tuple[str, Trace, tuple[int, ...]]]:
    if quick:
        name = "short conversations"
        yield name, shape(name), SHAPES[name][1][:1]
        return
    folder = _traces()
    if folder is None:
        for name, (_, blocks) in SHAPES.items():
            yield name, shape(name), blocks
        for name, (requests, blocks) in _GENERATED.items():
            yield f"generated {name}", generate(name, requests=requests), blocks
        return
    if (path := folder / "prefix" / "mooncake_conversation_rows0-8999.jsonl.xz").is_file():
        yield "chat service (real)", mooncake(path), _CHAT_SERVICE
    if (path := folder / "prefix" / "claude_code_sessions.jsonl.xz").is_file():
        sessions, blocks = _CODING_AGENTS
        yield "coding agents (real)", agent_sessions(path, sessions=sessions), blocks
    if (path := folder / "agents" / "magagent_calls.jsonl.xz").is_file():
        yield "agent team (real)", agent_team(path), _AGENT_TEAM


def _rate(trace: Packed, name: str, blocks: int) -> float:
    size = trace.block_tokens
    policy: object = NativeShadow(name, blocks * size) if name in NATIVE else None
    if policy is None:
        policy = make_policy(name, blocks * size, rng=Random(0))
    return 100 * float(serve(trace, policy, blocks, block_bytes=size).hits.sum()) / float(trace.length.sum())


def _other_seeds(options: Options) -> Iterator[Figure]:
    for number, (name, (_, capacities)) in enumerate(SHAPES.items()):
        options.step(f"{name}, other seeds", number, len(SHAPES))
        gaps: dict[str, float] = {}
        for seed in _OTHER_SEEDS:
            packed = pack(shape(name, seed))
            for blocks in capacities:
                best = max(_rate(packed, policy, blocks) for policy in DEFAULT_EXPERTS)
                gaps[f"seed {seed}, {blocks:,} blocks"] = best - _rate(packed, "adaptive", blocks)
        worst = max(gaps, key=gaps.__getitem__)
        yield Figure(
            metric=f"{name}, other seeds",
            value=gaps[worst],
            unit="points behind",
            better="lower",
            bar=_BEHIND,
            note=f"worst of {len(gaps)}: {worst}",
        )


def run(options: Options) -> list[Figure]:
    """Block hits in percent of the adaptive policy, by shape and size; how far it is behind with other seeds."""
    figures = []
    for name, trace, capacities in _suite(options.quick):
        packed = pack(trace)
        for number, blocks in enumerate(capacities):
            options.step(name, number, len(capacities))
            singles = {policy: _rate(packed, policy, blocks) for policy in DEFAULT_EXPERTS}
            best = max(singles, key=singles.__getitem__)
            figures.append(
                Figure(
                    metric=f"{name}, {blocks:,} blocks",
                    value=_rate(packed, "adaptive", blocks),
                    unit="% of blocks",
                    baseline=singles["lru"],
                    peer=singles[best],
                    bound=100 * float(packed.known.sum()) / float(packed.length.sum()),
                    bar=None if options.quick else singles[best] - _BEHIND,
                    note=f"peer: {best}",
                )
            )
    if not options.quick and _traces() is None:
        figures += _other_seeds(options)
    return figures
