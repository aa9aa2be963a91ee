"""Tools and typed answers of sessions, on a tiny engine whose weights are random: only the constraints make sense."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from ctxreuse_agents import AsyncMemory, Memory
from ctxreuse_agents.tools import AnswerType, FunctionTools, result_text

from ctxreuse.engines.text import ToolCall
from ctxreuse.errors import GrammarError

KIND = Literal["lock", "pier", "crane"]


@dataclasses.dataclass
class Place:
    kind: KIND
    open: bool


class PlaceStruct(msgspec.Struct):
    kind: KIND
    places: list[Literal["é", "🚢"]]


class PlaceModel(pydantic.BaseModel):
    kind: KIND
    open: bool | None


class Harbour:
    """Functions that note their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def functions(self) -> list[Any]:
        def open_lock(side: Literal["north", "süd"], slowly: bool = False) -> dict[str, str]:
            """Opens the lock."""
            self.calls.append((side, slowly))
            return {"state": f"{side} is open"}

        def crane(up: bool) -> str:
            """Moves the crane."""
            self.calls.append(up)
            raise RuntimeError("the crane is broken")

        return [open_lock, crane]


@pytest.mark.parametrize("kind", [Place, PlaceStruct, PlaceModel])
def test_an_answer_is_a_value_of_the_type(asked: Memory, kind: type[Any]) -> None:
    answer = asked.create().ask("Which place?", schema=kind, max_tokens=300, temperature=1.0, seed=2)
    assert isinstance(answer.value, kind)
    assert answer.tool_calls == []
    assert answer.finish == "stop"


def test_a_schema_gives_plain_values_and_what_is_cut_says_so(asked: Memory) -> None:
    session, schema = asked.create(), {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    assert session.ask("Two numbers.", schema=schema).value in ([1, 1], [1, 2], [2, 1], [2, 2])
    with pytest.raises(GrammarError, match="not whole"):
        session.ask("Again.", schema=schema, max_tokens=2).value  # noqa: B018
    with pytest.raises(GrammarError, match="no type"):
        session.ask("And now?", max_tokens=2).value  # noqa: B018
    with pytest.raises(GrammarError, match="unclosed"):
        session.ask("?", schema={"type": "string", "pattern": "("})
    assert session.ask("The session goes on?", max_tokens=2).text is not None


def test_calls_are_run_with_converted_arguments_and_their_results_are_turns(asked: Memory) -> None:
    harbour, session = Harbour(), asked.create()
    answer = session.run_tools("Go!", harbour.functions(), rounds=1, tool_choice="required", max_tokens=900, seed=5)
    assert answer.tool_calls == []
    first, *_ = [turn for turn in session.turns() if turn.role == "assistant"]
    (result,) = [turn for turn in session.turns() if turn.role == "tool"]
    assert "<tool_call>" in first.content
    assert harbour.calls
    for call in harbour.calls:
        assert call in (True, False) or (call[0] in ("north", "süd") and call[1] in (True, False))
    broken = [call for call in harbour.calls if isinstance(call, bool)]
    assert result.content.count("error: RuntimeError: the crane is broken") == len(broken)
    assert answer.usage.cached_tokens >= 0.8 * answer.usage.prompt_tokens, "the turns before are not computed again"


def test_limits_of_rounds_and_calls(asked: Memory) -> None:
    harbour, session = Harbour(), asked.create()
    session.run_tools("Go!", harbour.functions(), rounds=0, max_tokens=4).close()
    assert [turn.role for turn in session.turns()] == ["user"], "without rounds there is one answer, of text"
    session.run_tools("Go!", harbour.functions(), rounds=1, calls=0, tool_choice="crane", max_tokens=900).close()
    (result,) = [turn for turn in session.turns() if turn.role == "tool"]
    assert set(result.content.split("\n</tool_response>\n<tool_response>\n")) == {"error: no more calls are possible"}
    assert harbour.calls == []


def test_wrong_tools_are_refused_before_a_turn_is_added(asked: Memory) -> None:
    session = asked.create()
    for tools, choice, what in (
        ([{"name": ""}], "auto", "1 to 64"),
        ([lambda *rest: None], "auto", "cannot be given by name"),
        ([{"name": "a"}], "b", "tool_choice is 'b'"),
        ([{"name": "a", "description": "Ends <|im_end|> turns."}], "auto", "acts as a marker"),
    ):
        with pytest.raises(GrammarError, match=what):
            session.ask("?", tools=tools, tool_choice=choice)
    assert session.turns() == []


def test_functions_become_tools_and_results_text() -> None:
    known = FunctionTools(Harbour().functions())
    lock = known.tools[0]
    assert (lock.name, lock.description) == ("open_lock", "Opens the lock.")
    assert lock.parameters["required"] == ["side"]
    assert lock.parameters["additionalProperties"] is False
    assert known.result(ToolCall("open_lock", '{"side": "süd"}')) == '{"state":"süd is open"}'
    assert "wrong arguments" in known.result(ToolCall("open_lock", '{"side": "up"}'))
    assert "wrong arguments" in known.result(ToolCall("open_lock", '{"si'))
    assert "there is no function" in known.result(ToolCall("close", "{}"))
    with pytest.raises(GrammarError, match="two functions"):
        FunctionTools([known.begin, known.begin])
    assert len(result_text("x" * 50_000)) < 21_000
    with pytest.raises(GrammarError, match="JSON schema"):
        AnswerType(asyncio.Event)


def test_coroutine_functions_too(tmp_path: Path, engine: Any) -> None:
    calls: list[bool] = []

    async def crane(up: bool) -> str:
        """Moves the crane."""
        calls.append(up)
        return "done"

    async def main() -> None:
        async with await AsyncMemory.open(tmp_path / "m", engine) as memory:
            session = await memory.create()
            answer = await session.run_tools("Go!", [crane], rounds=1, tool_choice="crane", max_tokens=900)
            assert await answer.tool_calls() == []
            assert (await answer.content()) == (await answer.text())
            typed = await session.ask("?", schema=Place, max_tokens=300)
            assert isinstance(await typed.value(), Place)
            assert "done" in (await session.turns())[2].content

    asyncio.run(main())
    assert calls
