"""The OpenAI Agents SDK: its sessions on a memory, and runs on an engine in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents.tracing import set_tracing_disabled
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import OpenAIAgentsModel, OpenAIAgentsProvider, OpenAISession

from agents import Agent, ModelSettings, RunConfig, Runner, Session, SessionSettings, SQLiteSession, function_tool
from ctxreuse.errors import ConfigError, SessionError

set_tracing_disabled(True)

ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": " 3 + 3?"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2, "b": 2}', "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "sums"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "4", "annotations": []}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}]},
    {"role": "developer", "content": "Be brief."},
    {"type": "something_new", "nested": {"a": [1, None, 2.5]}},
]  # fmt: skip


def test_a_session_keeps_items_as_the_sdks_own_does(memory: Memory) -> None:
    async def talk(session: Any) -> list[Any]:
        seen: list[Any] = [await session.get_items(), await session.pop_item()]
        await session.add_items(ITEMS[:4])
        await session.add_items([])
        await session.add_items(ITEMS[4:])
        seen += [await session.get_items(), await session.get_items(limit=3), await session.get_items(limit=100)]
        seen += [await session.pop_item(), await session.get_items()]
        await session.clear_session()
        seen += [await session.get_items()]
        await session.add_items(ITEMS[:1])
        return [*seen, await session.get_items()]

    ours, theirs = OpenAISession(memory, "chat"), SQLiteSession("chat")
    assert isinstance(ours, Session)
    assert asyncio.run(talk(ours)) == asyncio.run(talk(theirs))


def test_items_are_turns_and_a_fork_is_a_session(memory: Memory) -> None:
    session = OpenAISession(memory, "chat", namespace="anna", session_settings=SessionSettings(limit=2))
    asyncio.run(session.add_items(ITEMS))
    assert [turn.role for turn in session.session.turns()][:4] == ["user", "user", "assistant", "tool"]
    assert session.session.messages()[2].tool_calls[0].name == "add"
    assert memory.search("3 + 3", namespace="anna")[0].session.name == "chat"
    fork = OpenAISession.of(session.session.fork("other", at=session.session.turns()[1]))
    asyncio.run(fork.add_items([{"role": "user", "content": "Or 5?"}]))
    assert asyncio.run(fork.get_items()) == [*ITEMS[:2], {"role": "user", "content": "Or 5?"}]
    assert asyncio.run(session.get_items()) == ITEMS[-2:]
    assert asyncio.run(session.get_items(limit=99)) == ITEMS


def test_it_survives_and_what_is_no_item_is_refused(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m") as memory:
        session = OpenAISession(memory, "chat")
        asyncio.run(session.add_items(ITEMS))
        for wrong in ([5], [{"x": object()}], [{"role": "user", "content": "ok"}, "text"], [{"content": "\ud800"}]):
            with pytest.raises(SessionError):
                asyncio.run(session.add_items(wrong))
    with Memory.open(tmp_path / "m") as memory:
        assert asyncio.run(OpenAISession(memory, "chat").get_items()) == ITEMS


def test_threads_and_tasks_use_two_sessions_on_one_chat(memory: Memory) -> None:
    both = [OpenAISession(memory, "chat"), OpenAISession(memory, "chat")]

    async def add(number: int) -> None:
        for turn in range(4):
            await both[turn % 2].add_items([{"role": "user", "content": f"{number} {turn}"}])

    async def tasks() -> None:
        await asyncio.gather(*(add(number) for number in range(6)))

    asyncio.run(tasks())
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: asyncio.run(add(number)), range(6)))
    assert len(asyncio.run(both[0].get_items())) == 48

    async def pops() -> list[Any]:
        return await asyncio.gather(*(both[n % 2].pop_item() for n in range(48)))

    assert len({one["content"] for one in asyncio.run(pops()) if one}) == 24
    assert asyncio.run(both[0].get_items()) == []


HANDBOOK = "\n".join(
    f"Rule {n}: a keeper who finds lamp {n} out writes the hour in book {n % 7} and lights it before the ships of the "
    f"{('morning', 'noon', 'evening')[n % 3]} pass." for n in range(36)
)  # fmt: skip


@function_tool
def tide(hour: int) -> str:
    """Return the height of the water.

    Args:
        hour: of the day.
    """
    return f"{hour % 12} feet"


def test_an_agent_runs_without_a_daemon_and_its_prompt_is_reused(smollm2_memory: Memory) -> None:
    agent = Agent(name="keeper", instructions=HANDBOOK, model_settings=ModelSettings(temperature=0.0, max_tokens=24))
    config = RunConfig(model_provider=OpenAIAgentsProvider(smollm2_memory))
    session = OpenAISession(smollm2_memory, "keeper")
    shares, requests = [], []
    for turn in range(6):
        result = Runner.run_sync(agent, f"What do I do with lamp {turn}?", session=session, run_config=config)
        usage = result.context_wrapper.usage
        shares.append((usage.input_tokens_details.cached_tokens, usage.input_tokens))
        requests.append(result.raw_responses[-1].request_id)
        assert result.final_output
    print("reused of prompt", shares)
    assert sum(cached for cached, _ in shares[1:]) >= 0.95 * sum(prompt for _, prompt in shares[1:])
    assert len(asyncio.run(session.get_items())) == 12
    assert smollm2_memory.runtime is not None
    assert smollm2_memory.runtime.why(requests[-1]).cached_tokens > 0
    assert len(smollm2_memory.sessions(prefix="openai-agents ")) == 1


def test_tools_are_called_and_streams_have_the_same_events(smollm2_memory: Memory) -> None:
    model = OpenAIAgentsModel(smollm2_memory, max_tokens=40)
    agent = Agent(
        name="keeper",
        instructions="You know the tides.",
        tools=[tide],
        model=model,
        model_settings=ModelSettings(temperature=0.0, tool_choice="required"),
    )
    result = Runner.run_sync(agent, "How high is the water at 5?", max_turns=3)
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert str(result.new_items[1].output).endswith(" feet")
    assert kinds[-1] == "MessageOutputItem"

    async def stream() -> list[str]:
        run = Runner.run_streamed(agent, "How high is the water at 7?", max_turns=3)
        return [event.data.type async for event in run.stream_events() if event.type == "raw_response_event"]

    seen = asyncio.run(stream())
    assert seen[0] == "response.created"
    assert seen.count("response.completed") == 2
    assert "response.function_call_arguments.delta" in seen
    assert "response.output_text.delta" in seen


def test_runs_at_once_have_sessions_of_their_own(smollm2_memory: Memory) -> None:
    agent = Agent(
        name="a",
        instructions="Be brief.",
        model=OpenAIAgentsModel(smollm2_memory),
        model_settings=ModelSettings(temperature=0.0, max_tokens=6),
    )

    async def runs() -> list[Any]:
        return await asyncio.gather(*(Runner.run(agent, "Say a word.") for _ in range(3)))

    assert len({run.final_output for run in asyncio.run(runs())}) == 1


def test_what_cannot_be_had_here_is_said(smollm2_memory: Memory, tmp_path: Path) -> None:
    agent = Agent(name="a", model=OpenAIAgentsModel(smollm2_memory))
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "low"}]}]
    with pytest.raises(ConfigError, match="cannot read"):
        Runner.run_sync(agent, picture)
    with pytest.raises(ConfigError, match="no responses"):
        Runner.run_sync(agent, "hi", previous_response_id="resp_1")
