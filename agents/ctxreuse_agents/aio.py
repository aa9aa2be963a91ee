"""The same memory for asyncio: methods are coroutines, answers are iterated with ``async for``.

Work runs in threads of the loop's default executor. Waiting for a session's turn lock blocks none of them, so any
number of tasks may wait without starving the lock's owner.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from ctxreuse.engines import Engine
from ctxreuse.engines.sampling import SamplingParams, SamplingSettings
from ctxreuse.engines.text import ToolCall
from ctxreuse.planner import DocumentOrder
from ctxreuse.runtime import RuntimeProtocol, Usage
from ctxreuse.store import Ledger, NewTurn, Turn
from ctxreuse.why import Why
from ctxreuse_agents._session import make_question
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Diff, Session
from ctxreuse_agents.tools import FunctionTools, ToolLike, join_results, result_text
from ctxreuse_agents.turn_lock import TurnLock

__all__ = ["AsyncAnswer", "AsyncMemory", "AsyncSession"]

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


async def _in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run ``work`` in a thread; if this task is cancelled, raise only after it has ended."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **named))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.shield(asyncio.wait([running]))
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise


def _awaited(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the coroutine method that runs a method of the object's ``sync`` in a thread."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        return await _in_thread(method, self.sync, *args, **named)

    return call


def _session(
    method: Callable[Concatenate[S, P], Session],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncSession]]:
    """As `_awaited`, for a method that returns a session."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **named: P.kwargs) -> AsyncSession:
        return AsyncSession(await _in_thread(method, self.sync, *args, **named))

    return call


def _opener(opener: Callable[P, Memory]) -> Callable[P, Coroutine[Any, Any, AsyncMemory]]:
    @functools.wraps(opener)
    async def call(*args: P.args, **named: P.kwargs) -> AsyncMemory:
        return AsyncMemory(await _in_thread(opener, *args, **named))

    return call


async def _enter(lock: TurnLock) -> None:
    loop = asyncio.get_running_loop()
    taken = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(taken.set)

    if not lock.enter(asyncio.current_task(), wake):
        try:
            await taken.wait()
        except BaseException:
            lock.cancel_wait(wake)
            raise


@asynccontextmanager
async def _holding(lock: TurnLock) -> AsyncIterator[None]:
    await _enter(lock)
    try:
        yield
    finally:
        lock.leave()


class AsyncAnswer:
    """An `Answer` for one task: ``async for piece in answer``.

    Cancelling the task stops generation after the current token and stores what there is; so does ``aclose()``, or
    ``async with``, which is needed where the loop is left early.
    """

    def __init__(self, answer: Answer) -> None:
        self.sync = answer

    async def __aiter__(self) -> AsyncIterator[str]:
        n = 0
        while (piece := await self.piece(n)) is not None:
            yield piece
            n += 1

    async def piece(self, n: int) -> str | None:
        """See `Answer.piece`."""
        step = asyncio.ensure_future(asyncio.to_thread(self.sync.piece, n))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self.sync.cancel()
            await _in_thread(self.sync.close)
            if step.done() and not step.cancelled():
                step.exception()
            raise

    async def tool_calls(self) -> list[ToolCall]:
        """Return the calls of tools; generates to the end. See `Answer.tool_calls`."""
        await self.text()
        return self.sync.tool_calls

    async def content(self) -> str:
        """Return the text besides calls of tools; generates to the end."""
        await self.text()
        return self.sync.content

    async def value(self) -> Any:
        """Return the answer as a value of its type; generates to the end. See `Answer.value`."""
        await self.text()
        return self.sync.value

    async def text(self) -> str:
        """Return the whole text; generates to the end."""
        return "".join([piece async for piece in self])

    async def turn(self) -> Turn | None:
        """Return the turn that the answer became; generates to the end."""
        await self.text()
        return self.sync.turn

    async def usage(self) -> Usage:
        """Return its cost so far; computes the prompt if necessary."""
        await self.piece(0)
        return self.sync.usage

    async def why(self, *, others: bool = False) -> Why:
        """See `Answer.why`."""
        await self.piece(0)
        return await _in_thread(self.sync.why, others=others)

    @property
    def session_id(self) -> str:
        """See `Answer.session_id`."""
        return self.sync.session_id

    @property
    def others(self) -> tuple[AsyncAnswer, ...]:
        """See `Answer.others`."""
        return tuple(AsyncAnswer(other) for other in self.sync.others)

    @property
    def tokens(self) -> list[int]:
        """See `Answer.tokens`."""
        return self.sync.tokens

    @property
    def finish(self) -> str | None:
        """See `Answer.finish`."""
        return self.sync.finish

    def cancel(self) -> None:
        """See `Answer.cancel`."""
        self.sync.cancel()

    async def aclose(self) -> None:
        """Stop and store what there is."""
        self.sync.cancel()
        await _in_thread(self.sync.close)

    async def __aenter__(self) -> AsyncAnswer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncSession:
    """A `Session` whose methods are coroutines; tasks take its turn lock in order of arrival."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    @property
    def id(self) -> str:
        """32 hex digits that never change."""
        return self.sync.id

    @property
    def name(self) -> str:
        """Its current name (a read of some microseconds)."""
        return self.sync.name

    @property
    def head(self) -> int:
        """The id of its last turn; 0 if it has none (a read of some microseconds)."""
        return self.sync.head

    @property
    def max_kl(self) -> float | None:
        """See `Session.max_kl` (a read of some microseconds)."""
        return self.sync.max_kl

    @property
    def lossy(self) -> str | None:
        """Deprecated: the name of ``max_kl``."""
        return self.sync.lossy

    fork = _session(Session.fork)
    rename = _awaited(Session.rename)
    pin = _awaited(Session.pin)
    set_ttl = _awaited(Session.set_ttl)
    turns = _awaited(Session.turns)
    messages = _awaited(Session.messages)
    tokens = _awaited(Session.tokens)
    warm = _awaited(Session.warm)
    evict = _awaited(Session.evict)
    why = _awaited(Session.why)
    pause = _awaited(Session.pause)
    resume = _awaited(Session.resume)
    superseded = _awaited(Session.superseded)
    hint = _awaited(Session.hint)
    close = _awaited(Session.close)

    async def append(self, role: str, content: str, /, **meta: Any) -> Turn:
        """Add one turn; durable on return."""
        return (await self.extend([NewTurn(role, content, meta)]))[0]

    async def extend(self, turns: list[NewTurn]) -> list[Turn]:
        """Add several turns at once: all of them or none."""
        async with _holding(self.sync._core.lock):
            return await _in_thread(self.sync._core.extend, turns)

    async def system(self, content: str, /, **meta: Any) -> Turn:
        """``append("system", …)``"""
        return await self.append("system", content, **meta)

    async def user(self, content: str, /, **meta: Any) -> Turn:
        """``append("user", …)``"""
        return await self.append("user", content, **meta)

    async def assistant(self, content: str, /, **meta: Any) -> Turn:
        """``append("assistant", …)``"""
        return await self.append("assistant", content, **meta)

    async def tool(self, content: str, /, **meta: Any) -> Turn:
        """``append("tool", …)``"""
        return await self.append("tool", content, **meta)

    async def ask(
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
    ) -> AsyncAnswer:
        """Ask; the question is durable on return, the answer when it ends. See `Session.ask`."""
        wanted = {"tools": tools, "tool_choice": tool_choice, "schema": schema, "n": n}
        wanted |= {"order": order, "pointers": pointers}
        return await self._ask(question, documents, sampling, settings, **wanted)

    async def complete(
        self,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[ToolLike] = (),
        tool_choice: str = "auto",
        schema: Any = None,
        n: int = 1,
        **settings: Unpack[SamplingSettings],
    ) -> AsyncAnswer:
        """Answer the history as it stands."""
        wanted = {"tools": tools, "tool_choice": tool_choice, "schema": schema, "n": n}
        return await self._ask(None, (), sampling, settings, **wanted)

    async def run_tools(
        self,
        question: str,
        functions: Sequence[Callable[..., Any]],
        /,
        *,
        rounds: int = 8,
        calls: int = 32,
        **how: Any,
    ) -> AsyncAnswer:
        """As `Session.run_tools`; functions may be coroutine functions, others run in threads. One after the other."""
        known = FunctionTools(functions)
        how = {**how, "tools": known.tools}
        choice = how.pop("tool_choice", "auto")
        answer = await self.ask(question, tool_choice=choice if rounds > 0 else "none", **how)
        for name in ("documents", "order", "pointers"):
            how.pop(name, None)
        for left in range(rounds - 1, -1, -1):
            made = await answer.tool_calls()
            if not made or answer.finish != "stop":
                break
            results = [await _result(known, call) if n < calls else known.too_many for n, call in enumerate(made)]
            calls = max(calls - len(made), 0)
            await self.tool(join_results(results), calls=[call.name for call in made])
            answer = await self.complete(tool_choice="auto" if left else "none", **how)
        return answer

    async def _ask(
        self,
        text: str | None,
        documents: Sequence[str],
        sampling: SamplingParams | None,
        settings: SamplingSettings,
        **wanted: Any,
    ) -> AsyncAnswer:
        core = self.sync._core
        core.state.engine()
        question = make_question(text, documents, sampling, settings, **wanted)
        await _enter(core.lock)
        begun: list[Answer] = []
        try:
            await _in_thread(lambda: begun.append(core.begin(question)))
        except asyncio.CancelledError:
            for answer in begun:
                for one in (answer, *answer.others):
                    await _in_thread(one.close)
            raise
        return AsyncAnswer(begun[0])

    async def commit(self, *, onto: bool = False) -> AsyncSession:
        """Bring this fork's turns to the session it was forked from. See `Session.commit`."""
        core = self.sync._core
        async with _holding(core.origin_lock()):
            return AsyncSession(Session(core.state, await _in_thread(core.commit, onto=onto)))

    async def rollback(self, to: Turn | int = -1) -> Turn | None:
        """Go back to a turn of this history, or by a negative number of turns."""
        async with _holding(self.sync._core.lock):
            return await _in_thread(self.sync._core.rollback, to)

    async def edit(self, turn: Turn | int, text: str | None, /, *, span: tuple[int, int] | None = None) -> Turn | None:
        """Replace or remove a turn's text, or a part of it, and keep the turns behind it. See `Session.edit`."""
        async with _holding(self.sync._core.lock):
            return await _in_thread(self.sync._core.edit, turn, text, span)

    async def diff(self, other: AsyncSession) -> Diff:
        """Compare with another session: what both share, and what only one of them has."""
        return await _in_thread(self.sync.diff, other.sync)


async def _result(known: FunctionTools, call: ToolCall) -> str:
    try:
        result = await _in_thread(known.begin, call)
        return result_text(await result if inspect.isawaitable(result) else result)
    except Exception as error:
        return result_text(error)


class AsyncMemory:
    """A `Memory` whose methods are coroutines: ``async with await AsyncMemory.open(path) as memory: …``"""

    def __init__(self, memory: Memory) -> None:
        self.sync = memory

    open = staticmethod(_opener(Memory.open))

    async def __aenter__(self) -> AsyncMemory:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engine(self) -> Engine | None:
        """See `Memory.engine`."""
        return self.sync.engine

    @property
    def runtime(self) -> RuntimeProtocol | None:
        """See `Memory.runtime`."""
        return self.sync.runtime

    @property
    def ledger(self) -> Ledger:
        """See `Memory.ledger`."""
        return self.sync.ledger

    create = _session(Memory.create)
    session = _session(Memory.session)
    import_json = _session(Memory.import_json)
    search = _awaited(Memory.search)
    recall = _awaited(Memory.recall)
    flush = _awaited(Memory.flush)
    stats = _awaited(Memory.stats)
    gc = _awaited(Memory.gc)
    tidy = _awaited(Memory.tidy)
    index = _awaited(Memory.index)
    compact = _awaited(Memory.compact)
    check = _awaited(Memory.check)
    close = _awaited(Memory.close)

    async def sessions(
        self, limit: int | None = None, offset: int = 0, *, prefix: str = "", namespace: str = ""
    ) -> list[AsyncSession]:
        """See `Memory.sessions`."""
        found = await _in_thread(self.sync.sessions, limit, offset, prefix=prefix, namespace=namespace)
        return [AsyncSession(session) for session in found]

    async def delete(self, session: AsyncSession | str) -> None:
        """Delete a session; its forks keep their whole history."""
        found = session if isinstance(session, AsyncSession) else await self.session(session, create=False)
        async with _holding(found.sync._core.lock):
            await _in_thread(found.sync._core.delete)

    async def export_json(self, session: AsyncSession | str) -> dict[str, Any]:
        """Return a session as a JSON-compatible dict."""
        return await _in_thread(self.sync.export_json, session.sync if isinstance(session, AsyncSession) else session)
