"""Why a context paused: stop reasons, classes of tools, what the answer was made of; all as one small number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from ctxreuse.errors import ConfigError

__all__ = [
    "CLOSED",
    "END_OF_TURN",
    "FIRST_HINT",
    "LABELS",
    "LENGTH",
    "REASONS",
    "RUNNING",
    "SUPERSEDED",
    "TOOL_CALL",
    "UNKNOWN",
    "PauseKind",
    "infer",
    "kind_of",
    "tool_class",
    "tools_in",
]

UNKNOWN: Final = 0
TOOL_CALL: Final = 1
END_OF_TURN: Final = 2
LENGTH: Final = 3
CLOSED: Final = 4
SUPERSEDED: Final = 5
#: Not paused: an answer is being made. How long until the session's next request is learnt for this, too.
RUNNING: Final = 6

#: Reasons by number. From 8 on they are tool calls whose tool's class is known.
REASONS: Final = (
    "unknown",
    "tool",
    "end_of_turn",
    "length",
    "closed",
    "superseded",
    "running",
    "",
    "tool:shell",
    "tool:read",
    "tool:edit",
    "tool:search",
    "tool:web",
    "tool:code",
    "tool:agent",
    "tool:human",
)
#: Numbers of labels that are no pauses but hints, in the order of `ctxreuse.pauses.hints.HINTS`.
FIRST_HINT: Final = 24
_NUMBERS = {name: number for number, name in enumerate(REASONS) if name}
_BITS = 5
#: Labels are below this: five bits of reason, three of shape.
LABELS: Final = 1 << (_BITS + 3)

#: First match wins: words of a tool's name, after it was split at case and punctuation.
_CLASSES: tuple[tuple[str, frozenset[str]], ...] = (
    ("human", frozenset(("ask", "human", "approve", "approval", "confirm", "user", "question"))),
    ("agent", frozenset(("agent", "task", "subagent", "delegate", "handoff", "transfer", "spawn"))),
    ("web", frozenset(("web", "http", "url", "browser", "browse", "fetch", "crawl", "navigate", "click"))),
    ("shell", frozenset(("bash", "shell", "sh", "terminal", "command", "exec", "execute", "cmd", "powershell"))),
    ("code", frozenset(("python", "code", "interpreter", "notebook", "ipython", "test", "tests", "pytest", "build"))),
    ("edit", frozenset(("edit", "write", "create", "patch", "replace", "insert", "delete", "move", "update", "save"))),
    ("search", frozenset(("search", "grep", "glob", "find", "query", "retrieve", "lookup", "rag", "wiki"))),
    ("read", frozenset(("read", "open", "view", "cat", "ls", "list", "get", "show", "load"))),
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LONGEST_NAME = 256

_STOPS = {
    "tool_calls": TOOL_CALL,
    "tool_use": TOOL_CALL,
    "function_call": TOOL_CALL,
    "stop": END_OF_TURN,
    "end_turn": END_OF_TURN,
    "stop_sequence": END_OF_TURN,
    "stop_string": END_OF_TURN,
    "length": LENGTH,
    "max_tokens": LENGTH,
}


class PauseKind(NamedTuple):
    """A pause's reason (see REASONS) and what the answer before it had: ``text``, ``thinking``, ``calls``."""

    reason: int
    text: bool = False
    thinking: bool = False
    calls: bool = False

    @property
    def label(self) -> int:
        """The kind as a number below LABELS; 0 for an unknown reason of an unknown answer."""
        return self.reason | (self.text | self.thinking << 1 | self.calls << 2) << _BITS

    @classmethod
    def of(cls, label: int) -> PauseKind:
        """Return the kind of a label; UNKNOWN for a number that is none."""
        reason = label & ((1 << _BITS) - 1)
        if not 0 <= label < LABELS or reason >= len(REASONS) or not REASONS[reason]:
            return cls(UNKNOWN)
        shape = label >> _BITS
        return cls(reason, bool(shape & 1), bool(shape & 2), bool(shape & 4))

    @property
    def stop(self) -> str:
        """The coarse reason: ``tool`` for all tools."""
        return REASONS[self.reason].partition(":")[0]

    @property
    def tool(self) -> str:
        """What tells pauses of one coarse reason apart: the tool's class and what the answer was made of."""
        shape = "".join(letter for letter, there in zip("tkc", self[1:]) if there)
        return f"{REASONS[self.reason].partition(':')[2]}/{shape}"


def tool_class(name: str) -> str:
    """Return the class of a tool by the words in its name, such as ``shell``; ``""`` for a name that tells nothing."""
    words = {word.lower() for word in _WORD.findall(name[:_LONGEST_NAME])}
    return next((kind for kind, known in _CLASSES if words & known), "")


def kind_of(text: str) -> PauseKind:
    """Return the kind that a caller names: ``tool``, ``tool:NAME`` of any tool, ``end_of_turn``, ``length``,
    ``closed`` or ``unknown``.

    Raises ConfigError for anything else.
    """
    stop, colon, tool = text.partition(":")
    if stop == "tool":
        found = tool_class(tool) or (tool if f"tool:{tool}" in _NUMBERS else "")
        return PauseKind(_NUMBERS[f"tool:{found}"] if found else TOOL_CALL)
    if colon or stop not in ("end_of_turn", "length", "closed", "unknown"):
        raise ConfigError(
            f"no pause is of the kind {text[:40]!r}", fix="Say tool, tool:NAME, end_of_turn, length, closed or unknown"
        )
    return PauseKind(_NUMBERS[stop])


def infer(finish: str | None, tools: Iterable[str] = (), *, text: bool = False, thinking: bool = False) -> PauseKind:
    """Return the kind of a pause from what APIs say: ``finish`` is the stop reason as OpenAI's or Anthropic's API
    spells it.

    ``tools``: names of the tools that the answer calls; of several the one that is likely to take longest counts.
    Answers that call tools wait for them, whatever the stop reason says.
    """
    names = list(tools)
    classes = {tool_class(name) for name in names}
    slowest = next(
        (kind for kind in ("human", "agent", "shell", "code", "web", "search", "edit", "read") if kind in classes), ""
    )
    if names:
        reason = _NUMBERS[f"tool:{slowest}"] if slowest else TOOL_CALL
    else:
        reason = _STOPS.get(finish or "", UNKNOWN)
    return PauseKind(reason, text, thinking, bool(names))


#: How models write calls of tools into plain text: Hermes' and Qwen's tags, JSON with a name and arguments, ReAct.
_CALLS = (
    re.compile(r"<tool_call>\s*\{[^{}]{0,200}?\"name\"\s*:\s*\"([\w.\-]{1,64})\""),
    re.compile(r"\{\s*\"name\"\s*:\s*\"([\w.\-]{1,64})\"\s*,\s*\"(?:arguments|parameters)\"\s*:"),
    re.compile(r"<function=([\w.\-]{1,64})>"),
    re.compile(r"^Action:\s*([\w.\-]{1,64})", re.MULTILINE),
)
_LOOKED_AT = 1 << 14


def tools_in(text: str) -> list[str]:
    """Names of tools that an answer's text calls, for models and servers that have no field for them.

    Only the last 16 KiB are looked at.
    """
    tail = text[-_LOOKED_AT:]
    return [name for pattern in _CALLS for name in pattern.findall(tail)]
