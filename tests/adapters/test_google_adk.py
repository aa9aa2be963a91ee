"""Google's ADK: sessions and state as its in-memory service has them, memory, and a run of an agent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import AdkMemoryService, AdkSessionService
from google.adk.agents import BaseAgent
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.runners import Runner
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.in_memory_session_service import InMemorySessionService
from google.genai.types import Content, FunctionCall, FunctionResponse, Part


def said(author: str, text: str, at: float, **delta: Any) -> Event:
    content = Content(role="user" if author == "user" else "model", parts=[Part(text=text)])
    return Event(author=author, content=content, timestamp=at, actions=EventActions(state_delta=delta))


def plain(session: Any) -> Any:
    if session is None:
        return None
    events = [(one.id, one.author, one.model_dump_json(exclude_none=True)) for one in session.events]
    return (session.app_name, session.user_id, session.id, session.state, events)


def test_it_answers_as_the_service_in_memory_does(memory: Memory) -> None:
    async def compare() -> None:
        ours, theirs, dice = AdkSessionService(memory), InMemorySessionService(), random.Random(5)
        at = 1_800_000_000.0
        for _ in range(120):
            who = {"app_name": dice.choice(["app", "other/ü"]), "user_id": dice.choice(["anna", "b e"])}
            id, kind = dice.choice(["s1", "s/2"]), dice.randrange(6)
            both = [await one.get_session(**who, session_id=id) for one in (ours, theirs)]
            assert plain(both[0]) == plain(both[1])
            if both[0] is None:
                state = {"n": dice.randint(0, 9), "user:u": dice.randint(0, 9), "app:a": 1, "temp:t": 1}
                made = [await one.create_session(**who, state=state, session_id=id) for one in (ours, theirs)]
                assert made[0].state.items() >= {k: v for k, v in made[1].state.items() if k != "temp:t"}.items()
                with pytest.raises(AlreadyExistsError):
                    await ours.create_session(**who, session_id=id)
            elif kind < 3:
                at += 1.0
                keys = dice.choices(["n", "m", "user:u", "app:a", "temp:x"], k=2)
                delta = {key: dice.choice([1, "text", [1, {"a": None}]]) for key in keys}
                event = said(dice.choice(["user", "agent"]), f"word {at}", at, **delta)
                for one, session in zip((ours, theirs), both):
                    await one.append_event(session, event.model_copy(deep=True))
                assert both[0].state == both[1].state
            elif kind == 3:
                config = GetSessionConfig(num_recent_events=dice.randint(0, 3), after_timestamp=at - 2)
                found = [await one.get_session(**who, session_id=id, config=config) for one in (ours, theirs)]
                assert plain(found[0]) == plain(found[1])
            elif kind == 4 and dice.random() < 0.3:
                for one in (ours, theirs):
                    await one.delete_session(**who, session_id=id)
            app = {"app_name": who["app_name"]}
            for more in ({}, {"user_id": who["user_id"]}):
                lists = [await one.list_sessions(**app, **more) for one in (ours, theirs)]
                assert {s.id + s.user_id for s in lists[0].sessions} == {s.id + s.user_id for s in lists[1].sessions}
            assert await ours.get_user_state(**who) == await theirs.get_user_state(**who)

    asyncio.run(compare())


def test_sessions_survive_are_turns_and_an_event_is_added_once(tmp_path: Path) -> None:
    who = {"app_name": "app", "user_id": "anna", "session_id": "s"}
    call = Part(function_call=FunctionCall(id="c", name="tide", args={"hour": 5}))
    result = Part(function_response=FunctionResponse(id="c", name="tide", response={"feet": 5}))

    async def fill(service: AdkSessionService) -> None:
        session = await service.create_session(**who)
        await service.append_event(session, said("user", "How high is the water?", 1.0))
        await service.append_event(session, Event(author="keeper", content=Content(role="model", parts=[call])))
        await service.append_event(session, Event(author="keeper", content=Content(role="user", parts=[result])))
        last = said("keeper", "Five feet.", 4.0, seen=True)
        for _ in range(2):
            await service.append_event(session, last.model_copy(deep=True))
        assert (await service.append_event(session, said("x", "y", 5.0).model_copy(update={"partial": True}))).partial

    with Memory.open(tmp_path / "m") as memory:
        asyncio.run(fill(AdkSessionService(memory)))
    with Memory.open(tmp_path / "m") as memory:
        service = AdkSessionService(memory)
        session = asyncio.run(service.get_session(**who))
        assert [len(session.events), session.state] == [4, {"seen": True}]
        assert [one.role for one in service.session("app", "anna", "s").turns()] == [
            "system", "user", "assistant", "tool", "assistant",
        ]  # fmt: skip
        assert memory.search("water", namespace="adk/=app/=anna")[0].turn.content == "How high is the water?"


def test_threads_and_tasks_use_two_services_on_one_memory(memory: Memory) -> None:
    both = [AdkSessionService(memory), AdkSessionService(memory)]

    async def chat(number: int) -> None:
        who = {"app_name": "app", "user_id": "anna", "session_id": f"s{number}"}
        session = await both[number % 2].create_session(**who)
        for n in range(4):
            await both[number % 2].append_event(
                session, said("user", f"{number} {n}", float(n), **{f"user:{number}": n})
            )

    async def tasks() -> None:
        await asyncio.gather(*(chat(number) for number in range(4)))

    asyncio.run(tasks())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: asyncio.run(chat(number)), range(4, 8)))
    for number in range(8):
        session = asyncio.run(both[1].get_session(app_name="app", user_id="anna", session_id=f"s{number}"))
        assert [event.content.parts[0].text for event in session.events] == [f"{number} {n}" for n in range(4)]
        assert session.state == {f"user:{other}": 3 for other in range(8)}


def test_state_of_a_user_that_a_kill_left_out_is_taken_over(memory: Memory) -> None:
    service = AdkSessionService(memory)
    who = {"app_name": "app", "user_id": "anna", "session_id": "s"}
    asyncio.run(service.create_session(**who))
    from ctxreuse_agents.adapters.google_adk import _turn_of

    service.session("app", "anna", "s").extend([_turn_of(said("a", "x", 1.0, **{"user:name": "Anna"}))])
    assert asyncio.run(service.get_session(**who)).state == {"user:name": "Anna"}
    assert asyncio.run(service.get_user_state(app_name="app", user_id="anna")) == {"name": "Anna"}


class Echo(BaseAgent):
    async def _run_async_impl(self, ctx: Any) -> AsyncIterator[Event]:
        count = ctx.session.state.get("count", 0) + 1
        yield said("echo", f"Heard {len(ctx.session.events)}.", float(count), count=count)


def test_an_agent_runs_on_it_and_its_sessions_become_memories(memory: Memory) -> None:
    sessions, memories = AdkSessionService(memory), AdkMemoryService(memory)
    who = {"app_name": "app", "user_id": "anna"}

    async def run() -> tuple[Any, Any, Any, Any]:
        agent = Echo(name="echo")
        runner = Runner(agent=agent, app_name="app", session_service=sessions, memory_service=memories)
        await sessions.create_session(**who, session_id="s")
        for text in ("The lamp is made of brass.", "The boiler leaks.", "Ships pass at noon."):
            message = Content(role="user", parts=[Part(text=text)])
            async for _ in runner.run_async(user_id="anna", session_id="s", new_message=message):
                pass
        session = await sessions.get_session(**who, session_id="s")
        for _ in range(2):
            await memories.add_session_to_memory(session)
        await memories.add_memory(**who, memories=[MemoryEntry(content=Content(parts=[Part(text="Likes boilers.")]))])
        found = await memories.search_memory(**who, query="boiler")
        other = await memories.search_memory(app_name="app", user_id="bert", query="boiler")
        leaks = next(one for one in found.memories if "leaks" in one.content.parts[0].text)
        await memories.delete_memory(**who, memory_id=leaks.id)
        await memories.add_session_to_memory(session)
        return session, found, other, await memories.search_memory(**who, query="boiler")

    session, found, other, after = asyncio.run(run())
    assert [len(session.events), session.state["count"]] == [6, 3]
    assert {one.content.parts[0].text for one in found.memories} == {"The boiler leaks.", "Likes boilers."}
    assert found.memories[0].timestamp
    assert other.memories == []
    assert [one.content.parts[0].text for one in after.memories] == ["Likes boilers."]
