"""The same memory for asyncio: every verb awaits, answers are iterated with ``async for``.

Work runs in threads of the loop's default executor. Waiting for a session's turn blocks none of them, so any number of
tasks may wait without starving the one that they wait for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from ctxreuse.engines import Engine
from ctxreuse.engines.sampling import Sampling
from ctxreuse.engines.text import Message
from ctxreuse.keys import Tokens
from ctxreuse.runtime import Runtime, Usage
from ctxreuse.store import Hit, NewTurn, Turn
from ctxreuse.why import Why
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.gate import Gate
from ctxreuse_agents.inputs import check_text, choose_sampling, question_of
from ctxreuse_agents.memory import Memory, MemoryStats
from ctxreuse_agents.segments import Draft
from ctxreuse_agents.session import Diff, Session

__all__ = ["AsyncAnswer", "AsyncMemory", "AsyncSession"]

T = TypeVar("T")


async def _enter(gate: Gate) -> None:
    loop = asyncio.get_running_loop()
    held = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(held.set)

    if not gate.enter(asyncio.current_task(), wake):
        try:
            await held.wait()
        except BaseException:
            gate.forsake(wake)
            raise


async def _settled(work: Callable[..., T], *args: Any, **named: Any) -> T:
    """Run ``work`` in a thread and, even if this task is cancelled meanwhile, leave only after it ended."""
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


@asynccontextmanager
async def _held(gate: Gate) -> AsyncIterator[None]:
    await _enter(gate)
    try:
        yield
    finally:
        gate.leave()


class AsyncAnswer:
    """An `Answer` for one task: ``async for piece in answer``. Cancelling the task stops generation after the token in
    the making and stores what there is; leaving the loop early needs ``aclose()`` or ``async with``."""

    def __init__(self, answer: Answer) -> None:
        self.sync = answer

    async def __aiter__(self) -> AsyncIterator[str]:
        n = 0
        while (piece := await self._piece(n)) is not None:
            yield piece
            n += 1

    async def _piece(self, n: int) -> str | None:
        step = asyncio.ensure_future(asyncio.to_thread(self.sync.piece, n))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self.sync.cancel()
            await _settled(self.sync.close)
            if step.done() and not step.cancelled():
                step.exception()
            raise

    async def text(self) -> str:
        """The whole text; generates to the end first."""
        return "".join([piece async for piece in self])

    async def turn(self) -> Turn | None:
        """The turn that the answer became; generates to the end first."""
        await self.text()
        return self.sync.turn

    async def usage(self) -> Usage:
        """What it cost so far; computes the prompt first if that has not been done."""
        await self._piece(0)
        return self.sync.usage

    async def aclose(self) -> None:
        """Stop here and store what there is."""
        self.sync.cancel()
        await _settled(self.sync.close)

    async def __aenter__(self) -> AsyncAnswer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncSession:
    """A `Session` whose verbs await; tasks take their turns in the order of asking."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    @property
    def id(self) -> str:
        """32 hex digits that never change."""
        return self.sync.id

    @property
    def name(self) -> str:
        """Its name now (a read of some microseconds)."""
        return self.sync.name

    @property
    def head(self) -> int:
        """The id of its last turn; 0 if it has none (a read of some microseconds)."""
        return self.sync.head

    @property
    def lossy(self) -> str | None:
        """The worst level of KV that it may reuse (a read of some microseconds)."""
        return self.sync.lossy

    async def append(self, role: str, content: str, /, **meta: Any) -> Turn:
        """Add one turn; durable on return."""
        return (await self.extend([NewTurn(role, content, meta)]))[0]

    async def extend(self, turns: list[NewTurn]) -> list[Turn]:
        """Add several turns at once: all are durable, or none."""
        for turn in turns:
            check_text(turn.role, turn.content)
        async with _held(self.sync.gate):
            return await _settled(self.sync.extend_held, turns)

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
        self, question: str, /, *, documents: Sequence[str] = (), sampling: Sampling | None = None, **settings: Any
    ) -> AsyncAnswer:
        """Ask, with ``documents`` before the question; it is durable on return, the answer when it ends."""
        return await self._begin(question_of(question, documents), sampling, settings)

    async def complete(self, *, sampling: Sampling | None = None, **settings: Any) -> AsyncAnswer:
        """Answer the history as it stands."""
        return await self._begin(None, sampling, settings)

    async def _begin(self, draft: Draft | None, sampling: Sampling | None, settings: Mapping[str, Any]) -> AsyncAnswer:
        self.sync.shared.engine()
        chosen = choose_sampling(sampling, settings)
        await _enter(self.sync.gate)
        begun: list[Answer] = []
        try:
            await _settled(lambda: begun.append(self.sync.begin(draft, chosen)))
        except asyncio.CancelledError:
            for answer in begun:
                await _settled(answer.close)
            raise
        return AsyncAnswer(begun[0])

    async def fork(self, name: str | None = None, *, at: Turn | int | None = None) -> AsyncSession:
        """A new session with this one's history."""
        return AsyncSession(await _settled(self.sync.fork, name, at=at))

    async def commit(self, *, onto: bool = False) -> AsyncSession:
        """Bring this fork's turns to the session it was forked from."""
        async with _held(self.sync.origin_gate()):
            return AsyncSession(await _settled(self.sync.commit_held, onto=onto))

    async def rollback(self, to: Turn | int = -1) -> Turn | None:
        """Go back to a turn of this history, or by a negative number of turns."""
        async with _held(self.sync.gate):
            return await _settled(self.sync.rollback_held, to)

    async def diff(self, other: AsyncSession) -> Diff:
        """What the two share, and what only one of them has."""
        return await _settled(self.sync.diff, other.sync)

    async def rename(self, name: str) -> None:
        """Give it another name."""
        await _settled(self.sync.rename, name)

    async def turns(self) -> list[Turn]:
        """The whole history, first turn first."""
        return await _settled(self.sync.turns)

    async def messages(self) -> list[Message]:
        """The history as a chat template sees it."""
        return await _settled(self.sync.messages)

    async def tokens(self, *, generate: bool = False) -> Tokens:
        """The ids of the context, int32 [n]; with ``generate`` up to where an answer begins."""
        return await _settled(self.sync.tokens, generate=generate)

    async def warm(self) -> Usage:
        """Compute the context now and keep its KV."""
        return await _settled(self.sync.warm)

    async def evict(self) -> int:
        """Drop the KV that nothing but the path to here uses."""
        return await _settled(self.sync.evict)

    async def pause(self, kind: str, expect: float | None = None) -> None:
        """Say why it waits now, and for how long if that is known: see `Session.pause`."""
        await _settled(self.sync.pause, kind, expect)

    async def resume(self) -> None:
        """The next request is about to be made."""
        await _settled(self.sync.resume)

    async def superseded(self, turn: Turn | int) -> int:
        """Drop the KV from a turn on: nobody will ask for it again."""
        return await _settled(self.sync.superseded, turn)

    async def hint(self, name: str, until: float | None = None) -> bool:
        """What is known of its future: see `Session.hint`."""
        return await _settled(self.sync.hint, name, until)

    async def why(self, request: str = "", *, others: bool = False) -> Why:
        """See `Session.why`."""
        return await _settled(lambda: self.sync.why(request, others=others))

    async def close(self) -> None:
        """End the unfinished answers that were begun through this handle."""
        await _settled(self.sync.close)


class AsyncMemory:
    """A `Memory` whose verbs await. ``async with await AsyncMemory.open(path) as memory: …``"""

    def __init__(self, memory: Memory) -> None:
        self.sync = memory

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        engine: str | os.PathLike[str] | Engine | Runtime | None = None,
        *,
        tenant: str = "default",
        capacity: int | None = None,
        readonly: bool = False,
        lossy: str | None = None,
        repair: str = "",
    ) -> AsyncMemory:
        """As `Memory.open`."""
        options = {"tenant": tenant, "capacity": capacity, "readonly": readonly, "lossy": lossy, "repair": repair}
        return cls(await _settled(Memory.open, path, engine, **options))

    async def __aenter__(self) -> AsyncMemory:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engine(self) -> Engine | None:
        """The attached engine; None if this memory holds text only."""
        return self.sync.engine

    @property
    def runtime(self) -> Runtime | None:
        """What computes and keeps KV; None if this memory holds text only."""
        return self.sync.runtime

    async def create(self, name: str | None = None, *, lossy: str | None = None) -> AsyncSession:
        """A new, empty session."""
        return AsyncSession(await _settled(self.sync.create, name, lossy=lossy))

    async def session(self, id_or_name: str, *, create: bool = True, lossy: str | None = None) -> AsyncSession:
        """The session of that id or name; made if there is none and ``create``. ``lossy``: as in `Memory.session`."""
        return AsyncSession(await _settled(self.sync.session, id_or_name, create=create, lossy=lossy))

    async def sessions(self, limit: int | None = None, offset: int = 0) -> list[AsyncSession]:
        """Sessions, last changed first."""
        return [AsyncSession(session) for session in await _settled(self.sync.sessions, limit, offset)]

    async def search(self, text: str, limit: int = 20) -> list[Hit]:
        """Turns that contain all words of ``text``."""
        return await _settled(self.sync.search, text, limit)

    async def delete(self, session: AsyncSession | str) -> None:
        """Delete a session; forks of it keep their whole history."""
        found = session if isinstance(session, AsyncSession) else await self.session(session, create=False)
        async with _held(found.sync.gate):
            await _settled(self.sync.shared.ledger.delete, found.id)

    async def export_json(self, session: AsyncSession | str) -> dict[str, Any]:
        """A session as a dict that JSON can hold."""
        return await _settled(self.sync.export_json, session.sync if isinstance(session, AsyncSession) else session)

    async def import_json(self, data: Mapping[str, Any], name: str | None = None) -> AsyncSession:
        """A new session from `export_json`'s dict."""
        return AsyncSession(await _settled(self.sync.import_json, data, name))

    async def flush(self) -> None:
        """Wait until all KV that is queued is in the store."""
        await _settled(self.sync.flush)

    async def stats(self) -> MemoryStats:
        """How much there is."""
        return await _settled(self.sync.stats)

    async def gc(self) -> int:
        """Remove turns that no session can reach; returns how many."""
        return await _settled(self.sync.gc)

    async def check(self) -> None:
        """Compare everything that is counted or linked twice."""
        await _settled(self.sync.check)

    async def close(self) -> None:
        """End unfinished answers, commit what is queued, close."""
        await _settled(self.sync.close)
