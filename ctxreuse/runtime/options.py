"""Options of a runtime, beside its engine and its store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ctxreuse.runtime.steps.slices import UNSEEN
from ctxreuse.store.policy.states import StatePolicy

if TYPE_CHECKING:
    from random import Random

    from ctxreuse.bus.remote import Remote
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Engine
    from ctxreuse.engines.text import TextModel
    from ctxreuse.metrics import Metrics
    from ctxreuse.reuse import QualityGate, RecomputeBudget
    from ctxreuse.why import RequestLog

__all__ = ["RuntimeOptions", "TrafficRecorder"]


class TrafficRecorder(Protocol):
    """Records traffic, as `ctxreuse.lab.recorder` does. Any thread may call; calls are quick and never raise."""

    def prompt(self, keys: Sequence[bytes], tokens: int) -> int:
        """Record a prompt of ``tokens`` tokens by the keys of its whole blocks; returns its number (< 0: left out)."""

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """Record that the context of ``keys``, which continues a recorded prompt, paused for reason ``label``."""

    def ended(self, number: int, *, output: int = 0, busy: float = 0.0) -> None:
        """Record that the prompt ``number`` was answered: tokens of the answer, seconds since it came."""


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options of a `Runtime`. The caller closes logs and recorders.

    Attributes:
        text: tokenizer and chat template, for `Runtime.complete` (default: the engine's own).
        tenant: owner of the keys; tenants share nothing.
        context_cache_bytes: KV of finished requests that stays in the engine's memory, so that the next turn loads
            nothing.
        recompute: budget of selective recomputation where chunks are reused at other positions: the best policy within
            it is chosen, and chunks that need more are not reused (None: as little as ``max_kl`` requires).
        states: positions at which states are stored, and how much is replayed instead.
        gate: the quality gate of chunk reuse (default: the model's chunk profile in this user's profile store, as soon
            as there is one).
        remote: other nodes, for blocks that neither memory nor store has, where fetching is predicted to be faster.
        cost: the cost model (default: a new model if there is a ``remote`` or a budget in seconds).
        metrics: counts finished answers.
        requests: the log by which requests explain their misses (default: in memory).
        recorder: records requests as hashes and counts.
        available_memory: bytes that contexts could be given now: prompts that do not fit wait for others to end (None:
            none waits).
        stall: seconds that a slice of one prompt may make other answers wait for their next token, or three of their
            steps, if that is longer.
        clock: seconds; must never go back.
        speculate: ``auto``: answers are drafted from what was said before, where it is worth it (`ctxreuse.speculate`).
        draft: the engine of a smaller model of the same tokenizer, which drafts answers too; ``speculate`` is ``auto``
            then. The caller closes it.
        verify: answers may be decoded by other nodes, see `Runtime.let_verify`.
        drafts: folder where what answers are drafted from, and what was learnt of early exits, is kept over restarts
            (None: nowhere).
        exits: share of an answer's tokens that may be other than the model's own, so that some leave it early
            (`ctxreuse.exits`), unless a request names another; 0: none leave.
        rng: samples the rows of a peer's blocks to audit (default: the system's).
    """

    text: TextModel | None = None
    tenant: str = "default"
    context_cache_bytes: int = 1 << 30
    recompute: RecomputeBudget | None = None
    states: StatePolicy = field(default_factory=StatePolicy)
    gate: QualityGate | None = None
    remote: Remote | None = None
    cost: CostModel | None = None
    metrics: Metrics | None = None
    requests: RequestLog | None = None
    recorder: TrafficRecorder | None = None
    available_memory: Callable[[], int] | None = None
    stall: float = UNSEEN
    clock: Callable[[], float] = time.perf_counter
    speculate: Literal["auto", "off"] = "off"
    draft: Engine | None = None
    verify: bool = False
    drafts: Path | None = None
    exits: float = 0.0
    rng: Random | None = None
