"""The answers to one prompt: it is computed once, each answer continues a context of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from ctxreuse.engines.fork import fork_context
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.pauses import infer, tools_in
from ctxreuse.runtime.completion import Completion, PieceSource
from ctxreuse.runtime.exiting import AnswerExits
from ctxreuse.runtime.request import ContextRecord, PrefillResult
from ctxreuse.runtime.steps.scheduler import Advanced
from ctxreuse.usage import TokenUsage, Usage
from ctxreuse.why.records import ExitOutcome

if TYPE_CHECKING:
    from ctxreuse.constrain import Constraint
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.engines.generate import AnswerDecoder, GeneratedToken
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.metrics import Metrics
    from ctxreuse.pauses import PauseKind
    from ctxreuse.runtime.drafting import Drafting
    from ctxreuse.runtime.exiting import Exiting
    from ctxreuse.runtime.inflight.sharing import PromptsInFlight
    from ctxreuse.runtime.options import TrafficRecorder
    from ctxreuse.runtime.paused import PausedContexts
    from ctxreuse.runtime.request import Request
    from ctxreuse.runtime.steps.order import RequestTurn
    from ctxreuse.runtime.steps.scheduler import StepScheduler
    from ctxreuse.speculate import AnswerDrafter
    from ctxreuse.why import RequestLog, Why

__all__ = ["AnswerGroup", "pieces_in_turn"]

log = logging.getLogger(__name__)


#: What is checked of an answer that is not drafted.
_NO_DRAFT = np.zeros(0, "<i4")


class AnsweringRuntime(Protocol):
    """What answers need of a `Runtime`."""

    engine: Engine
    steps: StepScheduler
    inflight: PromptsInFlight
    paused: PausedContexts
    requests: RequestLog
    cost: CostModel | None
    metrics: Metrics | None
    drafting: Drafting | None
    exiting: Exiting
    recorder: TrafficRecorder | None
    clock: Callable[[], float]

    def turn(self, request: Request) -> RequestTurn: ...

    def prefill(
        self,
        prompt: Request,
        *,
        reserve: int = 0,
        forks: int = 0,
        turn: RequestTurn | None = None,
        log: bool = True,
    ) -> PrefillResult: ...

    def release(self, done: PrefillResult) -> list[bytes]: ...

    def drop(self, done: PrefillResult) -> None: ...

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why: ...


class AnswerGroup:
    """The answers of a runtime to one prompt; any thread may use any of their `completions`.

    A round advances all answers that go on by one token, in common passes; who iterates one makes the rounds, and the
    others' pieces wait. The contexts fork when the first of them goes on after its first token.
    """

    def __init__(
        self,
        runtime: AnsweringRuntime,
        text: TextModel,
        request: Request,
        samplings: Sequence[SamplingParams],
        was: PauseKind | None,
        constraints: Sequence[Constraint | None] = (),
        verification: str = "",
    ) -> None:
        """``constraints``: of the samplings' grammars, compiled; empty: none has one; ``verification``: see `Usage`."""
        self.runtime, self.request = runtime, request
        self._text, self._was, self._verification = text, was, verification
        self._started, self._log = False, True
        self._turn = runtime.turn(request)
        self._began = 0.0
        self._lock = threading.RLock()
        #: The prompt's context, until an answer continues it.
        self._prompt: PrefillResult | None = None
        self._number, self._generated = -1, 0
        all_constraints = constraints or [None] * len(samplings)
        self._answers = [_Answer(number, *each) for number, each in enumerate(zip(samplings, all_constraints))]

    def completions(self) -> list[Completion]:
        """Return the answers, once."""
        # The group does not know them: dropped ones, and their contexts, are then freed at once.
        return [Completion(_Source(self, one), 0 if one.number else len(self.request.ids)) for one in self._answers]

    def continue_with(self, decoder: AnswerDecoder, *, log: bool) -> PieceSource:
        """Return the only answer, once: it goes on where ``decoder`` is, whose history is the request; ``log``: the
        request is to be logged."""
        (one,) = self._answers
        one.decoder, self._log = decoder, log
        return _Source(self, one)

    def next(self, one: _Answer) -> GeneratedToken | None:
        """Return the next piece of an answer; see `PieceSource.next`."""
        with self._lock:
            while not one.pieces:
                if one.error is not None:
                    raise one.error
                if one.decoder is not None and one.decoder.ended:
                    return None
                self._round()
            return one.pieces.popleft()

    def _round(self) -> None:
        """Give every answer that goes on a piece, or the error that ends it."""
        going = [one for one in self._answers if one.goes_on]
        found: Sequence[Logits | Exception]
        try:
            found = self._advance(going) if self._started else [self._start()] * len(going)
        except BaseException as error:
            for one in going:
                one.error = error
            raise
        for one, logits in zip(going, found):
            before = len(one.pieces)
            one.take(logits, self.runtime.engine)
            one.pace.drawn(len(one.pieces) - before, self.runtime.clock(), self.runtime.metrics)

    def _start(self) -> Logits:
        from ctxreuse.engines.generate import AnswerDecoder

        runtime, request = self.runtime, self.request
        self._began = runtime.clock()
        runtime.paused.on_request(request.ids, request.keys, self._was)
        done = runtime.prefill(
            request, reserve=self._room, forks=len(self._answers) - 1, turn=self._turn, log=self._log
        )
        self._prompt, self._number, self._started = done, done.record.number, True
        done.usage = msgspec.structs.replace(done.usage, verification=self._verification)
        for one in self._answers:
            one.usage = Usage(TokenUsage(), request=done.usage.request) if one.number else done.usage
        for one in self._answers:
            one.decoder = one.decoder or AnswerDecoder(
                self._text, runtime.engine.space, done.context.tokens, one.sampling, one.constraint
            )
            if runtime.drafting is not None:
                one.drafter = runtime.drafting.begin(request, one.sampling)
            one.exits = runtime.exiting.begin(request, one.sampling)
        return done.logits

    @property
    def _room(self) -> int:
        """Tokens that the longest answer may have."""
        longest = max(one.sampling.max_tokens for one in self._answers)
        return min(longest, max(self.runtime.engine.space.max_tokens - len(self.request.ids), 0))

    def _advance(self, going: Sequence[_Answer]) -> list[Logits | Exception]:
        runtime, ids = self.runtime, self.request.ids
        if self._prompt is not None:
            self._fork(going)
        batch: list[tuple[Context, Tokens]] = []
        rows = list[int]()
        for one in going:
            assert one.done is not None
            assert one.decoder is not None
            context = one.done.context
            draft = one.draft()
            batch.append((context, np.concatenate([ids[context.n :], one.decoder.last, draft])))
            rows.append(1 + len(draft))
        plans = [one.exits.plan() if isinstance(one.exits, AnswerExits) else None for one in going]
        found: list[Logits | Exception] = []
        for one, (context, _), result in zip(going, batch, runtime.steps.advance_all(batch, self._turn, rows, plans)):
            if isinstance(result, Exception):
                found.append(result)
                continue
            one.advanced = result
            one.note_exit()
            alone = not one.drafted and not result.load.drafted and result.step is None
            if runtime.cost is not None and alone:  # what one token costs
                runtime.cost.decode.observe(context.n, result.seconds)
            if result.step is not None and result.step.left >= 0:
                found.append(_only(result.step.token, runtime.engine.space.vocab_size))
            else:
                assert result.logits is not None
                found.append(result.logits)
        return found

    def _fork(self, going: Sequence[_Answer]) -> None:
        """Give each answer a context: the first that goes on continues the prompt's own."""
        first, *others = going
        done, self._prompt = self._prompt, None
        assert done is not None
        first.done, record = done, done.record
        if not others:
            return
        reserve = len(self.request.ids) + self._room
        with self.runtime.steps.exclusive():
            contexts = fork_context(self.runtime.engine, done.context, self.request.keys, len(others), reserve)
        if record.in_flight is not None:
            record.in_flight.room //= len(self._answers)  # the others have theirs
        for one, context in zip(others, contexts):
            own = ContextRecord(self.request, indexed=len(self.request.ids))
            one.done = PrefillResult(context, done.logits, done.usage, (), own)

    def cancel(self) -> None:
        """Cancel the request if no answer is wanted any more; returns at once."""
        if not any(one.wanted for one in self._answers):
            self.runtime.steps.cancel(self._turn)
            self.runtime.inflight.wake()

    def end(self, one: _Answer, finish: str, text: str, usage: Usage) -> None:
        """End an answer; see `PieceSource.end`."""
        runtime = self.runtime
        with self._lock:
            one.closed = True
            self._generated += usage.tokens.completion
            done, last = one.done, all(other.closed for other in self._answers)
            one.done = None
            if last and self._prompt is not None:  # no answer went on
                done, self._prompt = self._prompt, None
        if last:
            runtime.steps.end(self._turn)
        if done is not None and finish != "error":
            if one.drafter is not None and one.decoder is not None:  # tokens of a draft that nobody took
                taken = max(len(one.decoder.history) - 1 - len(one.pieces), len(self.request.ids))
                runtime.engine.crop(done.context, min(taken, done.context.n))
            usage = self._end_exits(one, done, usage)
            if runtime.drafting is not None:
                outcome = runtime.drafting.outcome(one.sampling, one.drafter)
                if done.record.logged is not None and outcome is not None:
                    runtime.requests.drafted(done.record.logged, outcome)
                if one.drafter is not None:
                    runtime.drafting.end(self.request, one.drafter, done.context.tokens)
            ids, nbytes = done.context.tokens.copy(), done.context.nbytes  # released, it may be another request's
            keys = runtime.release(done)
            if not one.number:  # the one that most who choose none of them continue
                kind = infer(finish, tools_in(text), text=bool(text))
                runtime.paused.on_pause(ids, keys, kind, nbytes=nbytes, max_kl=self.request.max_kl)
        elif done is not None:
            runtime.drop(done)
        if last and runtime.recorder is not None and self._number >= 0:
            runtime.recorder.ended(self._number, output=self._generated, busy=runtime.clock() - self._began)
        if runtime.metrics is not None:
            spared = runtime.cost.prefill.seconds(usage.tokens.cached, 0) if runtime.cost is not None else None
            runtime.metrics.record(usage, finish, spared)
            one.pace.end(runtime.metrics)
            missed = {} if one.number else runtime.requests.missed_tokens(usage.request)
            for reason, tokens in missed.items():
                runtime.metrics.add("ctxreuse_missed_tokens_total", tokens, reason)

    def _end_exits(self, one: _Answer, done: PrefillResult, usage: Usage) -> Usage:
        """Verify the last tokens of an answer that left early, and count them; returns its usage with them."""
        runtime, exits = self.runtime, one.exits
        if exits is None:
            return usage
        outcome = exits
        if isinstance(exits, AnswerExits):
            try:
                with runtime.steps.exclusive():
                    exits.complete(runtime.engine, done.context)
            except CtxReuseError as error:
                log.warning("the last tokens of an answer could not be verified: %s", error)
            outcome = exits.outcome()
            one.count_exits()
            if one.usage is not None:
                tokens = msgspec.structs.replace(one.usage.tokens, completion=usage.tokens.completion)
                usage = msgspec.structs.replace(one.usage, tokens=tokens)
        assert isinstance(outcome, ExitOutcome)
        runtime.exiting.count(outcome)
        if done.record.logged is not None:
            runtime.requests.exited(done.record.logged, outcome)
        return usage


def _only(token: int, vocabulary: int) -> Logits:
    """Logits of a distribution that knows one token, as a ramp says no more."""
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[token] = 0.0
    return logits


class _Pace:
    """When the tokens of an answer came: seconds, by the runtime's clock."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        self._tokens = 0

    def drawn(self, tokens: int, now: float, metrics: Metrics | None) -> None:
        """Note that a pass gave ``tokens`` tokens."""
        if self._tokens and metrics is not None:
            for _ in range(tokens):
                metrics.observe("ctxreuse_inter_token_seconds", (now - self._last) / tokens)
        elif not self._tokens:
            self._first = now
        if tokens:
            self._tokens, self._last = self._tokens + tokens, now

    def end(self, metrics: Metrics) -> None:
        """Count how fast they came."""
        if self._tokens > 1 and self._last > self._first:
            speed = (self._tokens - 1) / (self._last - self._first)
            metrics.observe("ctxreuse_generation_tokens_per_second", speed)


class _Answer:
    """State of one answer of a group, whose lock guards all but ``wanted``."""

    def __init__(self, number: int, sampling: SamplingParams, constraint: Constraint | None) -> None:
        self.number, self.sampling, self.constraint = number, sampling, constraint
        self.pieces: deque[GeneratedToken] = deque()
        self.decoder: AnswerDecoder | None = None
        self.done: PrefillResult | None = None
        self.usage: Usage | None = None
        self.error: BaseException | None = None
        self.wanted, self.closed = True, False
        self.drafter: AnswerDrafter | None = None
        self.exits: AnswerExits | ExitOutcome | None = None
        self.advanced, self.pace = Advanced(None, 0.0), _Pace()
        self._draft = _NO_DRAFT

    @property
    def goes_on(self) -> bool:
        """True if it needs another piece."""
        return not self.closed and self.error is None and not (self.decoder is not None and self.decoder.ended)

    @property
    def drafted(self) -> int:
        """Tokens of the draft that is checked now."""
        return len(self._draft)

    def note_exit(self) -> None:
        """Note what became of its last token's chance to leave early."""
        exits, advanced = self.exits, self.advanced
        if not isinstance(exits, AnswerExits):
            return
        if advanced.step is not None:
            exits.stepped(advanced.step, advanced.seconds, advanced.load)
        else:
            exits.passed("draft" if self.drafted else "batch")
        self.count_exits()

    def count_exits(self) -> None:
        """Let its usage have the exits so far."""
        exits = self.exits
        if isinstance(exits, AnswerExits) and self.usage is not None:
            tokens, seconds = self.usage.tokens, self.usage.seconds
            tokens = msgspec.structs.replace(tokens, exited=exits.exited, disagreed=exits.disagreed)
            seconds = msgspec.structs.replace(seconds, saved=exits.saved + self._drafts_saved)
            self.usage = msgspec.structs.replace(self.usage, tokens=tokens, seconds=seconds)

    @property
    def _drafts_saved(self) -> float:
        return self.drafter.saved if self.drafter is not None and self.drafter.drafted else 0.0

    def draft(self) -> Tokens:
        """Return what may follow its last token, to be checked in the pass that computes that."""
        if self.drafter is not None and self.decoder is not None:
            # The last token that it may have is never fed.
            left = self.decoder.left - 1
            self._draft = self.drafter.next(self.decoder.history, left, self.advanced.load, self.decoder.constraint)
        return self._draft

    def take(self, logits: Logits | Exception, engine: Engine) -> None:
        """Draw tokens from its logits, [vocab] or [1 + draft, vocab]: as long as they are those of the draft, and one
        more, as each row is what follows them. The context then has all of them but the last. An error ends it."""
        if isinstance(logits, Exception):
            self.error = logits
            return
        assert self.decoder is not None
        draft, self._draft, drawn = self._draft, _NO_DRAFT, list[int]()
        try:
            for row in np.atleast_2d(logits):
                if self.decoder.ended or (drawn and drawn[-1] != draft[len(drawn) - 1]):
                    break
                self.pieces.append(self.decoder.next(row))
                drawn.append(self.pieces[-1].token)
            if self.done is not None and self.drafter is not None:
                context = self.done.context
                if len(drawn) <= len(draft) and not engine.crop(context, context.n - len(draft) - 1 + len(drawn)):
                    raise EngineError("the engine could not forget the part of a draft that was wrong")
                self._count(len(draft), drawn)
        except CtxReuseError as error:
            self.error = error

    def _count(self, drafted: int, drawn: Sequence[int]) -> None:
        assert self.drafter is not None
        self.drafter.checked(drawn, self.advanced.seconds, self.advanced.load)
        if drafted and self.usage is not None:
            tokens, seconds, own = self.usage.tokens, self.usage.seconds, self.drafter
            tokens = msgspec.structs.replace(
                tokens,
                drafted=own.drafted,
                accepted=own.accepted,
                drafted_by_model=own.drafted_by_model,
                accepted_by_model=own.accepted_by_model,
            )
            exits_saved = self.exits.saved if isinstance(self.exits, AnswerExits) else 0.0
            seconds = msgspec.structs.replace(seconds, saved=own.saved + exits_saved)
            self.usage = msgspec.structs.replace(self.usage, tokens=tokens, seconds=seconds)


class _Source:
    """One answer of a group as a `PieceSource`."""

    def __init__(self, group: AnswerGroup, one: _Answer) -> None:
        self._group, self._one = group, one

    @property
    def usage(self) -> Usage | None:
        return self._one.usage

    def next(self) -> GeneratedToken | None:
        return self._group.next(self._one)

    def cancel(self) -> None:
        self._one.wanted = False
        self._group.cancel()

    def end(self, finish: str, text: str, usage: Usage) -> None:
        self._group.end(self._one, finish, text, usage)

    def why(self, request: str, *, others: bool) -> Why:
        return self._group.runtime.why(request, others=others)


def pieces_in_turn(completions: Sequence[Completion]) -> Iterator[tuple[int, GeneratedToken]]:
    """Yield the pieces of several completions, each with its completion's number, one of each in turn."""
    left = list(enumerate(completions))
    while left:
        for number, completion in left:
            piece = next(completion, None)
            if piece is not None:
                yield number, piece
        left = [(number, completion) for number, completion in left if completion.finish is None]
