"""One session: a durable chain of turns to ask, fork, commit, roll back and compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Unpack

import msgspec

from ctxreuse.block.levels import limit_name
from ctxreuse.engines.sampling import SamplingParams, SamplingSettings
from ctxreuse.engines.text import Message
from ctxreuse.errors import SessionError, StoreError
from ctxreuse.html import table, when
from ctxreuse.identity.keys import Tokens
from ctxreuse.pauses import kind_of
from ctxreuse.pauses.hints import check_hint
from ctxreuse.planner import DocumentOrder
from ctxreuse.runtime import Usage
from ctxreuse.store import NewTurn, Turn
from ctxreuse.store import Session as Record
from ctxreuse.why import RequestInfo, Why
from ctxreuse_agents._session import SessionCore, make_question
from ctxreuse_agents._state import MemoryState
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.retention import lifetime
from ctxreuse_agents.segments import message_of
from ctxreuse_agents.tools import FunctionTools, ToolLike, join_results

__all__ = ["Diff", "Session"]

# Seconds that warm() waits for the disk: at 0.1 GB/s the store's queue of 256 MiB is written in three.
_WARM_SECONDS = 30.0


#: Turns of a session that a notebook shows, and their columns.
_SHOWN, _TURN = 20, ("turn", "role", "text", "created")


def _row(turn: Turn) -> tuple[int, str, str, str]:
    return turn.id, turn.role, turn.content, when(turn.created)


class Diff(msgspec.Struct, frozen=True):
    """Two histories: the id of the last turn they share (0: none), and the turns that only one of them has."""

    common: int
    here: list[Turn]
    there: list[Turn]

    def _repr_html_(self) -> str:
        rows = [(side, *_row(turn)) for side, turns in (("here", self.here), ("there", self.there)) for turn in turns]
        return table(("", *_TURN), rows, f"shared up to turn {self.common}" if self.common else "nothing shared")


class Session:
    """A handle on one session; any number of handles, in any threads, may refer to the same session.

    Text is durable when a method returns. Methods that add turns or move the head take the session's turn lock in order
    of arrival: while an `Answer` is unfinished, others wait for it, and the thread that began it gets a SessionError
    instead of a deadlock. Reading and forking never wait.
    """

    def __init__(self, state: MemoryState, session_id: str) -> None:
        self._state, self._core = state, SessionCore(state, session_id)

    def __repr__(self) -> str:
        return f"Session({self.id[:8]})"

    def _repr_html_(self) -> str:
        record, turns = self.record, self.turns()
        last = turns[-_SHOWN:]
        more = f", the last {len(last)} of {len(turns):,} turns" if len(last) < len(turns) else ""
        return table(_TURN, map(_row, last), f"session {record.name}{more}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def id(self) -> str:
        """32 hex digits that never change."""
        return self._core.id

    @property
    def record(self) -> Record:
        """The ledger's record: name, head, origin, times. Raises SessionError once the session is deleted."""
        return self._core.record

    @property
    def name(self) -> str:
        """Its current name, unique in the memory."""
        return self.record.name

    @property
    def head(self) -> int:
        """The id of its last turn; 0 if it has none."""
        return self.record.head

    @property
    def max_kl(self) -> float | None:
        """The largest KL of the KV that it may reuse, in nats a token; None: exact KV only. See `Memory.session`."""
        return self._core.max_kl

    @property
    def lossy(self) -> str | None:
        """Deprecated: the name of ``max_kl``."""
        warnings.warn("Session.lossy is now max_kl, a number", DeprecationWarning, stacklevel=2)
        return limit_name(self.max_kl) or None

    # Writing

    def append(self, role: str, content: str, /, **meta: Any) -> Turn:
        """Add one turn; ``meta``: values that MessagePack can hold, stored with it.

        No model is called and nothing is tokenised. Raises SessionError for text that is not valid Unicode.
        """
        return self.extend([NewTurn(role, content, meta)])[0]

    def extend(self, turns: list[NewTurn]) -> list[Turn]:
        """Add several turns at once: all of them or none."""
        with self._core.lock.hold():
            return self._core.extend(turns)

    def system(self, content: str, /, **meta: Any) -> Turn:
        """``append("system", …)``"""
        return self.append("system", content, **meta)

    def user(self, content: str, /, **meta: Any) -> Turn:
        """``append("user", …)``"""
        return self.append("user", content, **meta)

    def assistant(self, content: str, /, **meta: Any) -> Turn:
        """``append("assistant", …)``"""
        return self.append("assistant", content, **meta)

    def tool(self, content: str, /, **meta: Any) -> Turn:
        """``append("tool", …)``"""
        return self.append("tool", content, **meta)

    # Requests

    def ask(
        self,
        question: str,
        /,
        *,
        documents: Sequence[str] = (),
        order: DocumentOrder = "cached",
        pointers: bool = False,
        sampling: SamplingParams | None = None,
        tools: Sequence[ToolLike] = (),
        tool_choice: str = "auto",
        schema: Any = None,
        n: int = 1,
        **settings: Unpack[SamplingSettings],
    ) -> Answer:
        """Ask; the question is durable on return, the answer when it ends.

        Args:
            question: text of the user's turn.
            documents: texts before the question, in the same turn. If the session's ``max_kl`` is one that the model's
                chunk profile can keep (``ctxreuse calibrate MODEL --chunks``), the KV of each is reused wherever it
                stands, in any order; else only after the same beginning, as of any text.
            order: of the documents. ``cached``: those whose KV is cached come first, in the order that has it, and then
                those that others will share, unless the KV of each is reused wherever it stands; `Why.reordered` says
                what that saved. ``ranked``: the same, and a line behind them tells the model the order given, best
                first. ``given``: as given.
            pointers: put a line that points to the earlier text in place of each document, of 400 characters or more,
                that the session has in an earlier turn, or this question twice, equal to the byte. That is what the
                turn then says; do not edit the text that it points to.
            sampling: how to sample.
            tools: what it may call: functions, OpenAI descriptions or `Tool`. `Answer.tool_calls` has its calls; give
                their results as turns of the role ``tool``, and `complete` with the same tools, or use `run_tools`.
            tool_choice: ``auto``, ``required``, ``none``, or the name of the tool that it must call.
            schema: the form of the answer: a type (dataclass, msgspec Struct, pydantic model) or a JSON schema;
                `Answer.value` is then a value of it.
            n: answers to be made from one prefill, side by side; the first becomes the session's turn, each of
                `Answer.others` that of a fork.
            settings: fields of `SamplingParams`, which replace those of ``sampling``.

        Raises ContextTooLongError (and adds no turn) if the question does not fit, EngineError without an engine,
        GrammarError for tools or a schema that cannot be used.
        """
        wanted = {"tools": tools, "tool_choice": tool_choice, "schema": schema, "n": n}
        wanted |= {"order": order, "pointers": pointers}
        return self._ask(question, documents, sampling, settings, **wanted)

    def complete(
        self,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[ToolLike] = (),
        tool_choice: str = "auto",
        schema: Any = None,
        n: int = 1,
        **settings: Unpack[SamplingSettings],
    ) -> Answer:
        """Answer the history as it stands, without a new question. Raises SessionError if it is empty."""
        wanted = {"tools": tools, "tool_choice": tool_choice, "schema": schema, "n": n}
        return self._ask(None, (), sampling, settings, **wanted)

    def run_tools(
        self,
        question: str,
        functions: Sequence[Callable[..., Any]],
        /,
        *,
        rounds: int = 8,
        calls: int = 32,
        **how: Any,
    ) -> Answer:
        """Ask, call the functions that the answer calls, give it their results, and so on until it answers in text.

        Each answer and the results of its calls are turns. An exception of a function is its result, which the model
        reads. Functions run in this thread, one after the other.

        Args:
            question: text of the user's turn.
            functions: what it may call; their names, docstrings and annotations are what it is shown.
            rounds: answers with calls at most; the one after them must be text.
            calls: calls at most, all rounds together; further ones get an error as their result.
            how: further arguments of `ask`; ``tool_choice`` is that of the first answer.
        """
        known = FunctionTools(functions)
        how = {**how, "tools": known.tools}
        choice = how.pop("tool_choice", "auto")
        answer = self.ask(question, tool_choice=choice if rounds > 0 else "none", **how)
        for name in ("documents", "order", "pointers"):
            how.pop(name, None)
        for left in range(rounds - 1, -1, -1):
            made = answer.tool_calls
            if not made or answer.finish != "stop":
                break
            results = [known.result(call) if n < calls else known.too_many for n, call in enumerate(made)]
            calls = max(calls - len(made), 0)
            self.tool(join_results(results), calls=[call.name for call in made])
            answer = self.complete(tool_choice="auto" if left else "none", **how)
        return answer

    def _ask(
        self,
        text: str | None,
        documents: Sequence[str],
        sampling: SamplingParams | None,
        settings: SamplingSettings,
        **wanted: Any,
    ) -> Answer:
        self._state.engine()
        question = make_question(text, documents, sampling, settings, **wanted)
        self._core.lock.wait()
        return self._core.begin(question)

    # Branches

    def fork(self, name: str | None = None, *, at: Turn | int | None = None) -> Session:
        """Return a new session with this one's history, up to ``at`` (a turn or its id) if given.

        Nothing is copied: O(1), with ``at`` O(log turns). Raises SessionError if ``at`` is not in the history or the
        name is taken.
        """
        record = self._state.ledger.fork(self.id, name, at.id if isinstance(at, Turn) else at)
        return Session(self._state, record.id)

    def commit(self, *, onto: bool = False) -> Session:
        """Bring this fork's turns to the session it was forked from, and return that session.

        If the origin is unchanged since the fork, its head becomes this fork's. Otherwise raises SessionError, or, with
        ``onto``, appends the fork's own turns to the origin as new turns, and the fork continues from there.
        """
        with self._core.origin_lock().hold():
            return Session(self._state, self._core.commit(onto=onto))

    def rollback(self, to: Turn | int = -1) -> Turn | None:
        """Go back to a turn of this history (or its id; 0: before the first); a negative number counts turns back.

        Returns the new last turn, None if none is left. The turns after it stay for forks that have them; the rest is
        removed by ``Memory.gc()``. Raises SessionError for a turn that is not in the history.
        """
        with self._core.lock.hold():
            return self._core.rollback(to)

    def edit(self, turn: Turn | int, text: str | None, /, *, span: tuple[int, int] | None = None) -> Turn | None:
        """Replace or remove a turn's text, or a part of it, and keep the turns behind it, all in one step.

        What stood there stays for forks that have it, and is removed by ``Memory.gc()`` otherwise. The KV before the
        change is reused. Behind it the KV of the same texts is reused where the session's ``max_kl`` allows that, as of
        documents that moved (see `ask`); else it is computed again with the next request.

        Args:
            turn: a turn of this history, or its id.
            text: the new text; None removes the turn, or what is in ``span``.
            span: characters of its text from the first up to the second, to be replaced; default: all.

        Returns:
            The turn with its new text and id; None if it was removed. Turns behind it have new ids, too.

        Raises SessionError for a turn or span that is not there, and for what is not text.
        """
        with self._core.lock.hold():
            return self._core.edit(turn, text, span)

    def diff(self, other: Session) -> Diff:
        """Compare with another session of the same memory: what both share, and what only one of them has."""
        here, there = self.head, other.head
        common = self._state.ledger.common(here, there)
        return Diff(common, self._core.after(common, here), self._core.after(common, there))

    def set_ttl(self, seconds: float | timedelta | None) -> None:
        """Have it deleted after so many seconds, as `Memory.delete` does; None: never. Forks made since go with it."""
        expires = None if seconds is None else self._state.keeper.clock.now() + lifetime(seconds)
        self._state.ledger.keep(self.id, expires=expires)

    def pin(self, on: bool = True) -> None:
        """Keep it: neither its time nor a limit of its namespace deletes it. ``on``: False: no more."""
        self._state.ledger.keep(self.id, pinned=on)

    def rename(self, name: str) -> None:
        """Rename it. Raises SessionError if the name is taken."""
        self._state.ledger.rename(self.id, name)

    # Reading

    def turns(self) -> list[Turn]:
        """Return the whole history, first turn first."""
        return self._core.turns()

    def messages(self) -> list[Message]:
        """Return the history as a chat template sees it."""
        return [message_of(turn) for turn in self.turns()]

    def tokens(self, *, generate: bool = False) -> Tokens:
        """Return the ids of the context, int32 [n]; turns without ids are tokenised, and their ids stored.

        ``generate``: the ids that `complete` starts from, with the generation prompt at the end.
        """
        return self._state.engine()[1].prompt(self.turns()).ids if generate else self._core.tokens()

    def warm(self) -> Usage:
        """Compute the context now and store its KV, so that the next question starts at once."""
        runtime, segments = self._state.engine()
        ids, cuts = segments.outline(self.turns())
        if not len(ids):
            raise SessionError("there is nothing to warm: the session has no turns", where=self.id)
        about = RequestInfo(session=self.id)
        usage = runtime.warm(runtime.request(ids, parts=cuts, max_kl=self.max_kl, about=about))
        if runtime.store is not None:
            try:
                runtime.store.flush(_WARM_SECONDS)
            except StoreError:
                pass  # the KV is in memory
        return usage

    def evict(self) -> int:
        """Drop the KV that only this session uses; returns the number of blocks. Text and ids stay."""
        ids = self.tokens()
        return self._state.engine()[0].forget(ids) if len(ids) else 0

    def why(self, request: str = "", *, others: bool = False) -> Why:
        """Explain what its last request, or the one with that id (``Usage.request``), reused and what it missed.

        ``others``: the explanation may reveal that another tenant has computed the same. Raises SessionError if the
        request is not known, or no longer.
        """
        session = "" if request else self.id
        return self._state.engine()[0].why(request, session=session, others=others)

    # Pauses: optional hints for the cache

    def pause(self, kind: str, expect: float | None = None) -> None:
        """Declare what the session waits for: ``tool``, ``tool:NAME``, ``end_of_turn``, ``length`` or ``unknown``.

        ``expect``: seconds until it continues, if known. The learned durations of such pauses decide which KV
        stays in memory and which is prefetched; without this call the kind is inferred from the answer. Raises
        ConfigError for another kind, EngineError without an engine.
        """
        kind_of(kind)
        self._state.engine()[0].pause(self.tokens(), kind, expect=expect, max_kl=self.max_kl)
        self._core.used = True

    def resume(self) -> None:
        """Declare that the pause is over and a request follows; `ask` implies it."""
        self._state.engine()[0].resume(self.tokens(generate=True))

    def superseded(self, turn: Turn | int) -> int:
        """Drop the KV from ``turn`` (or its id) on, where no other context shares it; returns the number of blocks.

        Text and ids stay. Raises SessionError for a turn that is not in the history.
        """
        wanted, turns = turn.id if isinstance(turn, Turn) else turn, self.turns()
        at = next((n for n, one in enumerate(turns) if one.id == wanted), None)
        if at is None:
            raise SessionError(f"turn {wanted} is not in the history of {self.name!r}", fix="Use a turn of turns()")
        runtime, segments = self._state.engine()
        keep = len(segments.context(turns[:at])) if at else 0
        return runtime.supersede(segments.context(turns), keep)

    def hint(self, name: str, until: float | None = None) -> bool:
        """Give a hint about its future use: ``share``, ``prefetch``, ``demote``, ``pin`` or ``retain``.

        A hint is a priority that decays, by half in five minutes or almost wholly within ``until`` seconds; it
        reserves nothing. Returns False if the session made no recent request. Raises ConfigError for another hint.
        """
        check_hint(name)
        ids = self.tokens()
        return bool(len(ids)) and self._state.engine()[0].hint(ids, name, until=until)

    def close(self) -> None:
        """End the unfinished answers of this handle; what they have so far is stored.

        If this handle was used, the session's KV becomes the first to be evicted.
        """
        self._core.close()
