"""Reads calls out of an answer while it comes, in pieces of any size."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ctxreuse.engines.detokenize import overlap
from ctxreuse.engines.text import ToolCall
from ctxreuse.toolcalls.families import Family

__all__ = ["ArgumentsDelta", "CallBegan", "CallEvent", "CallParser", "TextDelta", "new_call_id", "parse_calls"]

#: A name in JSON, up to the quote that ends it.
_QUOTED = re.compile(r'(?:[^"\\]|\\.)*(?=")', re.DOTALL)
_ALNUM = string.ascii_letters + string.digits


class TextDelta(NamedTuple):
    """Text of the answer that belongs to no call."""

    text: str


class CallBegan(NamedTuple):
    """The call ``number`` (from 0) of a tool has begun."""

    number: int
    id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """A piece of the JSON of a call's arguments."""

    number: int
    text: str


CallEvent: TypeAlias = TextDelta | CallBegan | ArgumentsDelta
#: Reads on from where the answer is; False if it needs more text.
_State: TypeAlias = Callable[[list[CallEvent]], bool]


def new_call_id(family: Family) -> str:
    """An id for a call, as the family's templates want it."""
    letters = "".join(secrets.choice(_ALNUM) for _ in range(9 if family.short_ids else 24))
    return letters if family.short_ids else f"call_{letters}"


class CallParser:
    """Turns the pieces of one answer into events; the same ones' texts joined, however the answer is split.

    What is no call by the family's rules stays text. Not thread-safe.
    """

    def __init__(self, family: Family, make_id: Callable[[Family], str] = new_call_id) -> None:
        self._family, self._make_id = family, make_id
        self._state: _State = self._text if family.begin else self._start
        self._pending, self._taken = "", ""  # of the answer: not read yet; read, and text if no call follows
        self._calls: list[tuple[str, str, list[str]]] = []
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the arguments of the last one may be cut."""
        return [ToolCall(name, "".join(arguments), id) for id, name, arguments in self._calls]

    @property
    def whole(self) -> bool:
        """True if there are calls and none of them is cut."""
        return bool(self._calls) and self._state not in (self._arguments, self._name)

    def feed(self, piece: str) -> list[CallEvent]:
        """The events that this piece of text completes."""
        self._pending += piece
        events: list[CallEvent] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[CallEvent]:
        """The events that were held back, as the answer has ended."""
        rest, self._pending = self._pending, ""
        if rest and self._state in (self._start, self._text, self._rest):
            return [TextDelta(rest)]
        return []

    def _begun(self, words: str, then: _State) -> bool | None:
        """Go on with ``then`` behind ``words``; False while they may still come, None if they do not."""
        if self._pending.startswith(words):
            self._taken += words
            self._pending, self._state = self._pending[len(words) :], then
            return True
        return False if words.startswith(self._pending) else None

    def _start(self, events: list[CallEvent]) -> bool:
        """Without a marker: calls or text from the beginning."""
        found = self._begun(self._family.open + self._family.head, self._name) if self._pending else False
        return self._no_call(events) if found is None else found

    def _no_call(self, events: list[CallEvent]) -> bool:
        """What began like a call is text, and so is the rest."""
        self._say(self._taken, events)
        self._taken, self._state = "", self._rest
        return True

    def _text(self, events: list[CallEvent]) -> bool:
        begin = self._family.begin
        at = self._pending.find(begin)
        if at >= 0:
            said = self._pending[:at].rstrip()
            self._say(said, events)
            self._taken, self._pending = self._pending[len(said) : at + len(begin)], self._pending[at + len(begin) :]
            self._state = self._opening
            return True
        # Blanks before a call, and what may be the beginning of one, wait.
        keep = overlap(self._pending, begin)
        said = self._pending[: len(self._pending) - keep].rstrip()
        self._say(said, events)
        self._pending = self._pending[len(said) :]
        return False

    def _say(self, text: str, events: list[CallEvent]) -> None:
        if text:
            events.append(TextDelta(text))

    def _opening(self, events: list[CallEvent]) -> bool:
        found = self._begun(self._family.open + self._family.head, self._name)
        return self._no_call(events) if found is None else found

    def _name(self, events: list[CallEvent]) -> bool:
        family = self._family
        at = self._pending.find(family.middle)
        if family.head:
            quoted = _QUOTED.match(self._pending)
            at = quoted.end() if quoted is not None else -1
            if at >= 0 and not self._pending.startswith(family.middle, at):
                return False if family.middle.startswith(self._pending[at:]) else self._no_call(events)
        if at < 0:
            return False
        written = self._pending[:at]
        try:
            name = json.loads(f'"{written}"') if family.head else written
        except ValueError:
            name = written
        self._pending, self._taken = self._pending[at + len(family.middle) :], ""
        id = self._make_id(family)
        events.append(CallBegan(len(self._calls), id, name))
        self._calls.append((id, name, []))
        self._state, self._depth, self._quoted, self._escaped = self._arguments, 0, False, False
        return True

    def _arguments(self, events: list[CallEvent]) -> bool:
        for n, char in enumerate(self._pending):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._add(self._pending[: n + 1], events)
                    self._pending, self._state = self._pending[n + 1 :], self._after
                    return True
        self._add(self._pending, events)
        self._pending = ""
        return False

    def _add(self, text: str, events: list[CallEvent]) -> None:
        if text:
            self._calls[-1][2].append(text)
            events.append(ArgumentsDelta(len(self._calls) - 1, text))

    def _after(self, events: list[CallEvent]) -> bool:
        """Behind a call: another one, or the end."""
        family = self._family
        again, close = family.tail + family.between + family.head, family.tail + family.close
        if not self._pending:
            return False
        found = self._begun(again, self._name)
        if found is not None:
            return found
        if self._pending.startswith(close):
            self._pending, self._state = self._pending[len(close) :], self._behind
            return True
        if close.startswith(self._pending):
            return False
        self._state = self._rest
        return True

    def _behind(self, events: list[CallEvent]) -> bool:
        """Blanks behind the calls belong to no text."""
        self._pending = self._pending.lstrip()
        if self._pending:
            self._state = self._rest
        return bool(self._pending)

    def _rest(self, events: list[CallEvent]) -> bool:
        self._say(self._pending, events)
        self._pending = ""
        return False


def parse_calls(family: Family, text: str) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole answer."""
    parser = CallParser(family)
    events: Sequence[CallEvent] = [*parser.feed(text), *parser.finish()]
    return "".join(event.text for event in events if isinstance(event, TextDelta)), parser.calls
