"""From messages to a prompt's ids, turn by turn, so that no text that a message carries can act as the model's markers.

A document may spell the end of its own turn and a system turn after it. Were it encoded with the text that the chat
template writes, the model would obey it. So every marker in a message is hidden behind a private character while the
template runs, and spelt as the plain text that it is when the result is encoded.

A message may say where its parts end (documents, then a question). Each part is encoded by itself, with another private
character at its ends while the template runs: so a document has the same ids wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import EngineError
from ctxreuse.keys import Tokens, as_tokens

__all__ = ["Disguise", "Prompted", "prompt", "seams"]

# Ends of turns are looked for after each of the first turns, later after every so many: each costs a run of the
# template over all turns before it. What may be looked for depends on the position alone, so that a prompt that grows
# keeps the ids it had.
_EACH, _EVERY = 64, 16


def seams(content: str, cuts: Sequence[int]) -> tuple[int, ...]:
    """Characters of a content at which its parts are taken apart: the ``cuts`` within it, its beginning and its end.

    None without a cut within. Blanks at both ends belong to no part: templates may remove them.
    """
    start, end = len(content) - len(content.lstrip()), len(content.rstrip())
    inner = sorted({cut for cut in cuts if start < cut < end})
    return (start, *inner, end) if inner else ()


class Disguise:
    """Hides the markers of a model in some texts, and encodes what a template made of them. Thread-safe."""

    def __init__(self, text: TextModel, texts: Iterable[str]) -> None:
        """``texts``: all that will be hidden or rendered; the private characters are such that none of them has.

        Raises EngineError if there are markers to hide and the texts have all such characters.
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
        free = (char for char in map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))) if char not in used)
        if self._mark:
            self._mark = next(free, "")
            if not self._mark:
                raise EngineError("the text has every private-use character there is", fix="Remove some of them")
        #: Stands where parts end; "" if there is no character left for it: then nothing is taken apart.
        self.seam = next(free, "")

    def __bool__(self) -> bool:
        """True if there is anything to hide."""
        return bool(self._mark)

    def hide(self, given: str) -> str:
        """The text with each marker replaced by a private character, its number and that character again."""
        if not self._mark or self._find is None:
            return given
        return self._find.sub(lambda m: f"{self._mark}{self._names.index(m[0])}{self._mark}", given)

    def sew(self, given: str, cuts: Sequence[int]) -> str:
        """As `hide`, with the seam at both ends of each part that ``cuts`` make of the text."""
        ends = seams(given, cuts) if self.seam else ()
        return self.seam.join(self.hide(given[a:b]) for a, b in pairwise((0, *ends, len(given))))

    def show(self, hidden: str) -> str:
        """The text as it was before `hide` or `sew`, and what a template wrote around it."""
        if self.seam:
            hidden = hidden.replace(self.seam, "")
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

    def encode_parts(self, hidden: str) -> tuple[Tokens, tuple[int, ...]]:
        """As `encode`, each part by itself; and the positions [tokens] where parts end, the last one left out."""
        pieces = [self.encode(piece) for piece in (hidden.split(self.seam) if self.seam else [hidden]) if piece]
        ends = tuple(accumulate(map(len, pieces)))
        return as_tokens(np.concatenate(pieces) if pieces else []), tuple(sorted({*ends[:-1]} - {0, *ends[-1:]}))

    def _plain(self, hidden: str) -> Tokens:
        return self._text.encode(self.show(hidden), markers=False)


class Prompted(NamedTuple):
    """``ids`` of a prompt, and where in it turns end, ascending: contexts that share the beginning go on from there.
    ``parts``: where parts of messages and turns end, ascending."""

    ids: Tokens
    ends: tuple[int, ...]
    parts: tuple[int, ...] = ()


def prompt(text: TextModel, messages: Sequence[Message], *, generate: bool = True) -> Prompted:
    """The ids of a conversation; with ``generate`` they end where the assistant's answer begins.

    Every turn is encoded by itself, so a conversation that goes on keeps the ids that it had; and so is every part of a
    message (`Message.cuts`), as far as the template shows the content as it is. Raises EngineError if the template
    refuses the messages or a text is not valid Unicode.
    """
    disguise = Disguise(text, (given for m in messages for given in (m.role, m.content, m.name or "")))
    hidden = [
        Message(disguise.hide(m.role), disguise.hide(m.content), None if m.name is None else disguise.hide(m.name))
        for m in messages
    ]
    full = text.render(hidden, generate=generate)
    contents = [disguise.sew(m.content, m.cuts) if m.cuts else h.content for m, h in zip(messages, hidden)]
    if contents != [m.content for m in hidden]:
        hidden = _sewn(lambda given: text.render(given, generate=generate), disguise, hidden, contents, full)
        full = text.render(hidden, generate=generate)
    cuts = list(_cuts(lambda n: text.render(hidden[:n], generate=False), full, len(hidden)))
    ids: list[Tokens] = []
    ends: list[int] = []
    parts: list[int] = []
    at = n = 0
    for cut in [*cuts, len(full)]:
        if cut > at:
            piece, inner = disguise.encode_parts(full[at:cut])
            ids.append(piece)
            parts += [n + end for end in inner]
            at, n = cut, n + len(piece)
            ends.append(n)
    # The end of a generation prompt is no end of a turn.
    turns = tuple(ends[: len(cuts)])
    found = tuple(sorted({*parts, *turns} - {0}))
    return Prompted(as_tokens(np.concatenate(ids)) if ids else as_tokens([]), turns, found)


def _sewn(
    render: Callable[[Sequence[Message]], str], disguise: Disguise, hidden: list[Message], sewn: list[str], full: str
) -> list[Message]:
    """The messages with ``sewn`` contents, but for those that the template would show otherwise than in ``full``."""
    shown = disguise.show(full)

    def same(messages: list[Message]) -> bool:
        try:
            return disguise.show(render(messages)) == shown
        except EngineError:
            return False

    whole = [msgspec.structs.replace(m, content=content) for m, content in zip(hidden, sewn)]
    if same(whole):
        return whole
    found = list(hidden)
    for i, message in enumerate(whole):
        tried = [*found[:i], message, *found[i + 1 :]]
        if message.content != found[i].content and same(tried):
            found = tried
    return found


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
