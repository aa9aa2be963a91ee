"""Reuse over hundreds of questions about a shuffled pool of documents: does it stay what it was (live).

Each question comes behind six documents of a pool of 48, drawn and ordered anew each time, through one runtime and one
store. What schemes of reuse lose as they go on would show as a rate that falls, or a time to first token that rises,
from one fifty of questions to the next: moved rows are never a source, so ours should not. The baseline is the share
that a prefix cache of unlimited size serves of the same questions, by their keys. With CTXREUSE_TRACES the documents
are transcripts of podcasts, without it made-up ones. ``--model``: another model than SmolLM2.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.archive import DEFAULT, Archive, an_archive, cut_to, model_for
from benchmarks.corpus import pool
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure

__all__ = ["OPTIONS", "Query", "figures", "run"]

OPTIONS = ("model",)
_MODEL = "smollm2"
_POOL, _TAKEN, _TOKENS, _QUERIES, _WINDOW = 48, 6, 192, 300, 50
#: The last fifty may differ from the first after warm-up by so much.
_FLAT = 0.03
_ASKED = "What is question {} about, in the words of the second document?"


class Query(NamedTuple):
    """What one question came to; ``prefix``: tokens that a prefix cache of unlimited size would have served."""

    tokens: int
    reused: int
    moved: int
    prefix: int
    seconds: float
    gate: str = ""


def run(options: Options) -> list[Figure]:
    """Reuse rate and time to first token by windows of fifty questions."""
    engine = model_for(options.model or _MODEL, options)
    count, size = options.pick((8, _POOL), (_QUERIES, _POOL))
    corpus = pool(2 * size)
    with an_archive(engine, options) as archive:
        documents = (cut_to(archive.text, corpus.texts, _TOKENS) or corpus.texts)[: options.pick(6, size)]
        taken = min(options.pick(3, _TAKEN), len(documents))
        queries = _asked(archive, documents, count, taken, options)
    what = f"{taken} of {len(documents)} documents a question, {corpus.source}"
    return figures(queries, options.pick(2, _WINDOW), what, bars=not options.quick)


def _asked(archive: Archive, documents: Sequence[str], count: int, taken: int, options: Options) -> list[Query]:
    rng = Random(7)
    known: set[bytes] = set()
    found = []
    for number in range(count):
        options.step("questions", number, count)
        prompted = archive.encode_prompt(rng.sample(list(documents), taken), _ASKED.format(number))
        answered = archive.ask(prompted, DEFAULT)
        usage, keys = answered.done.usage, archive.runtime.keys(prompted.ids)
        served = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys)
        found.append(
            Query(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.tokens.relocated,
                served * archive.engine.space.block_tokens,
                answered.seconds,
                usage.gate_decision,
            )
        )
        archive.keep(answered.done)
        del answered
    return found


def figures(queries: Sequence[Query], window: int, what: str, *, bars: bool) -> list[Figure]:
    """A rate and a time for each window; the last against the one after warm-up, which is the second."""
    windows = [queries[at : at + window] for at in range(0, len(queries) - window + 1, window)]
    rates = [sum(query.reused for query in one) / sum(query.tokens for query in one) for one in windows]
    seconds = [statistics.median(query.seconds for query in one) for one in windows]
    cold = statistics.median(query.seconds for query in queries[: max(1, window // 10)])
    found = []
    for number, (one, rate, took) in enumerate(zip(windows, rates, seconds)):
        where = f"questions {number * window + 1} to {(number + 1) * window}"
        prefix = sum(query.prefix for query in one) / sum(query.tokens for query in one)
        moved = sum(query.moved for query in one) / sum(query.tokens for query in one)
        said = statistics.mode(query.gate for query in one)
        note = f"{what}; {moved:.0%} moved, {said or 'nothing found'}; baseline: a prefix cache of unlimited size"
        found += [
            Figure(metric=f"reused, {where}", value=100 * rate, unit="% of tokens", baseline=100 * prefix, note=note),
            Figure(metric=f"first token, {where}", value=took, unit="s", baseline=cold, better="lower"),
        ]
    warm = min(1, len(windows) - 1)
    found += [
        Figure(
            metric="reuse, last window over the first after warm-up",
            value=rates[-1] / rates[warm] if rates[warm] else 0.0,
            unit="x",
            bar=1 - _FLAT if bars else None,
        ),
        Figure(
            metric="first token, last window over the first after warm-up",
            value=seconds[-1] / seconds[warm],
            unit="x",
            better="lower",
            bar=1 + _FLAT if bars else None,
            note="medians; baseline of the windows: the first questions, when nothing was known",
        ),
    ]
    return found
