"""Python functions as tools, and Python types as the form of an answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from ctxreuse.constrain import Grammar
from ctxreuse.engines.text import ToolCall
from ctxreuse.errors import GrammarError
from ctxreuse.toolcalls import Tool

__all__ = ["AnswerType", "FunctionTools", "ToolLike", "join_results", "result_text", "tools_from"]

#: What a model is given for a tool: a description, or a function with annotations and a docstring.
ToolLike = Tool | Mapping[str, Any] | Callable[..., Any]

#: Characters of a result that a model is shown.
_LONGEST_RESULT = 20_000


class AnswerType:
    """The form of an answer: a JSON schema, or a type (dataclass, msgspec Struct, TypedDict, pydantic model)."""

    def __init__(self, schema: Any) -> None:
        """Raises GrammarError for what is neither."""
        self._type = schema
        if isinstance(schema, Mapping):
            found, self._type = dict(schema), None
        elif hasattr(schema, "model_json_schema"):  # pydantic
            found = schema.model_json_schema()
        else:
            found = _schema_of(schema)
        self.grammar = Grammar.json_schema(found, lenient=not isinstance(schema, Mapping))

    def value(self, text: str) -> Any:
        """The answer as a value of the type. Raises GrammarError for one that was cut."""
        try:
            if hasattr(self._type, "model_validate_json"):
                return self._type.model_validate_json(text)
            return msgspec.json.decode(text) if self._type is None else msgspec.json.decode(text, type=self._type)
        except ValueError as error:
            raise GrammarError(f"the answer is not whole: {error}", fix="Allow it more max_tokens") from error


class FunctionTools:
    """Functions that a model may call, by name.

    A function's name, its docstring and the annotations of its parameters are what the model is shown; arguments are
    converted to the annotated types before the call.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Raises GrammarError for a parameter that JSON cannot carry, and for two functions of one name."""
        self._functions: dict[str, tuple[Callable[..., Any], type[msgspec.Struct]]] = {}
        tools: list[Tool] = []
        for function in functions:
            name = function.__name__
            if name in self._functions:
                raise GrammarError(f"there are two functions {name!r}")
            arguments = _arguments_of(function)
            self._functions[name] = function, arguments
            tools.append(Tool(name, inspect.getdoc(function) or "", _schema_of(arguments)))
        self.tools = tuple(tools)

    #: The result of a call beyond the limit.
    too_many = "error: no more calls are possible"

    def result(self, call: ToolCall) -> str:
        """Call a function and return the text of its result, or of its exception."""
        try:
            return result_text(self.begin(call))
        except Exception as error:
            return result_text(error)

    def begin(self, call: ToolCall) -> Any:
        """Call a function with a model's arguments, and return what it returns.

        Raises GrammarError for an unknown function and for arguments of other types, and what the function raises.
        """
        if call.name not in self._functions:
            raise GrammarError(f"there is no function {call.name!r}")
        function, arguments = self._functions[call.name]
        try:
            given = msgspec.json.decode(call.arguments, type=arguments)
        except ValueError as error:
            raise GrammarError(f"wrong arguments: {error}") from None
        values = {name: getattr(given, name) for name in given.__struct_fields__}
        return function(**{name: value for name, value in values.items() if value is not msgspec.UNSET})


def result_text(result: object) -> str:
    """A result, or an exception, as a model is shown it."""
    if isinstance(result, Exception):
        text = f"error: {type(result).__name__}: {result}"
    elif isinstance(result, str):
        text = result
    else:
        text = msgspec.json.encode(result, enc_hook=str).decode()
    return text if len(text) <= _LONGEST_RESULT else f"{text[:_LONGEST_RESULT]}\n[{len(text):,} characters, cut here]"


def join_results(results: Sequence[str]) -> str:
    """The results of one answer's calls as one turn, in the words that templates put between them."""
    return "\n</tool_response>\n<tool_response>\n".join(results)


def tools_from(given: Sequence[ToolLike]) -> tuple[Tool, ...]:
    """Tools of descriptions and functions. Raises GrammarError."""
    tools: list[Tool] = []
    for one in given:
        if isinstance(one, Tool):
            tools.append(one)
        elif isinstance(one, Mapping):
            tools.append(Tool.of(one))
        else:
            tools += FunctionTools([one]).tools
    return tuple(tools)


def _arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    hints, fields = get_type_hints(function), []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise GrammarError(f"{function.__name__}: the parameter {name} cannot be given by name")
        kind = hints.get(name, Any)
        if parameter.default is parameter.empty:
            fields.append((name, kind))
        else:
            fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))  # type: ignore[arg-type]
    return msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, without properties that it does not have."""
    try:
        (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise GrammarError(f"no JSON schema of {getattr(kind, '__name__', kind)!r}: {error}") from None
    root = parts.pop(schema["$ref"].rpartition("/")[2]) if set(schema) == {"$ref"} and len(parts) == 1 else schema
    for part in (root, *parts.values()):
        part.pop("title", None)
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return {**root, "$defs": parts} if parts else root
