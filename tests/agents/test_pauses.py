"""Sessions that say what they wait for, and those that do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory, Session
from ctxreuse_agents.aio import AsyncMemory

from ctxreuse.errors import ConfigError, EngineError, SessionError
from ctxreuse.pauses import State

EXACT: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
LONG = "The committee met again in the autumn to look at the plan for the new library. " * 12


def state(session: Session) -> State | None:
    assert session._state.runtime is not None
    runtime = session._state.runtime
    return runtime.paused.state(runtime.keys(session.tokens()))


@pytest.fixture
def session(asked: Memory) -> Session:
    made = asked.create("agent")
    made.system(LONG)
    assert made.ask("What was decided?", **EXACT).text
    return made


def test_nothing_has_to_be_said(session: Session) -> None:
    found = state(session)
    assert found is not None
    assert found.pause.stop == "length"  # the answer was cut at four tokens
    assert session.ask("And then?", **EXACT).text
    again = state(session)
    assert again is not None
    assert again.pause.stop == "length"


def test_a_pause_has_a_kind_and_may_have_an_end(session: Session) -> None:
    session.pause("tool:bash")
    found = state(session)
    assert found is not None
    assert (found.pause.stop, found.pause.tool.partition("/")[0]) == ("tool", "shell")
    far = found.worth
    session.pause("tool:bash", expect=1.0)
    near = state(session)
    assert near is not None
    assert near.worth > 3 * far
    session.resume()
    running = state(session)
    assert running is not None
    assert running.pause.stop == "running"


def test_closing_makes_it_the_first_to_go_and_asking_brings_it_back(session: Session) -> None:
    before = state(session)
    session.close()
    closed = state(session)
    assert before is not None
    assert closed is not None
    assert closed.worth < before.worth / 1000
    session.close()
    assert session.ask("Still there?", **EXACT).text
    back = state(session)
    assert back is not None
    assert back.worth > closed.worth * 1000


def test_looking_at_a_session_does_not_close_it(session: Session, asked: Memory) -> None:
    before = state(session)
    with asked.session("agent") as other:
        assert other.turns()
    assert state(session) is not None
    assert before is not None
    assert state(session).pause == before.pause  # type: ignore[union-attr]


def test_hints_change_the_order_and_hold_nothing(session: Session, asked: Memory) -> None:
    before = state(session)
    assert before is not None
    for name, more in (("retain", True), ("pin", True)):
        assert session.hint(name, until=60.0)
        now = state(session)
        assert now is not None
        assert (now.worth > before.worth) is more
    assert session.hint("demote")
    with pytest.raises(ConfigError, match="retain"):
        session.hint("forever")
    assert not asked.create("new").hint("pin")
    assert session.evict() > 0


def test_what_is_superseded_is_dropped_and_what_came_before_stays(session: Session) -> None:
    session.user(LONG.replace("library", "harbour"))
    assert session.complete(**EXACT).text
    asked = session._state.runtime
    assert asked is not None
    assert asked.store is not None
    asked.store.flush()
    turns = session.turns()
    early = asked.resumable_tokens(asked.store, asked.keys(session._state.engine()[1].context(turns[:2])))
    held = asked.resumable_tokens(asked.store, asked.keys(session.tokens()))
    assert held > early > 0
    assert session.superseded(turns[-2]) > 0
    left = asked.resumable_tokens(asked.store, asked.keys(session.tokens()))
    assert early <= left < held
    assert [turn.id for turn in session.turns()] == [turn.id for turn in turns], "text stays"
    with pytest.raises(SessionError):
        session.superseded(10**9)
    assert session.superseded(turns[0]) > 0
    assert asked.resumable_tokens(asked.store, asked.keys(session.tokens())) == 0


@pytest.mark.parametrize("kind", ["", "nap", "tool:" + "x" * 300, "end_of_turn:now", "closed:"])
def test_kinds_that_are_none(session: Session, kind: str) -> None:
    if kind.startswith("tool:"):
        session.pause(kind)  # any tool may have any name
        return
    with pytest.raises(ConfigError):
        session.pause(kind)


def test_text_alone_has_no_pauses(memory: Memory) -> None:
    session = memory.create("notes")
    session.user("Hello")
    with pytest.raises(EngineError):
        session.pause("tool")
    session.close()


def test_the_same_verbs_await(tmp_path: Path, engine: Any) -> None:
    asyncio.run(_verbs(tmp_path, engine))


async def _verbs(tmp_path: Path, engine: Any) -> None:
    async with await AsyncMemory.open(tmp_path / "memory", engine) as memory:
        session = await memory.create("agent")
        await session.user(LONG)
        assert await (await session.complete(**EXACT)).text()
        await session.pause("tool:read_file", 2.0)
        assert await session.hint("pin")
        await session.resume()
        turns = await session.turns()
        assert await session.superseded(turns[-1]) >= 0
        await session.close()
