"""The core that `Session` and `AsyncSession` share: changes of one session, for callers that own its turn lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import msgspec

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ConfigError, ContextTooLongError, CtxReuseError, GrammarError, SessionError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.planner import DocumentOrder, check_order
from ctxreuse.runtime import Completion, Runtime
from ctxreuse.runtime.compaction import finish_deletions
from ctxreuse.store import NewTurn, Turn
from ctxreuse.store import Session as Record
from ctxreuse.toolcalls import Tool, ToolChoice, call_grammar, special_markers
from ctxreuse.why import RequestInfo
from ctxreuse_agents._state import MemoryState
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.inputs import check_text, choose_sampling, edited, question_of
from ctxreuse_agents.planning import plan_documents, point_to_repeats
from ctxreuse_agents.segments import Draft
from ctxreuse_agents.tools import AnswerType, ToolLike, tools_from
from ctxreuse_agents.turn_lock import TurnLock

__all__ = ["Question", "SessionCore", "make_question"]

#: Answers to one question at most.
MAX_ANSWERS = 64

_CUT = ("stop_string", "cancelled", "error")


class Question(msgspec.Struct, frozen=True):
    """A question: a draft turn (None: complete the history as it stands), and how to sample. ``documents`` are those in
    the draft, which may be put into another ``order``; ``pointers`` may stand for those that the session has before."""

    draft: Draft | None
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    form: Any = None
    answers: int = 1
    documents: tuple[str, ...] = ()
    order: DocumentOrder = "cached"
    pointers: bool = False


def make_question(
    text: str | None,
    documents: Sequence[str],
    sampling: SamplingParams | None,
    settings: Mapping[str, Any],
    *,
    tools: Sequence[ToolLike] = (),
    tool_choice: str = "auto",
    schema: Any = None,
    n: int = 1,
    order: DocumentOrder = "cached",
    pointers: bool = False,
) -> Question:
    """Check the arguments of `Session.ask` and `Session.complete` (``text`` None)."""
    if not 1 <= n <= MAX_ANSWERS:
        raise ConfigError(f"n is {n}: from 1 to {MAX_ANSWERS} answers can be had to one question")
    check_order(order)
    draft = question_of(text, documents) if text is not None else None
    found = tools_from(tools)
    form = None if schema is None else AnswerType(schema)
    how = choose_sampling(sampling, settings), found, _choice(tool_choice, found), form, n
    return Question(draft, *how, tuple(documents), order, pointers)


def _choice(given: str, tools: Sequence[Tool]) -> ToolChoice:
    if given in ("auto", "none"):
        return ToolChoice(given)  # type: ignore[arg-type]
    if not tools or given not in ("required", *(tool.name for tool in tools)):
        raise GrammarError(f"tool_choice is {given!r}", fix="Use auto, required, none or the name of a tool in tools")
    return ToolChoice("required", "" if given == "required" else given)


class SessionCore:
    """State of one handle on a session. ``extend``, ``begin``, ``rollback`` and ``delete`` need the session's
    ``lock``, ``commit`` that of its origin (`origin_lock`)."""

    def __init__(self, state: MemoryState, session_id: str) -> None:
        self.state, self.id = state, session_id
        self.lock = state.lock_of(session_id)
        self.used = False
        self._answers: WeakSet[Answer] = WeakSet()

    @property
    def record(self) -> Record:
        """The ledger's record of the session. Raises SessionError once it is deleted."""
        return self.state.ledger.session(self.id)

    @property
    def max_kl(self) -> float | None:
        """The session's limit, else the memory's; None: exact KV only."""
        return (self.state.max_kl if (own := self.record.max_kl) is None else own) or None

    def turns(self) -> list[Turn]:
        """All turns, first one first."""
        return self.state.ledger.turns(self.record.head)

    def tokens(self) -> Tokens:
        """Ids of the context, int32 [n]."""
        return self.state.engine()[1].context(self.turns())

    def extend(self, turns: Sequence[NewTurn]) -> list[Turn]:
        """Append turns: all of them or none. Raises SessionError for text that is not valid Unicode."""
        for turn in turns:
            check_text(turn.role, turn.content)
        return self.state.ledger.append(self.id, turns) if turns else []

    def begin(self, question: Question) -> Answer:
        """Store the draft and return the answer, which releases the lock when it ends, as an error here does."""
        try:
            answer = self._start(question)
        except BaseException:
            self.lock.leave()
            raise
        self._answers.update((answer, *answer.others))
        self.used = True
        return answer

    def _start(self, question: Question) -> Answer:
        draft, sampling = question.draft, question.sampling
        runtime, segments = self.state.engine()
        family = None
        if question.tools:
            assert runtime.text is not None
            segments, family = self.state.tool_segments(question.tools)
            special = special_markers(runtime.text, family)
            answer = question.form.grammar if question.form is not None else None
            if answer is not None and not family.begin and question.choice.mode == "auto":
                raise GrammarError(f"models of the family {family.name} cannot have both tools and a schema")
            grammar = call_grammar(family, question.tools, question.choice, special, answer)
            sampling = msgspec.structs.replace(sampling, grammar=grammar, shown_markers=tuple(special))
        elif question.form is not None:
            sampling = msgspec.structs.replace(sampling, grammar=question.form.grammar)
        ledger, session_id, turns = self.state.ledger, self.id, self.turns()
        if draft is None and not turns:
            raise SessionError(
                "there is nothing to complete: the session has no turns", where=session_id, fix="Use ask() or append()"
            )
        if draft is not None and len(question.documents) > 1:
            draft, prompt, reordered = plan_documents(
                draft, question.documents, question.order, turns, runtime, segments, self.max_kl
            )
        else:
            prompt, reordered = segments.prompt(turns, draft), None
        if draft is not None and question.pointers and (pointing := point_to_repeats(draft, turns)) != draft:
            draft, prompt = pointing, segments.prompt(turns, pointing)
        longest = runtime.space.max_tokens
        room = longest - len(prompt.ids)
        if room < 1:
            raise ContextTooLongError(
                f"the context would have {len(prompt.ids):,} tokens and the model takes {longest:,}, answer included",
                where=f"session {self.record.name}",
                fix="Nothing was added. Fork from an earlier turn, roll back, or append a summary to a new session",
            )
        limited = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        opening = turns[0].content if turns else draft.content if draft is not None else ""
        about = RequestInfo(session=session_id, parts=prompt.parts, first_message=opening, reordered=reordered)
        request = runtime.request(
            prompt.ids, parts=prompt.cuts, branches=prompt.turn_ends, max_kl=self.max_kl, about=about
        )
        completion, *more = runtime.complete_many(request, limited.answers(question.answers))
        if draft is not None:
            ids = prompt.draft.pack() if prompt.draft is not None else None
            meta = {"cuts": list(draft.cuts)} if draft.cuts else {}
            turn = NewTurn(draft.role, draft.content, meta, ids, segments.space)
            head = turns[-1].id if turns else 0
            turns = [*turns, *ledger.append(session_id, [turn], expected_head=head)]

        def answer_of(completion: Completion, owner: SessionCore, others: Sequence[Answer] = ()) -> Answer:
            def keep(done: Completion, finish: str) -> Turn:
                segment = segments.answer(turns, prompt, done.text, done.tokens, cut=finish in _CUT)
                turn = NewTurn("assistant", done.text, {"finish": finish}, segment.pack(), segments.space)
                return ledger.append(owner.id, [turn], expected_head=turns[-1].id)[0]

            made = Answer(completion, keep, owner.lock, family, question.form, session=owner.id, others=others)
            self.state.track(made)
            return made

        forks = [answer_of(one, self._fork_for_answer()) for one in more]
        return answer_of(completion, self, forks)

    def _fork_for_answer(self) -> SessionCore:
        """Fork the session as it stands, for an answer that has not ended."""
        fork = SessionCore(self.state, self.state.ledger.fork(self.id).id)
        fork.lock.enter(fork.lock, _nothing)  # of nobody: whoever asks the fork waits for that answer
        return fork

    def origin_lock(self) -> TurnLock:
        """Return the turn lock of the session that this one was forked from. Raises SessionError if it is no fork."""
        record = self.record
        if record.origin is None:
            raise SessionError("a session that is not a fork has no origin to commit to", where=record.name)
        return self.state.lock_of(record.origin)

    def commit(self, *, onto: bool) -> str:
        """Bring this fork's turns to its origin; returns the origin's id. See `Session.commit`."""
        return self.state.ledger.commit(self.id, onto=onto).id

    def edit(self, turn: Turn | int, text: str | None, span: tuple[int, int] | None) -> Turn | None:
        """Change a turn and keep those behind it. See `Session.edit`."""
        record, turns = self.record, self.turns()
        id = turn.id if isinstance(turn, Turn) else turn
        at = next((n for n, one in enumerate(turns) if one.id == id), None)
        if at is None:
            raise SessionError(f"turn {id} is not in the history of {record.name!r}", fix="Use a turn of turns()")
        new = [] if text is None and span is None else [edited(turns[at], text or "", span)]
        new += [NewTurn(one.role, one.content, one.meta, created=one.created) for one in turns[at + 1 :]]
        before = turns[at - 1].id if at else 0
        added = self.state.ledger.append(self.id, new, after=before, expected_head=record.head)
        return added[0] if text is not None or span is not None else None

    def rollback(self, to: Turn | int) -> Turn | None:
        """Go back to a turn. See `Session.rollback`."""
        ledger, record = self.state.ledger, self.record
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
        ledger.set_head(record.id, target, expected_head=record.head)
        return ledger.turn(target) if target else None

    def delete(self) -> int:
        """Delete the session, and what was computed of it; returns the number of blocks of KV."""
        state, runtime = self.state, self.state.runtime
        if runtime is None or runtime.text is None:
            state.ledger.delete(self.id)
            return 0
        if not isinstance(runtime, Runtime):
            blocks = runtime.erase(self._ids(), session=self.id, keep=self._others())
            state.ledger.delete(self.id)
            return blocks
        plan = runtime.eraser.plan_context(self._ids(), self.id, self._others())
        state.ledger.delete(self.id, note=msgspec.msgpack.encode(plan))
        return finish_deletions(state.ledger, runtime.eraser.carry_out)[1]

    def _ids(self) -> Tokens:
        with suppress(CtxReuseError):  # a history that the template refuses was never computed
            return self.tokens()
        return as_tokens([])

    def _others(self) -> Iterator[Tokens]:
        """Contexts of the other sessions that begin with the same turn."""
        ledger, segments = self.state.ledger, self.state.engine()[1]
        mine = self.turns()[:1]
        for session in ledger.sessions() if mine else ():
            turns = ledger.turns(session.head) if session.id != self.id else []
            if turns and (turns[0].role, turns[0].content) == (mine[0].role, mine[0].content):
                yield segments.context(turns)

    def after(self, ancestor: int, head: int) -> list[Turn]:
        """Return the turns after ``ancestor`` up to ``head``, by their ids; 0: before the first."""
        return self.state.ledger.turns(head)[self._depth(ancestor) :]

    def _depth(self, turn_id: int) -> int:
        return self.state.ledger.turn(turn_id).depth if turn_id else 0

    def close(self) -> None:
        """End the unfinished answers of this handle; if it was used, the session's KV is the first to be evicted."""
        for answer in list(self._answers):
            answer.close()
        if self.used:
            self.used = False
            with suppress(CtxReuseError):  # a deleted session has no KV
                self.state.engine()[0].pause(self.tokens(), "closed", max_kl=self.max_kl)


def _nothing() -> None:
    pass
