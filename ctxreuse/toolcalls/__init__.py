"""Calls of tools: what a model is shown of them, the form in which its family calls them, and how that is read."""

from ctxreuse.toolcalls.families import FAMILIES, Family, family_of
from ctxreuse.toolcalls.fold import bind_tools, prompt_text
from ctxreuse.toolcalls.grammar import MAX_CALLS, ToolChoice, call_grammar, special_markers
from ctxreuse.toolcalls.parser import (
    ArgumentsDelta,
    CallBegan,
    CallEvent,
    CallParser,
    TextDelta,
    new_call_id,
    parse_calls,
)
from ctxreuse.toolcalls.tools import MAX_TOOLS, Tool

__all__ = [
    "FAMILIES",
    "MAX_CALLS",
    "MAX_TOOLS",
    "ArgumentsDelta",
    "CallBegan",
    "CallEvent",
    "CallParser",
    "Family",
    "TextDelta",
    "Tool",
    "ToolChoice",
    "bind_tools",
    "call_grammar",
    "family_of",
    "new_call_id",
    "parse_calls",
    "prompt_text",
    "special_markers",
]
