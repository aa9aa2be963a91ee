"""Calls of tools at the OpenAI door: what a request allows, and an answer's text as content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ctxreuse.daemon.deltas import delta_of
from ctxreuse.daemon.openai import (
    ApiError,
    ApiFunction,
    ApiToolCall,
    ChatRequest,
    Delta,
    Reply,
)
from ctxreuse.errors import GrammarError
from ctxreuse.toolcalls import (
    FAMILIES,
    MAX_TOOLS,
    CallParser,
    Family,
    Tool,
    ToolChoice,
    call_grammar,
    family_of,
    special_markers,
)
from ctxreuse_edge.api.formats import AnswerFormat

if TYPE_CHECKING:
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel

__all__ = ["CallReader", "WantedTools", "described", "family_for", "shown", "tools_of"]


class WantedTools(NamedTuple):
    """The tools of a request, and which may be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice

    @property
    def texts(self) -> list[str]:
        """What the chat template is given."""
        return [tool.text for tool in self.tools]

    def format(self, family: Family, text: TextModel, wanted: AnswerFormat | None) -> AnswerFormat:
        """The constraint of the answer; ``wanted``: that of its text. Raises ApiError if both cannot be."""
        free = self.choice.mode == "auto" and not self.choice.name
        if wanted is not None and free and not family.begin:
            what = f"{wanted.field}: models of the family {family.name} cannot have it beside tools"
            raise ApiError(400, what, param=wanted.field)
        answer = wanted.grammar if wanted is not None else None
        grammar = call_grammar(family, self.tools, self.choice, special_markers(text, family), answer)
        return AnswerFormat(grammar, "tools")


def family_for(text: TextModel, setting: str) -> Family:
    """The family of a model's calls: that of the settings, else of its chat template."""
    return family_of(getattr(text, "template", "")) if setting == "auto" else FAMILIES[setting]


def shown(sampling: SamplingParams, family: Family, text: TextModel) -> SamplingParams:
    """Sampling parameters with which the answer's text has the family's markers."""
    return msgspec.structs.replace(sampling, shown_markers=tuple(special_markers(text, family)))


def tools_of(body: ChatRequest) -> WantedTools | None:
    """The tools of a request; None without any. Raises ApiError, naming the field, for what is none."""
    given, choice = body.tools or [], body.tool_choice
    if not given:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        return None
    tools = described(given)
    return WantedTools(tools, _choice(choice, tools, parallel=body.parallel_tool_calls is not False))


def described(given: Sequence[dict[str, Any]]) -> tuple[Tool, ...]:
    """The tools that a request describes. Raises ApiError, naming the field, for what is none."""
    if len(given) > MAX_TOOLS:
        raise ApiError(400, f"tools: at most {MAX_TOOLS} are taken", param="tools")
    tools: list[Tool] = []
    for number, one in enumerate(given):
        place = f"tools[{number}]"
        if one.get("type", "function") != "function" or not isinstance(one.get("function"), dict):
            raise ApiError(400, f"{place}: only functions are supported", param=place)
        try:
            tools.append(Tool.of(one))
        except GrammarError as error:
            raise ApiError(400, f"{place}: {error}", param=place) from None
        if tools[-1].name in [tool.name for tool in tools[:-1]]:
            raise ApiError(400, f"{place}: there is a tool {tools[-1].name!r} already", param=place)
    return tuple(tools)


def _choice(given: str | dict[str, Any] | None, tools: Sequence[Tool], *, parallel: bool) -> ToolChoice:
    if given is None or given == "auto":
        return ToolChoice(parallel=parallel)
    if given == "required":
        return ToolChoice("required", parallel=parallel)
    if given == "none":
        return ToolChoice("none")
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool.name for tool in tools]:
        what = f"tool_choice: {str(given)[:80]!r} is none of auto, required, none, or a function of tools"
        raise ApiError(400, what, param="tool_choice")
    return ToolChoice("required", str(name), parallel)


class CallReader:
    """One answer's text, as deltas of content and calls."""

    def __init__(self, family: Family) -> None:
        self._parser = CallParser(family)

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a piece of text."""
        return [delta_of(event) for event in self._parser.feed(text)]

    def finish(self) -> list[Delta]:
        """The deltas that were held back."""
        return [delta_of(event) for event in self._parser.finish()]

    def reply(self, text: str) -> Reply:
        """The message of a whole answer."""
        deltas = [*self.feed(text), *self.finish()]
        content = "".join(delta.content or "" for delta in deltas)
        calls = [ApiToolCall(ApiFunction(call.name, call.arguments), call.id) for call in self._parser.calls]
        return Reply(content or None, tool_calls=calls) if calls else Reply(content)

    def finish_reason(self, finish: str) -> str:
        """The API's finish reason; ``finish``: that of an answer without calls."""
        return "tool_calls" if finish == "stop" and self._parser.whole else finish
