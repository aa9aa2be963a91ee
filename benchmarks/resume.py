"""Resuming a sliding-window model at its last state, at a branch and in the middle, against full prefill (live).

Gemma 3 270M in float32 on this machine, its context on disk: three conversations that share their beginning leave the
states that the store's policy admits. Then prompts go on from the last state, from the branch that was proven to recur,
and from a place between two states, where the tail behind the nearer one is replayed. Each is timed against computing
all of the same prompt (the baseline), which takes turns with it; the bound is bringing the held blocks and the state
into the engine's memory, with nothing computed. Logits are compared with the full prefill's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ctxreuse.bench.measure import Options, paired
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_MODEL = "gemma3-270m"
#: Largest |difference| of logits in float32 that still counts as the same computation.
_EXACT = 1e-4
_LINE = "On day {} the keeper of the light wrote of {} ships, of wind from the {} and of a lamp that burnt until {}. "
_WINDS = ("north", "east", "south", "west")


class _Case(NamedTuple):
    """A prompt, and from how many tokens on it is expected to be computed."""

    ids: Tokens
    resumed: int


def _text(runtime: Runtime, tokens: int, first: int) -> Tokens:
    lines = [_LINE.format(i, i * 7 % 23, _WINDS[i % 4], i % 12 + 1) for i in range(first, first + tokens // 16 + 8)]
    assert runtime.text is not None
    return runtime.text.encode("".join(lines), markers=False)[:tokens]


def _cases(engine: Engine, runtime: Runtime, store: BlockStore, document: int) -> dict[str, _Case]:
    """Fill the store with what three conversations leave, and make the prompts that go on from it."""
    size = engine.space.block_tokens
    shared = _text(runtime, document, 0)
    ends: list[Tokens] = []
    # Half of the document comes in an earlier turn; two questions about all of it prove where they part.
    for ids in (
        shared[: document // 2],
        *(np.concatenate([shared, _text(runtime, 3 * size, 500 + i)]) for i in (0, 99)),
    ):
        runtime.release(runtime.prefill(ids))
        store.flush()
        ends.append(ids)
    more = _text(runtime, 24, 900)
    middle = document * 3 // 4
    return {
        "last": _Case(np.concatenate([ends[1], more]), len(ends[1]) // size * size),
        "branch": _Case(np.concatenate([shared, more]), document // size * size),
        "middle": _Case(np.concatenate([shared[:middle], more]), document // 2 // size * size),
    }


def _load(engine: Engine, runtime: Runtime, store: BlockStore, case: _Case) -> None:
    """The bound: blocks and state into the engine's memory, nothing computed."""
    space, size = engine.space, engine.space.block_tokens
    keys = runtime.keys(case.ids)[: case.resumed // size]
    context = engine.new_context(len(case.ids))
    with store.read() as reader:
        runs = [case.ids[i * size : (i + 1) * size] for i in range(len(keys))]
        views = [view for key, run in zip(keys, runs) if (view := reader.block(key, run, space.digest)) is not None]
        state = reader.state(keys[-1], runs[-1], space.digest)
        engine.load(context, views, state).wait()
        del views, state


def _divergence(ours: Logits, full: Logits) -> float:
    """Kullback-Leibler divergence of the next token's distribution from the full prefill's, in nats."""
    p, q = (np.exp(x.astype(np.float64) - x.max()) for x in (full, ours))
    p, q = p / p.sum(), q / q.sum()
    return float(max((p * np.log(p / q)).sum(), 0.0))


def run(options: Options) -> list[Figure]:
    """Seconds to the logits of a prompt, how far they are off, and what the store holds for it."""
    engine = open_engine(options.model or _MODEL, engine="torch")
    size, rounds = engine.space.block_tokens, options.pick(1, 5)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place, BlockStore.open(Path(place)) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        options.step("three conversations")
        cases = _cases(engine, runtime, store, options.pick(4 * size, 24 * size))
        stats = store.stats()
        for name, case in cases.items():
            options.step(f"resuming at: {name}")
            whole = engine.prefill(engine.new_context(len(case.ids)), case.ids)
            done = runtime.prefill(case.ids)
            assert done.usage.cached_tokens == case.resumed, (name, done.usage)
            times = paired(
                {
                    "ours": lambda case=case: runtime.prefill(case.ids),  # type: ignore[misc]
                    "full": lambda case=case: engine.prefill(engine.new_context(len(case.ids)), case.ids),  # type: ignore[misc]
                    "load": lambda case=case: _load(engine, runtime, store, case),  # type: ignore[misc]
                },
                rounds=rounds,
                warm=0,
            )
            what = f"{len(case.ids):,} tokens, {len(case.ids) - case.resumed:,} of them computed"
            figures += [
                Figure(
                    metric=f"{name}_seconds",
                    value=times["ours"],
                    unit="s",
                    baseline=times["full"],
                    bound=times["load"],
                    better="lower",
                    note=f"{what}; baseline: full prefill; bound: loading alone",
                ),
                Figure(
                    metric=f"{name}_logits",
                    value=float(np.abs(done.logits - whole).max()),
                    unit="max |difference|",
                    better="lower",
                    bar=_EXACT,
                    note=f"KL {_divergence(done.logits, whole):.1e} nats from the full prefill's next token",
                ),
            ]
        figures.append(_weight(engine, runtime, store, cases["last"], stats.states, stats.blocks, stats.nbytes))
    return figures


def _weight(
    engine: Engine, runtime: Runtime, store: BlockStore, case: _Case, states: int, blocks: int, nbytes: int
) -> Figure:
    """What is on disk, against the same blocks with a state each: its size is that of a context beyond its windows."""
    context = engine.new_context(len(case.ids))
    engine.prefill(context, case.ids)
    at = context.states[-1]
    state = len(engine.export_state(context, ROOT, ROOT, at))
    return Figure(
        metric="disk",
        value=nbytes / 1e6,
        unit="MB",
        baseline=(nbytes + (blocks - states) * state) / 1e6,
        better="lower",
        note=f"{blocks} blocks and {states} states of {state / 1e6:.1f} MB; baseline: a window state with each block",
    )
