"""From the fields of a request that constrain its answer to a grammar, with errors that name the field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ctxreuse.constrain import Grammar
from ctxreuse.daemon.formats import ResponseFormat, StructuredOutputs
from ctxreuse.daemon.openai import ApiError, SamplingFields
from ctxreuse.errors import GrammarError

if TYPE_CHECKING:
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.runtime import Runtime

__all__ = ["AnswerFormat", "constrained", "format_of", "naming"]


class AnswerFormat(NamedTuple):
    """A constraint, and the field of the request that wants it."""

    grammar: Grammar
    field: str


def format_of(body: SamplingFields) -> AnswerFormat | None:
    """The constraint that a request wants, None without one. Raises ApiError, naming the field, for what is none."""
    given = _response_format(body.response_format), _structured(body.structured_outputs)
    wanted = [found for found in given if found is not None]
    if len(wanted) > 1:
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
    return wanted[0] if wanted else None


def constrained(sampling: SamplingParams, wanted: AnswerFormat | None, runtime: Runtime) -> SamplingParams:
    """Return the sampling parameters with a constraint, compiled now. Raises ApiError with the field."""
    if wanted is None:
        return sampling
    with naming(wanted.field):
        runtime.constrain(wanted.grammar)
    return msgspec.structs.replace(sampling, grammar=wanted.grammar)


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Turn a GrammarError into the ApiError that names the field which it comes from."""
    try:
        yield
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", code="invalid_grammar", param=field) from None


def _response_format(given: ResponseFormat | None) -> AnswerFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return AnswerFormat(Grammar.json_object(), "response_format")
    if given.type != "json_schema":
        text = f"response_format.type: {given.type[:64]!r} is none of text, json_object, json_schema"
        raise ApiError(400, text, param="response_format.type")
    field = "response_format.json_schema.schema"
    if given.json_schema is None or given.json_schema.schema is None:
        raise ApiError(400, f"{field} is missing", param=field)
    with naming(field):
        return AnswerFormat(_schema(given.json_schema.schema, lenient=not given.json_schema.strict), field)


def _structured(given: StructuredOutputs | None) -> AnswerFormat | None:
    if given is None:
        return None
    wanted = [name for name in given.__struct_fields__ if getattr(given, name) not in (None, False)]
    if given.json is False:
        wanted.append("json")
    if len(wanted) != 1:
        text = "structured_outputs: give one of json, regex, choice, grammar, json_object"
        raise ApiError(400, text, param="structured_outputs")
    field = f"structured_outputs.{wanted[0]}"
    with naming(field):
        if given.json is not None:
            return AnswerFormat(_schema(given.json, lenient=False), field)
        if given.regex is not None:
            return AnswerFormat(Grammar.regex(given.regex), field)
        if given.choice is not None:
            return AnswerFormat(Grammar.choice(given.choice), field)
        if given.grammar is not None:
            return AnswerFormat(Grammar.lark(given.grammar), field)
        return AnswerFormat(Grammar.json_object(), field)


def _schema(schema: dict[str, Any] | bool, *, lenient: bool) -> Grammar:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return Grammar.json_schema(schema, lenient=lenient)
