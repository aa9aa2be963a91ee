"""An edge drafts and a cloud decodes, over links of 5, 20 and 80 ms, against the cloud alone and the edge alone.

The cloud is a process of its own with one engine process (torch, float32, one thread), behind a relay that adds the
round trip; the edge is this process. Cloud alone is the same engine in the same process, whose answer is streamed over
the same link without drafts: a token costs what a pass does, whatever the round trip, so all that drafts can gain is
that a pass checks several. Edge alone is the same model in this process, plain; the two take turns, and a machine with
two cores computes them equally fast; it is measured beside the first round trip only, as it has no link. Two tasks: a
document that the prompt has twice already (quote) and an open question, the model's own greedy answers. Wall time after
the first token; the ways take turns, texts are forgotten before each answer, but not what passes cost. A figure is the
median over rounds of tokens a second against the cloud alone in the same round; peer: edge alone; bound: all drafts
right, at the best length for what the cloud's passes cost. ``--model``: another known name.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.corpus import facts
from benchmarks.verifying_cloud import linked, verifying_cloud
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions, Usage

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_TRIPS, _ROUNDS, _ANSWER = (0.005, 0.020, 0.080), 2, 64
#: On quoting at the longest round trip, and nowhere less.
_QUOTE, _LEAST = 1.5, 0.95


class Answered(NamedTuple):
    """Tokens a second after the first one, and what the answer used."""

    rate: float
    usage: Usage
    tokens: tuple[int, ...]


def _tasks(text: TextModel) -> dict[str, Tokens]:
    document = facts(1).documents[0]
    twice = f"{document}\n\n{document}\n\n{document[: len(document) // 12]}"
    question = Message("user", "Why do people keep cats? Give reasons.")
    return {
        "quote": text.encode(twice, markers=False),
        "open": text.encode(text.render([question], generate=True)),
    }


def _answered(runtime: Runtime, ids: Tokens, count: int, speculate: bool) -> Answered:
    if runtime.drafting is not None:
        runtime.drafting.memory.clear()
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, speculate="auto" if speculate else "off")
    answer = runtime.complete(ids, sampling)
    next(answer)
    began = time.perf_counter()
    for _ in answer:
        pass
    seconds = time.perf_counter() - began
    return Answered((count - 1) / seconds, answer.usage, tuple(answer.tokens))


def run(options: Options) -> list[Figure]:
    """Ratios of tokens a second to the cloud alone, by task and round trip."""
    model = options.model or "smollm2"
    engine = open_engine(model, engine="torch", threads=1)
    assert engine.text is not None
    plain, tasks = Runtime(engine, None, RuntimeOptions(context_cache_bytes=1 << 30)), _tasks(engine.text)
    figures, rounds, alone = list[Figure](), options.pick(1, _ROUNDS), dict[str, float]()
    count = options.pick(12, _ANSWER)
    with tempfile.TemporaryDirectory() as folder, verifying_cloud(folder, model, "torch") as cloud:
        for rtt in options.pick(_TRIPS[:1], _TRIPS):
            with linked(engine, cloud.said, rtt) as (runtime, verifiers):
                runtime.let_verify(verifiers)
                for task, ids in tasks.items():
                    ways = {"ours": (runtime, True), "cloud": (runtime, False), "edge": (plain, False)}
                    found = dict[str, list[Answered]]()
                    for number in range(rounds + 1):
                        options.step(f"{task}, {rtt * 1e3:.0f} ms", number, rounds + 1)
                        for way in sorted(ways, reverse=bool(number % 2)):
                            if way == "edge" and rtt != _TRIPS[0]:  # it has no link
                                continue
                            measured = _answered(ways[way][0], ids, count, ways[way][1])
                            if number or options.quick:  # the first round learns what passes cost
                                found.setdefault(way, []).append(measured)
                    if "edge" in found:
                        alone[task] = _ratio(found["edge"], found["cloud"])
                    figures.append(_figure(task, rtt, runtime, found, alone[task], options))
    plain.close()
    return figures


def _ratio(ours: Sequence[Answered], others: Sequence[Answered]) -> float:
    return statistics.median(one.rate / other.rate for one, other in zip(ours, others))


def _figure(
    task: str, rtt: float, runtime: Runtime, found: dict[str, list[Answered]], alone: float, options: Options
) -> Figure:
    """``alone``: tokens a second of the edge alone, by the cloud's."""
    ours, cloud = found["ours"], found["cloud"]
    if any(one.usage.verification != "cloud" for one in (*ours, *cloud)):
        raise EngineError("an answer of the bench was not the cloud's", where=ours[-1].usage.verification)
    same = all(one.tokens == other.tokens for one, other in zip(ours, cloud))
    assert runtime.verifying is not None
    costs = runtime.verifying.policy("cloud").costs
    base = costs.seconds(1)
    lengths = [(rows, costs.seconds(rows)) for rows in range(1, 34)]
    bound = max(rows * base / cost for rows, cost in lengths if cost) if base else None
    last = ours[-1].usage.tokens
    if options.quick:
        bar = None
    else:
        bar = _QUOTE if task == "quote" and rtt == _TRIPS[-1] else _LEAST
    return Figure(
        metric=f"{task}_{rtt * 1e3:.0f}ms",
        value=_ratio(ours, cloud),
        unit="x",
        baseline=1.0,
        peer=alone,
        bound=bound,
        bar=bar,
        note=f"{ours[-1].rate:.1f} tokens/s, cloud alone {cloud[-1].rate:.1f}; "
        f"{last.accepted} of {last.drafted} drafted tokens right; {'the same' if same else 'OTHER'} tokens as the "
        f"cloud alone; a pass of 1, 8 and 32 tokens takes "
        + ", ".join(f"{1e3 * (costs.seconds(rows) or 0):.0f}" for rows in (1, 8, 32))
        + " ms",
    )
