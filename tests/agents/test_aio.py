"""The asynchronous face: the same verbs, streaming, cancellation, many tasks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Answer, AsyncAnswer, AsyncMemory, AsyncSession, Memory, Session

from ctxreuse.errors import EngineError, SessionError

EXACT = {"max_tokens": 12, "ignore_eos": True}


def run(path: Path, engine: Any, story: Callable[[AsyncMemory], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await AsyncMemory.open(path / "m", engine) as memory:
            await story(memory)
            await memory.check()

    asyncio.run(main())


def test_every_verb_of_the_plain_face_is_there() -> None:
    pairs: tuple[tuple[type, type, set[str]], ...] = (
        (Memory, AsyncMemory, set()),
        (Session, AsyncSession, {"record"}),
        (Answer, AsyncAnswer, {"close"}),  # aclose, as of other asynchronous iterables
    )
    for plain, other, own in pairs:
        verbs = {name for name in vars(plain) if not name.startswith("_")} - own
        assert verbs <= set(dir(other)), f"{other.__name__} lacks {verbs - set(dir(other))}"
        for name in verbs & set(vars(other)):
            ours, theirs = inspect.getattr_static(plain, name), inspect.getattr_static(other, name)
            if inspect.isfunction(ours):
                assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_text_verbs(tmp_path: Path) -> None:
    async def story(memory: AsyncMemory) -> None:
        trunk = await memory.create("trunk")
        await trunk.system("s")
        first = await trunk.user("u", k=1)
        await trunk.assistant("a")
        await trunk.tool("t")
        fork = await trunk.fork("fork", at=first)
        await fork.append("user", "own")
        diff = await fork.diff(trunk)
        assert ([t.content for t in diff.here], [t.content for t in diff.there]) == (["own"], ["a", "t"])
        with pytest.raises(SessionError, match="has new turns"):
            await fork.commit()
        await fork.commit(onto=True)
        assert [turn.content for turn in await trunk.turns()] == ["s", "u", "a", "t", "own"]
        await trunk.rollback(-2)
        assert len(await trunk.messages()) == 3
        await fork.rename("renamed")
        assert fork.name == "renamed"
        assert (await memory.session("renamed", create=False)).id == fork.id
        data = await memory.export_json(trunk)
        copy = await memory.import_json(data, "copy")
        assert [t.content for t in await copy.turns()] == ["s", "u", "a"]
        assert [hit.turn.content for hit in await memory.search("own")] == ["own"]
        await memory.delete("renamed")
        await memory.delete(copy)
        assert [session.id for session in await memory.sessions()] == [trunk.id]
        assert (await memory.stats()).text.sessions == 1
        assert await memory.gc() > 0
        assert memory.engine is None
        with pytest.raises(EngineError, match="no engine"):
            await trunk.ask("?")
        await trunk.close()

    run(tmp_path, None, story)


def test_streaming(tmp_path: Path, engine: Any) -> None:
    async def story(memory: AsyncMemory) -> None:
        session = await memory.create()
        answer = await session.ask("Why?", **EXACT)
        pieces = [piece async for piece in answer]
        assert "".join(pieces) == await answer.text()
        turn = await answer.turn()
        assert turn == (await session.turns())[-1]
        assert (await answer.usage()).completion_tokens == 12
        assert len(await session.tokens()) > 0
        assert (await session.warm()).prompt_tokens > 0
        await session.evict()
        assert await (await session.complete(**EXACT)).text()

    run(tmp_path, engine, story)


def test_cancelling_the_task_stops_generation_and_keeps_what_was_said(tmp_path: Path, engine: Any) -> None:
    async def story(memory: AsyncMemory) -> None:
        session = await memory.create()
        begun = asyncio.Event()
        heard: list[str] = []

        async def read() -> None:
            async for piece in await session.ask("Why?", max_tokens=1500, ignore_eos=True):
                heard.append(piece)
                if len(heard) == 3:
                    begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        turn = (await session.turns())[-1]
        assert turn.meta == {"finish": "cancelled"}
        assert turn.content.startswith("".join(heard[:3]))
        await session.user("the session goes on")

    run(tmp_path, engine, story)


def test_leaving_the_block_ends_the_answer_and_the_same_task_is_warned(tmp_path: Path, engine: Any) -> None:
    async def story(memory: AsyncMemory) -> None:
        session = await memory.create()
        async with await session.ask("Why?", max_tokens=500, ignore_eos=True) as answer:
            async for _ in answer:
                break
            with pytest.raises(SessionError, match="has not ended"):
                await session.user("too early")
        assert (await session.turns())[-1].meta == {"finish": "cancelled"}

    run(tmp_path, engine, story)


def test_forty_tasks_on_one_session_starve_nobody(tmp_path: Path, engine: Any) -> None:
    # More waiting tasks than the loop's executor has threads, while the one they wait for needs threads to go on.
    async def story(memory: AsyncMemory) -> None:
        session, side = await memory.create(), await memory.create()
        answer = await session.ask("Why?", max_tokens=30, ignore_eos=True)
        waiting = [asyncio.create_task(session.user(str(i))) for i in range(40)]
        asking = asyncio.create_task(session.ask("Next?", **EXACT))
        async for piece in answer:
            await side.user(piece)
        await asyncio.gather(*waiting)
        assert await (await asking).text()
        turns = await session.turns()
        assert [turn.role for turn in turns] == ["user", "assistant", *["user"] * 41, "assistant"]
        assert [turn.content for turn in turns[2:42]] == [str(i) for i in range(40)]

    run(tmp_path, engine, story)


def test_a_task_cancelled_while_waiting_is_passed_over(tmp_path: Path, engine: Any) -> None:
    async def story(memory: AsyncMemory) -> None:
        session = await memory.create()
        async with await session.ask("Why?", max_tokens=500, ignore_eos=True) as answer:
            await answer.usage()
            tasks = [asyncio.create_task(session.user(str(i))) for i in range(3)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[2].cancel()
            await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        await tasks[1]
        assert [turn.content for turn in (await session.turns())[2:]] == ["1"]

    run(tmp_path, engine, story)
