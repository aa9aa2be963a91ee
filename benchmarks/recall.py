"""Search of a memory by words and by meaning: what is found, in what time, and how many tokens it brings along.

The documents are a year of chats, the questions those about them that name the chats with the answer; every second
one is reported. The weight of vectors beside words (`ctxreuse.store.recall.fuse`) was chosen on all of them, so at
this size it is no held-out figure. Found is a question if one of its chats is among the first five. Among 10,000 turns
and more, the others are sentences of Wikipedia passages and made-up reports, so the chats are ten times as long as
what they stand among. Words only is BM25 over whole texts, as any full-text index has it; this memory's words alone
(its passages) stand in the notes. All memories have the same embedder's vectors; those of the others are made before.
Times are those of a processor, as the machine may be busy; wall times stand beside them.

``CTXREUSE_PEERS``: a Python with mem0ai and langgraph; without it there are no peers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ctxreuse_agents import Memory, NewTurn

from benchmarks import corpus
from benchmarks.rivals import memories
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.embed import open_embedder
from ctxreuse.errors import EngineError
from ctxreuse.store.recall.rank import Words

__all__ = ["Searched", "run", "searched"]

#: Turns in the largest memories; quick ones.
_SIZES, _QUICK = (1_000, 10_000, 100_000, 1_000_000), (1_000,)
#: Of the peers, which take longer than the whole rest.
_PEER_SIZES = (1_000,)
#: Questions of a timed round, additions that are timed, and turns of a session of those that nobody asks about.
_ASKED, _ADDED, _TURNS = 150, 100, 500
_HITS = memories.HITS


class Searched(NamedTuple):
    """Of each question, whether it was found; seconds of its search, of a processor and of the wall; tokens found."""

    found: list[bool]
    processor: list[float]
    wall: list[float]
    tokens: list[int]

    @property
    def share(self) -> float:
        """Percent of the questions that were found."""
        return 100 * statistics.fmean(self.found)


def searched(memory: Memory, questions: Sequence[corpus.Asked], documents: Sequence[str]) -> Searched:
    """Ask all questions, the first once more before."""
    number = {document: i for i, document in enumerate(documents)}
    found, processor, wall, tokens = [], [], [], []
    memory.search(questions[0].question, _HITS)
    for asked in questions:
        began, used = time.perf_counter(), time.process_time()
        hits = memory.search(asked.question, _HITS)
        processor.append(time.process_time() - used)
        wall.append(time.perf_counter() - began)
        found.append(any(number.get(hit.turn.content) in asked.documents for hit in hits))
        tokens.append(sum(len(hit.turn.content) for hit in hits) // 4)
    return Searched(found, processor, wall, tokens)


def _worded(texts: Sequence[str], questions: Sequence[corpus.Asked]) -> float:
    """Percent of the questions that are found by words only, in whole texts."""
    index = Words()
    index.put(enumerate(texts))
    return 100 * statistics.fmean(
        any(place in one.documents for place, _ in index.rank(one.question)[:_HITS]) for one in questions
    )


def run(options: Options) -> list[Figure]:
    """Measure."""
    asked = corpus.questions_on_many()
    odd = asked.questions[1::2]
    figures = _found(asked, odd)
    for size in options.pick(_QUICK, _SIZES):
        figures += _size(options, asked, odd, size)
    return figures


def _found(asked: corpus.ManyAsked, odd: Sequence[corpus.Asked]) -> list[Figure]:
    """What is found among the chats alone, and its tokens against all of them."""
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        results = {}
        for embedder in ("none", "auto"):
            with Memory.open(Path(place) / "memory", embedder=embedder) as memory:
                if embedder == "none":
                    memory.create("chats").extend([NewTurn("user", text) for text in asked.documents])
                memory.index()
                results[embedder] = searched(memory, odd, asked.documents)
    ours, words = results["auto"], results["none"]
    peers = {name: _peer(name, asked.documents, odd) for name in ("mem0", "langgraph")}
    best = max((one.share for one in peers.values() if one is not None), default=None)
    everything = sum(len(text) for text in asked.documents) // 4
    plain = _worded(asked.documents, odd)
    note = f"{len(odd)} questions on {len(asked.documents)} chats; baseline: words only; {_named(words, peers)}"
    bar = _mem0_share(peers) if asked.real else None
    return [
        _figure(
            "found among the first five",
            ours.share,
            "%",
            baseline=plain,
            peer=best,
            bound=100.0,
            bar=bar,
            note=note,
        ),
        _figure(
            "tokens of what was found",
            statistics.fmean(ours.tokens),
            "tokens",
            baseline=float(everything),
            better="lower",
            note="a quarter of the characters; baseline: the whole memory in the prompt",
        ),
    ]


def _figure(metric: str, value: float, unit: str, **rest: Any) -> Figure:
    return Figure(metric=metric, value=value, unit=unit, **rest)


def _mem0_share(peers: dict[str, Searched | None]) -> float | None:
    return None if (one := peers["mem0"]) is None else one.share


def _named(words: Searched, peers: dict[str, Searched | None]) -> str:
    shown = [f"{name} {one.share:.1f} %" for name, one in peers.items() if one is not None]
    rest = f"peers: {', '.join(shown)}" if shown else "no peers here"
    return f"passages by words {words.share:.1f} %; {rest}"


def _size(options: Options, asked: corpus.ManyAsked, odd: Sequence[corpus.Asked], size: int) -> list[Figure]:
    """Time and share among so many turns."""
    others = corpus.sentences(max(size - len(asked.documents), 0))
    texts = [*asked.documents, *others][:size]
    odd, label = odd[:_ASKED], f"among {size:,} turns"
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        options.step(f"writing {size:,} turns")
        with Memory.open(Path(place) / "memory", embedder="none") as memory:
            for start in range(0, len(texts), _TURNS):
                memory.create(f"s{start}").extend([NewTurn("user", text) for text in texts[start : start + _TURNS]])
            options.step(f"words of {size:,} turns")
            memory.index()
            words = searched(memory, odd, asked.documents)
        with Memory.open(Path(place) / "memory") as memory:
            options.step(f"vectors of {size:,} turns")
            began = time.process_time()
            memory.index()
            embedding = (time.process_time() - began) / size
            ours = searched(memory, odd, asked.documents)
            added, notes = [], corpus.sentences(_ADDED)
            session = memory.create("added")
            for text in notes:
                start_time = time.process_time()
                session.user(text)
                added.append(time.process_time() - start_time)
        disk = sum(file.stat().st_blocks * 512 for file in (Path(place) / "memory" / "recall").iterdir())
    peers = {}
    if size in _PEER_SIZES:
        options.step(f"peers with {size:,} turns")
        peers = {name: _peer(name, texts, odd) for name in ("mem0", "langgraph")}
    known = [one for one in peers.values() if one is not None]
    fastest = min((_p95(one.processor) for one in known), default=None)
    share = max((one.share for one in known), default=None)
    wall = (
        f"wall: p50 {_p50(ours.wall):.1f} ms, p95 {_p95(ours.wall):.1f} ms, words alone p95 {_p95(words.wall):.1f} ms"
    )
    times = "; ".join(f"{name} p50 {_p50(one.processor):.1f}" for name, one in peers.items() if one is not None)
    bar = 20.0 if size == 100_000 else None
    return [
        _figure(
            f"found {label}",
            ours.share,
            "%",
            baseline=(plain := _worded(texts, odd)),
            peer=share,
            bound=100.0,
            bar=plain + 15 if asked.real and size >= 10_000 else None,
            note=f"{len(odd)} questions; baseline: words only; {_named(words, peers)}",
        ),
        _figure(
            f"p95 of a search {label}",
            _p95(ours.processor),
            "ms",
            baseline=_p95(words.processor),
            peer=fastest,
            better="lower",
            bar=bar,
            note=f"of a processor; baseline: by words alone; {wall}{'; ' + times if times else ''}",
        ),
        _figure(f"p50 of a search {label}", _p50(ours.processor), "ms", baseline=_p50(words.processor), better="lower"),
        _figure(
            f"addition {label}",
            _p50(added),
            "ms",
            better="lower",
            bar=1.0,
            note=f"of a processor; vector later: {1e6 * embedding:.0f} µs; index: {disk / size:.0f} bytes a turn",
        ),
    ]


def _p50(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _p95(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.quantile(seconds, 0.95))


def _peer(name: str, texts: Sequence[str], questions: Sequence[corpus.Asked]) -> Searched | None:
    """What another memory finds; None where no Python with it is named."""
    python = os.environ.get("CTXREUSE_PEERS", "")
    if not python:
        return None
    embedder = open_embedder()
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        folder = Path(place)
        for what, given in (("texts", list(texts)), ("questions", [one.question for one in questions])):
            (folder / f"{what}.json").write_text(json.dumps(given))
            np.save(folder / f"{what}.npy", embedder.embed(given).vectors)
        env = os.environ | {"MEM0_TELEMETRY": "False", "MEM0_DIR": place, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        command = [python, memories.__file__, name, place]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise EngineError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    made: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found = [bool(one.documents & set(hits)) for one, hits in zip(questions, made["found"])]
    return Searched(found, made["processor"], made["wall"], [])
