"""Tools for models whose chat template knows none: they, their calls and results stand in messages' texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.engines.text import Message, TextModel
from ctxreuse.toolcalls.families import Family, shows_tools

if TYPE_CHECKING:
    from ctxreuse.identity.keys import Tokens

__all__ = ["bind_tools", "prompt_text"]

_INTRODUCTION = "You can call functions. Call one, or several, by answering only this:"
_LIST = "These are the functions:"


def prompt_text(text: TextModel, family: Family) -> TextModel:
    """The text model with which prompts are encoded: itself where its template shows tools as the family does."""
    return text if family.template and shows_tools(text) else _FoldingText(text, family)


def bind_tools(text: TextModel, tools: Sequence[str]) -> TextModel:
    """A text model that renders every conversation with these tools, as JSON."""
    return _BoundText(text, tools)


class _BoundText:
    def __init__(self, text: TextModel, bound: Sequence[str]) -> None:
        self._text, self._bound = text, bound
        self.stop_ids, self.markers, self.token_chars = text.stop_ids, text.markers, text.token_chars

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        return self._text.encode(text, markers=markers)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        return self._text.decode(ids)

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        return self._text.render(messages, generate=generate, tools=[*self._bound, *tools])


class _FoldingText:
    """A `TextModel` that renders tools in the system turn, calls in the assistant's, and results in a user's."""

    def __init__(self, text: TextModel, family: Family) -> None:
        self._text, self._family = text, family
        self.stop_ids, self.markers, self.token_chars = text.stop_ids, text.markers, text.token_chars

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        """See `TextModel.encode`."""
        return self._text.encode(text, markers=markers)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """See `TextModel.decode`."""
        return self._text.decode(ids)

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        """See `TextModel.render`."""
        found: list[Message] = []
        after_result = False
        for message in messages:
            if message.role in ("tool", "function"):
                result = f"<tool_response>\n{message.content}\n</tool_response>"
                if after_result:  # templates may want user and assistant in turn
                    found[-1] = msgspec.structs.replace(found[-1], content=f"{found[-1].content}\n{result}")
                else:
                    found.append(Message("user", result))
                after_result = True
                continue
            after_result = False
            if message.tool_calls:
                written = self._family.write(message.tool_calls)
                content = f"{message.content}\n{written}" if message.content else written
                message = Message(message.role, content, message.name)
            found.append(message)
        if tools:
            shown = self._shown(tools)
            if found and found[0].role in ("system", "developer"):
                found[0] = msgspec.structs.replace(found[0], content=f"{found[0].content}\n\n{shown}")
            else:
                found.insert(0, Message("system", shown))
        return self._text.render(found, generate=generate)

    def _shown(self, tools: Sequence[str]) -> str:
        family = self._family
        example = f"{family.begin}{family.open}{family.head}NAME{family.middle}{{ARGUMENTS}}{family.tail}{family.close}"
        return "\n".join((_INTRODUCTION, example, _LIST, *tools))
