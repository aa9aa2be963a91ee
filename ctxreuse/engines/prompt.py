"""From messages to a prompt's ids, turn by turn, so that no text that a message carries can act as the model's markers.

A document may spell the end of its own turn and a system turn after it. Were it encoded with the text that the chat
template writes, the model would obey it. So every marker in a message is hidden behind a private character while the
template runs, and spelt as the plain text that it is when the result is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import EngineError
from ctxreuse.keys import Tokens, as_tokens

__all__ = ["Disguise", "Prompted", "prompt"]

# Ends of turns are looked for after each of the first turns, later after every so many: each costs a run of the
# template over all turns before it. What may be looked for depends on the position alone, so that a prompt that grows
# keeps the ids it had.
_EACH, _EVERY = 64, 16


class Disguise:
    """Hides the markers of a model in some texts, and encodes what a template made of them. Thread-safe."""

    def __init__(self, text: TextModel, texts: Iterable[str]) -> None:
        """``texts``: all that will be hidden or rendered; the private character is one that none of them has.

        Raises EngineError if they have all of them.
        """
        self._text = text
        self._names = sorted(text.markers, key=lambda name: (-len(name), name))
        self._find = re.compile("|".join(map(re.escape, self._names))) if self._names else None
        self._mark = ""
        used: set[str] = set()
        for given in texts:
            if self._find is not None and self._find.search(given):
                self._mark = "?"
            used.update(given)
        if self._mark:
            free = (char for char in map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))) if char not in used)
            self._mark = next(free, "")
            if not self._mark:
                raise EngineError("the text has every private-use character there is", fix="Remove some of them")

    def __bool__(self) -> bool:
        """True if there is anything to hide."""
        return bool(self._mark)

    def hide(self, given: str) -> str:
        """The text with each marker replaced by a private character, its number and that character again."""
        if not self._mark or self._find is None:
            return given
        return self._find.sub(lambda m: f"{self._mark}{self._names.index(m[0])}{self._mark}", given)

    def show(self, hidden: str) -> str:
        """The text as it was before `hide`, and what a template wrote around it."""
        if not self._mark:
            return hidden
        return re.sub(f"{self._mark}(\\d+){self._mark}", lambda m: self._names[int(m[1])], hidden)

    def encode(self, hidden: str) -> Tokens:
        """Ids of a template's text, int32 [n]: its own markers are special, hidden ones are plain text."""
        if not self._mark or self._mark not in hidden or self._find is None:
            return self._text.encode(hidden)
        parts: list[Tokens] = []
        at = 0
        for found in self._find.finditer(hidden):
            parts += [self._plain(hidden[at : found.start()]), self._text.encode(found[0])]
            at = found.end()
        return as_tokens(np.concatenate([*parts, self._plain(hidden[at:])]))

    def _plain(self, hidden: str) -> Tokens:
        return self._text.encode(self.show(hidden), markers=False)


class Prompted(NamedTuple):
    """``ids`` of a prompt, and where in it turns end, ascending: contexts that share the beginning go on from there."""

    ids: Tokens
    ends: tuple[int, ...]


def prompt(text: TextModel, messages: Sequence[Message], *, generate: bool = True) -> Prompted:
    """The ids of a conversation; with ``generate`` they end where the assistant's answer begins.

    Every turn is encoded by itself, so a conversation that goes on keeps the ids that it had. Raises EngineError if the
    template refuses the messages or a text is not valid Unicode.
    """
    disguise = Disguise(text, (given for m in messages for given in (m.role, m.content, m.name or "")))
    hidden = [
        Message(disguise.hide(m.role), disguise.hide(m.content), None if m.name is None else disguise.hide(m.name))
        for m in messages
    ]
    full = text.render(hidden, generate=generate)
    cuts = list(_cuts(lambda n: text.render(hidden[:n], generate=False), full, len(hidden)))
    ids, ends, at = [], [], 0
    for cut in [*cuts, len(full)]:
        if cut > at:
            ids.append(disguise.encode(full[at:cut]))
            at = cut
            ends.append(sum(map(len, ids)))
    # The end of a generation prompt is no end of a turn.
    return Prompted(as_tokens(np.concatenate(ids)) if ids else as_tokens([]), tuple(ends[: len(cuts)]))


def _cuts(render: Callable[[int], str], full: str, turns: int) -> Iterable[int]:
    """Characters of ``full`` after which a turn has ended, ascending."""
    last = 0
    for n in range(1, turns + 1):
        if n > _EACH and n % _EVERY and n < turns - 1:
            continue
        try:
            before = render(n)
        except EngineError:
            continue  # templates may refuse to end there, after a system turn for example
        if len(before) > last and full.startswith(before):
            last = len(before)
            yield last
