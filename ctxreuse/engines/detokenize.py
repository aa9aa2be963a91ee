"""Text as it is generated: ids to text piece by piece, without half characters, and stop strings across pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctxreuse.engines.text import TextModel

__all__ = ["Detokenizer", "StopStrings", "overlap"]

#: Ids of context before the new text: what a tokenizer's spacing rules look back at.
_CONTEXT = 6
#: A character has at most four bytes, so more pending ids than this hold text that is broken for good.
_PENDING = 16


class Detokenizer:
    """Turns ids into text one at a time; text is given out when the characters in it are complete. Not thread-safe.

    The pieces put together equal the text of all ids decoded at once, where the tokenizer decodes a sequence
    independently of what is more than a few ids before it.
    """

    def __init__(self, text: TextModel, context: Sequence[int] = (), spelled: Mapping[int, str] | None = None) -> None:
        """``context``: ids before the first new one (the end of the prompt); ``spelled``: special ids that have a text
        here."""
        self._text, self._spelled = text, spelled or {}
        self._ids = [int(i) for i in context[-_CONTEXT:]]
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """The text that this id completes; "" while a character is incomplete."""
        if token in self._spelled:
            return self._advance(final=True) + self._spelled[token]
        self._ids.append(token)
        return self._advance(final=len(self._ids) - self._read > _PENDING)

    def flush(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before, after = self._text.decode(self._ids[: self._read]), self._text.decode(self._ids)
        if not final and after.endswith("\ufffd"):
            return ""
        new = after[len(before) :]
        if new:
            # The ids that gave the last text are the context of the next, so decoding stays of constant length. Ids
            # without text (special ones) never stand alone in front: what follows them would lose its leading blank.
            del self._ids[: self._read]
        self._read = len(self._ids)
        return new


class StopStrings:
    """Watches a text that comes in pieces for stop strings, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        #: The stop string that ended the text; "": none did.
        self.found = ""

    def add(self, text: str) -> str:
        """Text that can be given out now; when ``found``, it ended before the earliest stop string."""
        self._pending += text
        hits = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            out, self._pending = self._pending[:at], ""
            return out
        keep = max((overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - keep
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out

    def flush(self) -> str:
        """Text held back that no stop string came of."""
        out, self._pending = self._pending, ""
        return out


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
