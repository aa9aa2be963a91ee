"""How families of models write calls of tools, and which one a chat template belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ctxreuse.engines.text import TextModel, ToolCall

__all__ = ["FAMILIES", "Family", "family_of", "shows_tools"]


class Family(msgspec.Struct, frozen=True):
    """The text of calls: ``begin``, ``open``, calls with ``between`` them, ``close``; a call is ``head``, its name,
    ``middle``, its arguments as JSON, ``tail``.

    ``begin``: what no text of an answer has; "": an answer of calls has nothing else, and text does not begin with
    ``head``. ``template``: the chat template shows tools, calls and results itself; else they are put into messages.
    ``short_ids``: ids of calls have nine letters or digits, which the family's templates insist on.
    """

    name: str
    begin: str = "<tool_call>"
    open: str = "\n"
    head: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    between: str = "\n</tool_call>\n<tool_call>\n"
    close: str = "\n</tool_call>"
    template: bool = True
    short_ids: bool = False

    def called(self, name: str) -> str:
        """A tool's name as it stands in a call."""
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.head else name

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The text of calls."""
        found = (f"{self.head}{self.called(c.name)}{self.middle}{c.arguments}{self.tail}" for c in calls)
        return f"{self.begin}{self.open}{self.between.join(found)}{self.close}"


_LLAMA = Family("llama3", begin="", open="", middle='", "parameters": ', between="; ", close="")
_KNOWN = (
    Family("hermes"),
    _LLAMA,
    Family("mistral", begin="[TOOL_CALLS]", open=" [", between=", ", close="]", short_ids=True),
    Family(
        "mistral-args",
        begin="[TOOL_CALLS]",
        open="",
        head="",
        middle="[ARGS]",
        tail="",
        between="[TOOL_CALLS]",
        close="",
        short_ids=True,
    ),
    msgspec.structs.replace(_LLAMA, name="gemma", between="\n", template=False),
    Family("generic", template=False),
)
#: All families, by name.
FAMILIES = {family.name: family for family in _KNOWN}


_TOOLS = re.compile(r"\btools\b")


def shows_tools(text: TextModel) -> bool:
    """True if a model's chat template has a place for tools."""
    return _TOOLS.search(getattr(text, "template", "")) is not None


def family_of(template: str) -> Family:
    """The family whose calls a chat template shows; ``generic`` for one that shows none, or in a form not known."""
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral-args" if "[ARGS]" in template else "mistral"]
    if _TOOLS.search(template):
        if "<tool_call>" in template and "<function=" not in template:
            return FAMILIES["hermes"]
        if "<|start_header_id|>" in template:
            return FAMILIES["llama3"]
    return FAMILIES["gemma" if "<start_of_turn>" in template else "generic"]
