"""The early exits of one runtime's answers: which requests have them, what they save, and what is kept of them."""

from __future__ import annotations

import hashlib
import logging
import threading
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.engines.exits import ExitEngine
from ctxreuse.exits import ExitController, ExitPlan, ExitState, RampCost, check_budget
from ctxreuse.private import write_private
from ctxreuse.why.records import ExitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.engines.exits import ExitStep
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.exits import ExitGate
    from ctxreuse.metrics import Metrics
    from ctxreuse.runtime.request import Request
    from ctxreuse.runtime.steps.scheduler import StepScheduler
    from ctxreuse.speculate import PassCosts, PassLoad

__all__ = ["AnswerExits", "Exiting"]

log = logging.getLogger(__name__)

_VERSION, _DIGEST = 1, 16


class AnswerExits:
    """The exits of one answer. Not thread-safe.

    Attributes:
        saved: seconds that they saved, less what ramps, parts of the model, deciding and completing tokens took.
    """

    def __init__(self, gate: ExitGate, costs: PassCosts, clock: Callable[[], float]) -> None:
        self._gate, self._costs, self._clock, self._plan = gate, costs, clock, ExitPlan()
        self.saved = 0.0

    @property
    def exited(self) -> int:
        """Tokens that left early."""
        return self._gate.exited

    @property
    def disagreed(self) -> int:
        """Of those that were verified, tokens that the whole model would not have said."""
        return self._gate.wrong

    def plan(self) -> ExitPlan:
        """Return what is to be done for the next token; `stepped` or `passed` follows."""
        began = self._clock()
        self._plan = self._gate.plan()
        self.saved -= self._clock() - began  # thresholds are chosen again now and then
        return self._plan

    def stepped(self, step: ExitStep, seconds: float, load: PassLoad) -> None:
        """Note a step, in a pass of so many seconds that had ``load`` beside it; others' exits count there too."""
        least, own = self._plan.least, step.rows[-1].scores if step.rows else {}
        sure = any(own.get(ramp, -inf) >= score for ramp, score in least.items())
        self._gate.settle(step.left, step.rows, "batch" if sure and step.left < 0 else "")
        contexts = load.contexts + 1
        plain = self._costs.seconds(contexts)
        if contexts == len(step.rows) == 1:  # of all layers, for it alone: this pass itself says what a plain one takes
            self.saved -= step.spent
        elif plain is not None:
            self.saved += (plain - seconds) / contexts

    def passed(self, reason: str) -> None:
        """Note a token that went through the whole model, whatever the plan was."""
        self._gate.settle(-1, (), reason)

    def complete(self, engine: Engine, context: Context) -> None:
        """Verify the answer's last tokens; the engine is used alone."""
        assert isinstance(engine, ExitEngine)
        began, waiting = self._clock(), self._gate.waiting
        self._gate.complete(engine.complete_rows(context))
        if waiting:
            self.saved -= self._clock() - began

    def outcome(self) -> ExitOutcome:
        """Return what became of them."""
        gate = self._gate
        return ExitOutcome(gate.exited, gate.verified, gate.wrong, gate.budget, self.saved, dict(gate.refused))


class _Saved(msgspec.Struct, array_like=True):
    version: int
    owner: bytes
    costs: tuple[RampCost, ...]
    state: ExitState


class Exiting:
    """Decides which answers have exits. Any thread may call."""

    def __init__(
        self,
        engine: Engine,
        salt: bytes,
        steps: StepScheduler,
        *,
        budget: float = 0.0,
        folder: Path | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """``budget``: of requests that name none; 0: they have no exits. ``folder``: where what was learnt and spent is
        kept over restarts (None: nowhere). Raises ConfigError for a budget that is none."""
        self._budget = check_budget(budget) if budget else 0.0
        self._engine, self._salt, self._steps, self._metrics = engine, salt, steps, metrics
        self._lock = threading.Lock()
        self._controller: ExitController | None = None
        self._owner = hashlib.blake2b(engine.space.digest, digest_size=_DIGEST, key=salt).digest()
        self._path = folder / f"exits-{self._owner.hex()[:16]}.bin" if folder is not None else None
        self._changes = 0

    def begin(self, request: Request, sampling: SamplingParams) -> AnswerExits | ExitOutcome | None:
        """Return the exits of an answer to a request; why it has none; None: none are wanted."""
        budget = self._budget if sampling.exits is None else sampling.exits
        if not budget:
            return None
        refused = _refused(sampling)
        if not refused:
            ramps = self._engine.ramps if isinstance(self._engine, ExitEngine) else "this engine has no early exits"
            if not isinstance(ramps, str):
                gate = self._opened(ramps).gate(
                    hashlib.blake2b(request.caller.encode(), key=self._salt).digest(), budget
                )
                if gate is not None:
                    return AnswerExits(gate, self._steps.costs, self._steps.clock)
            refused = ramps if isinstance(ramps, str) else "callers"
        return ExitOutcome(budget=budget, refused={refused: 1})

    def _opened(self, ramps: Sequence[RampCost]) -> ExitController:
        with self._lock:
            if self._controller is None:
                self._controller = ExitController(ramps)
                self._load(self._controller)
            return self._controller

    def count(self, outcome: ExitOutcome) -> None:
        """Count what became of an answer's exits."""
        metrics = self._metrics
        if metrics is None:
            return
        for verdict, count in (
            ("agreed", outcome.verified - outcome.disagreed),
            ("disagreed", outcome.disagreed),
            ("unverified", outcome.exited - outcome.verified),
        ):
            metrics.add("ctxreuse_exit_tokens_total", count, verdict)
        metrics.add("ctxreuse_exit_seconds_total", abs(outcome.saved), "saved" if outcome.saved >= 0 else "lost")
        for reason, count in outcome.refused.items():
            metrics.add("ctxreuse_exit_refused_tokens_total", count, reason if len(reason) < 16 else "engine")

    def _load(self, controller: ExitController) -> None:
        """Take what was kept; then nothing on disk says that budgets are as they were left."""
        if self._path is None:
            return
        try:
            raw = self._path.read_bytes()
            if hashlib.blake2b(raw[_DIGEST:], digest_size=_DIGEST).digest() != raw[:_DIGEST]:
                raise ValueError("it is damaged")
            saved = msgspec.msgpack.decode(raw[_DIGEST:], type=_Saved)
            if (saved.version, saved.owner, saved.costs) != (_VERSION, self._owner, controller.costs):
                raise ValueError("it is of another version, model or tenant, or of other ramps")
            controller.restore(saved.state)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, UnicodeDecodeError, RecursionError) as error:  # msgspec's errors are ValueErrors
            log.warning("early exits are learnt again: %s", error, extra={"file": str(self._path)})
            controller.close()
        self._write(controller, clean=False)

    def save(self, *, clean: bool = False) -> None:
        """Keep on disk what is new; ``clean``: no answer follows."""
        with self._lock:
            controller = self._controller
            if controller is None or self._path is None or (controller.changes == self._changes and not clean):
                return
            self._write(controller, clean=clean)

    def _write(self, controller: ExitController, *, clean: bool) -> None:
        assert self._path is not None
        self._changes = controller.changes
        raw = msgspec.msgpack.encode(_Saved(_VERSION, self._owner, controller.costs, controller.dump(clean=clean)))
        try:
            write_private(self._path, hashlib.blake2b(raw, digest_size=_DIGEST).digest() + raw)
        except OSError as error:
            log.warning("early exits could not be written: %s", error, extra={"file": str(self._path)})


def _refused(sampling: SamplingParams) -> str:
    """Why an answer drawn so can have no exits: a ramp says one token, and nothing of the others."""
    if sampling.grammar is not None:
        return "grammar"
    if sampling.logprobs:
        return "logprobs"
    plain = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    return "" if sampling.temperature == 0 and plain and not sampling.logit_bias else "sampled"
