"""One tool as a model is shown it: a name, what it does, and a JSON schema of its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ctxreuse.constrain.grammar import check_schema
from ctxreuse.errors import GrammarError

__all__ = ["MAX_TOOLS", "Tool"]

#: Tools of a request at most, and characters of a name.
MAX_TOOLS, _NAME = 128, 64


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call. Raises GrammarError for a name or schema that cannot be used.

    ``parameters``: a JSON schema of an object ({}: no arguments are known, any object will do). ``strict``: keywords of
    the schema that cannot be enforced are refused instead of ignored.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= _NAME or not self.name.isprintable():
            what = f"a tool's name has 1 to {_NAME} printable characters, and this one is {self.name[:80]!r}"
            raise GrammarError(what)
        if self.parameters.get("type", "object") != "object":
            raise GrammarError("the schema of a tool's arguments is of an object", where=f"tool {self.name}")
        check_schema(self.parameters)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, always of an object."""
        return {"type": "object", **self.parameters}

    @property
    def text(self) -> str:
        """What chat templates are given, as JSON: the OpenAI API's description of a function, in this order."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Tool:
        """The tool of an OpenAI description, with or without the ``{"type": "function", …}`` around it.

        Raises GrammarError for one without a name, or with fields of another type.
        """
        inner = given.get("function", given)
        try:
            return msgspec.convert(inner, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, GrammarError):
                raise error.__cause__ from None
            raise GrammarError(f"no description of a tool: {error}") from None
