"""What a parser of tool calls reads in an answer, as the deltas of OpenAI's API."""

from __future__ import annotations

from ctxreuse.daemon.openai import CallDelta, Delta, FunctionDelta
from ctxreuse.toolcalls import CallBegan, CallEvent, TextDelta

__all__ = ["delta_of"]


def delta_of(event: CallEvent) -> Delta:
    """Return an event of `CallParser` as a delta."""
    if isinstance(event, TextDelta):
        return Delta(content=event.text)
    if isinstance(event, CallBegan):
        return Delta(tool_calls=[CallDelta(event.number, FunctionDelta("", event.name), event.id, "function")])
    return Delta(tool_calls=[CallDelta(event.number, FunctionDelta(event.text))])
