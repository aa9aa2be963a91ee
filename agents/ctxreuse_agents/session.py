"""One session: a durable chain of turns that can be asked, forked, committed, rolled back and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import WeakSet

import msgspec

from ctxreuse.engines.sampling import Sampling
from ctxreuse.engines.text import Message
from ctxreuse.errors import ContextTooLongError, CtxReuseError, SessionError, StoreError
from ctxreuse.keys import Tokens
from ctxreuse.pauses import kind_of
from ctxreuse.pauses.hints import check_hint
from ctxreuse.runtime import Completion, Usage
from ctxreuse.store import NewTurn, Turn
from ctxreuse.store import Session as Record
from ctxreuse.why import About, Why
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.gate import Gate
from ctxreuse_agents.inputs import check_text, choose_sampling, question_of
from ctxreuse_agents.segments import Draft, message_of
from ctxreuse_agents.shared import Shared

__all__ = ["Diff", "Session"]

# How long warm() waits for the disk: at 0.1 GB/s the store's queue of 256 MiB is written in three seconds.
_WARM_SECONDS = 30.0
_CUT = ("stop_string", "cancelled", "error")


class Diff(msgspec.Struct, frozen=True):
    """Two histories: the id of the last turn they share (0: none), and the turns that only one of them has."""

    common: int
    here: list[Turn]
    there: list[Turn]


class Session:
    """A handle on one session; any number of handles, in any threads, may stand for the same session.

    All text is durable when a method returns. Methods that add turns or move the head take the session's turn lock, in
    the order of asking: while an `Answer` is unfinished, others wait for it, and the thread that began it gets a
    SessionError instead of waiting for itself. Reading and forking never wait.
    """

    def __init__(self, shared: Shared, session_id: str) -> None:
        self.shared, self._id = shared, session_id
        self.gate = shared.gate(session_id)
        self._answers: WeakSet[Answer] = WeakSet()
        self._used = False

    def __repr__(self) -> str:
        return f"Session({self._id[:8]})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def id(self) -> str:
        """32 hex digits that never change."""
        return self._id

    @property
    def record(self) -> Record:
        """What the ledger says of the session now: name, head, origin, times. Raises SessionError once deleted."""
        return self.shared.ledger.session(self._id)

    @property
    def name(self) -> str:
        """Its name now; unique in the memory."""
        return self.record.name

    @property
    def head(self) -> int:
        """The id of its last turn; 0 if it has none."""
        return self.record.head

    @property
    def lossy(self) -> str | None:
        """The worst level of KV that it may reuse, such as ``kl-0.01``; None: exact ones only. See `Memory.session`."""
        return self.shared.lossy_of(self.record)

    # Writing

    def append(self, role: str, content: str, /, **meta: Any) -> Turn:
        """Add one turn; durable on return. ``meta`` is stored beside it (values that MessagePack can hold).

        No model is called and nothing is tokenised. Raises SessionError for text that is not valid Unicode.
        """
        return self.extend([NewTurn(role, content, meta)])[0]

    def extend(self, turns: list[NewTurn]) -> list[Turn]:
        """Add several turns at once: all are durable, or none."""
        for turn in turns:
            check_text(turn.role, turn.content)
        with self.gate.hold():
            return self.extend_held(turns)

    def extend_held(self, turns: list[NewTurn]) -> list[Turn]:
        """For a caller who holds the session's gate: `extend`, with text already checked."""
        return self.shared.ledger.append(self._id, turns) if turns else []

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

    # Asking

    def ask(
        self, question: str, /, *, documents: Sequence[str] = (), sampling: Sampling | None = None, **settings: Any
    ) -> Answer:
        """Ask; the question is durable on return, the answer when it ends. ``settings`` are fields of `Sampling`.

        ``documents``: texts that stand before the question, in the same turn. Each one's KV is found again wherever it
        stands, in any order and number, if the session allows a ``lossy`` level that the model's card of chunks keeps
        (``ctxreuse calibrate MODEL --chunks``); ``usage`` of the answer says what was ``moved`` and what the ``gate``
        said. Without one documents are reused exactly, as any text is: where they stand after the same beginning.

        Raises ContextTooLongError (and adds no turn) if the question does not fit, EngineError without an engine.
        """
        return self._begin(question_of(question, documents), sampling, settings)

    def complete(self, *, sampling: Sampling | None = None, **settings: Any) -> Answer:
        """Answer the history as it stands, with no new question. Raises SessionError if there is none."""
        return self._begin(None, sampling, settings)

    def _begin(self, draft: Draft | None, sampling: Sampling | None, settings: Mapping[str, Any]) -> Answer:
        self.shared.engine()
        chosen = choose_sampling(sampling, settings)
        self.gate.wait()
        return self.begin(draft, chosen)

    def begin(self, draft: Draft | None, sampling: Sampling) -> Answer:
        """For a caller who holds the session's gate: store the draft and return the answer, which leaves the gate."""
        try:
            answer = self._start(draft, sampling)
        except BaseException:
            self.gate.leave()
            raise
        self._answers.add(answer)
        self._used = True
        self.shared.track(answer)
        return answer

    def _start(self, draft: Draft | None, sampling: Sampling) -> Answer:
        runtime, segments = self.shared.engine()
        ledger, session_id = self.shared.ledger, self._id
        turns = self.turns()
        if draft is None and not turns:
            raise SessionError(
                "there is nothing to complete: the session has no turns", where=session_id, fix="Use ask() or append()"
            )
        prompt = segments.prompt(turns, draft)
        longest = runtime.engine.space.max_tokens
        room = longest - len(prompt.ids)
        if room < 1:
            raise ContextTooLongError(
                f"the context would have {len(prompt.ids):,} tokens and the model takes {longest:,}, answer included",
                where=f"session {self.name}",
                fix="Nothing was added. Fork from an earlier turn, roll back, or append a summary to a new session",
            )
        limited = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        about = About(session=session_id, parts=prompt.parts, opening=_opening(turns, draft))
        completion = runtime.complete(
            prompt.ids, limited, branches=prompt.turn_ends, parts=prompt.cuts, lossy=self.lossy, about=about
        )
        if draft is not None:
            ids = prompt.draft.pack() if prompt.draft is not None else None
            meta = {"cuts": list(draft.cuts)} if draft.cuts else {}
            question = NewTurn(draft.role, draft.content, meta, ids, segments.space)
            head = turns[-1].id if turns else 0
            turns = [*turns, *ledger.append(session_id, [question], expected_head=head)]

        def keep(done: Completion, finish: str) -> Turn:
            segment = segments.answer(turns, prompt, done.text, done.tokens, cut=finish in _CUT)
            turn = NewTurn("assistant", done.text, {"finish": finish}, segment.pack(), segments.space)
            return ledger.append(session_id, [turn], expected_head=turns[-1].id)[0]

        return Answer(completion, keep, self.gate)

    # Branches

    def fork(self, name: str | None = None, *, at: Turn | int | None = None) -> Session:
        """A new session with this one's history, up to ``at`` (a turn or its id) if given.

        Nothing is copied: O(1), with ``at`` O(log turns). Raises SessionError if ``at`` is not in the history or the
        name is taken.
        """
        record = self.shared.ledger.fork(self._id, name, at.id if isinstance(at, Turn) else at)
        return Session(self.shared, record.id)

    def commit(self, *, onto: bool = False) -> Session:
        """Bring this fork's turns to the session it was forked from, and return that one.

        If the origin has not moved since, its head becomes this fork's. If it has: SessionError, or, with ``onto``,
        the fork's own turns are appended after the origin's head, as new turns, and the fork continues from there.
        """
        with self.origin_gate().hold():
            return self.commit_held(onto=onto)

    def origin_gate(self) -> Gate:
        """The turn lock of the session that this one was forked from. Raises SessionError if it is not a fork."""
        record = self.record
        if record.origin is None:
            raise SessionError("a session that is not a fork has nowhere to commit to", where=record.name)
        return self.shared.gate(record.origin)

    def commit_held(self, *, onto: bool) -> Session:
        """For a caller who holds the gate of this fork's origin: `commit`."""
        ledger, record = self.shared.ledger, self.record
        origin = ledger.session(record.origin or "")
        start = ledger.common(record.forked_at, record.head)
        if ledger.ancestor(start, origin.head) and ledger.ancestor(origin.head, record.head):
            ledger.move(origin.id, record.head, expected_head=origin.head)
        elif not onto:
            raise SessionError(
                f"{origin.name!r} has moved since {record.name!r} was forked from it",
                where=f"head {origin.head}, forked at {record.forked_at}",
                fix="commit(onto=True) appends the fork's own turns after the origin's head",
            )
        else:
            shared = max(start, ledger.common(origin.head, record.head), key=self._depth)
            own = [NewTurn(turn.role, turn.content, turn.meta) for turn in self._after(shared, record.head)]
            head = ledger.append(origin.id, own, expected_head=origin.head)[-1].id if own else origin.head
            ledger.move(record.id, head, expected_head=record.head)
        return Session(self.shared, origin.id)

    def rollback(self, to: Turn | int = -1) -> Turn | None:
        """Go back to a turn of this history (or its id; 0: before the first); a negative number counts turns back.

        Returns the new last turn, None if none is left. The turns left behind stay for the forks that have them; the
        rest is removed by ``Memory.gc()``. Raises SessionError for a turn that is not in the history.
        """
        with self.gate.hold():
            return self.rollback_held(to)

    def rollback_held(self, to: Turn | int) -> Turn | None:
        """For a caller who holds the session's gate: `rollback`."""
        ledger, record = self.shared.ledger, self.record
        turns = ledger.turns(record.head)
        target = to.id if isinstance(to, Turn) else to
        if target < 0:
            if -target > len(turns):
                raise SessionError(f"cannot go back {-target} turns of {len(turns)}", where=record.name)
            target = turns[target - 1].id if -target < len(turns) else 0
        elif target and all(turn.id != target for turn in turns):
            raise SessionError(
                f"turn {target} is not in the history of {record.name!r}",
                fix="Use a turn of turns(), or a negative number to count back",
            )
        ledger.move(record.id, target, expected_head=record.head)
        return ledger.turn(target) if target else None

    def diff(self, other: Session) -> Diff:
        """What this and another session of the same memory share, and what only one of them has."""
        ledger, here, there = self.shared.ledger, self.head, other.head
        common = ledger.common(here, there)
        return Diff(common, self._after(common, here), self._after(common, there))

    def rename(self, name: str) -> None:
        """Give it another name. Raises SessionError if the name is taken."""
        self.shared.ledger.rename(self._id, name)

    # Reading

    def turns(self) -> list[Turn]:
        """The whole history, first turn first."""
        return self.shared.ledger.turns(self.head)

    def messages(self) -> list[Message]:
        """The history as a chat template sees it."""
        return [message_of(turn) for turn in self.turns()]

    def tokens(self, *, generate: bool = False) -> Tokens:
        """The ids of the context as the engine will see it, int32 [n]; turns without ids are tokenised and kept.

        With ``generate``, the ids that `complete` would start from: they end where the assistant's answer begins.
        """
        segments = self.shared.engine()[1]
        return segments.prompt(self.turns()).ids if generate else segments.context(self.turns())

    def warm(self) -> Usage:
        """Compute the context now and keep its KV, so that the next question starts at once."""
        runtime, segments = self.shared.engine()
        ids, cuts = segments.outline(self.turns())
        if not len(ids):
            raise SessionError("there is nothing to warm: the session has no turns", where=self._id)
        usage = runtime.warm(ids, parts=cuts, lossy=self.lossy, about=About(session=self._id))
        if runtime.store is not None:
            try:
                runtime.store.flush(_WARM_SECONDS)
            except StoreError:
                pass  # the KV is in memory all the same; a store that cannot keep up costs time later, nothing else
        return usage

    def evict(self) -> int:
        """Drop the KV that nothing but the path to here uses; returns how many blocks went. Text and ids stay."""
        ids = self.tokens()
        return self.shared.engine()[0].forget(ids) if len(ids) else 0

    def why(self, request: str = "", *, others: bool = False) -> Why:
        """Why its last request, or the one of that id (``Usage.request``), reused what it did and no more.

        ``others``: the asker may know that another tenant has computed the same. Raises SessionError if it is not
        known (any more): only the last requests are.
        """
        session = "" if request else self._id
        return self.shared.engine()[0].why(request, session=session, others=others)

    # Pauses: none of these is needed, all make what is kept fit better

    def pause(self, kind: str, expect: float | None = None) -> None:
        """Say why the session waits now: ``tool``, ``tool:NAME``, ``end_of_turn``, ``length``, ``unknown``.

        ``expect``: seconds until it goes on, if that is known. How long such pauses last is learnt, and decides whose
        KV stays in memory, and whose is read ahead before it is needed. Without it the answer's stop reason and text
        are gone by. Raises ConfigError for another kind, EngineError without an engine.
        """
        kind_of(kind)
        self.shared.engine()[0].pause(self.tokens(), kind, expect=expect, lossy=self.lossy)
        self._used = True

    def resume(self) -> None:
        """The pause is over: the next request is about to be made. Asking says the same by itself."""
        self.shared.engine()[0].resume(self.tokens(generate=True))

    def superseded(self, turn: Turn | int) -> int:
        """The KV from ``turn`` (or its id) on will not be asked for again: it is dropped where no other context shares
        it. Returns how many blocks went; text and ids stay. Raises SessionError for a turn that is not in the history.
        """
        wanted, turns = turn.id if isinstance(turn, Turn) else turn, self.turns()
        at = next((n for n, one in enumerate(turns) if one.id == wanted), None)
        if at is None:
            raise SessionError(f"turn {wanted} is not in the history of {self.name!r}", fix="Use a turn of turns()")
        runtime, segments = self.shared.engine()
        keep = len(segments.context(turns[:at])) if at else 0
        return runtime.supersede(segments.context(turns), keep)

    def hint(self, name: str, until: float | None = None) -> bool:
        """What is known of its future: ``share``, ``prefetch``, ``demote``, ``pin`` or ``retain``.

        A hint is a priority that decays (half of it in five minutes; with ``until``, nearly all of it in so many
        seconds), never a promise: nothing is held for good. False if the session has not asked anything yet, or too
        long ago. Raises ConfigError for another hint.
        """
        check_hint(name)
        ids = self.tokens()
        return bool(len(ids)) and self.shared.engine()[0].hint(ids, name, until=until)

    def close(self) -> None:
        """End the unfinished answers that were begun through this handle; what they have so far is stored.

        If it asked something through this handle, nobody waits for its KV any more: it is the first to go.
        """
        for answer in list(self._answers):
            answer.close()
        if self._used:
            self._used = False
            with suppress(CtxReuseError):  # the session may be deleted by now: then there is nothing to keep either
                self.shared.engine()[0].pause(self.tokens(), "closed", lossy=self.lossy)

    def _after(self, ancestor: int, head: int) -> list[Turn]:
        return self.shared.ledger.turns(head)[self._depth(ancestor) :]

    def _depth(self, turn_id: int) -> int:
        return self.shared.ledger.turn(turn_id).depth if turn_id else 0


def _opening(turns: Sequence[Turn], draft: Draft | None) -> str:
    return turns[0].content if turns else draft.content if draft is not None else ""
