"""Texts that a prompt has twice, byte for byte: the later one can be a line that points to the earlier."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["LEAST", "Repeats", "without_repeats"]

#: Characters below which a text stays: a pointer has some 100 itself.
LEAST = 400
#: A pointer quotes so many characters of its text, or a multiple of it; if others begin so too, up to the most.
_QUOTED, _MOST_QUOTED = 40, 320


class Repeats(msgspec.Struct, frozen=True):
    """``texts`` with pointers in place of repeats, and for each pointer's index in ``sources`` that of the text it
    points to, which stands before it and is no pointer.

    Raises ValueError where a source is no earlier text.
    """

    texts: tuple[str, ...]
    sources: Mapping[int, int]

    def __post_init__(self) -> None:
        for at, source in self.sources.items():
            if not 0 <= source < at < len(self.texts) or source in self.sources:
                raise ValueError(f"text {at} of {len(self.texts)} cannot point to text {source}")

    @property
    def restored(self) -> list[str]:
        """The texts as they were given."""
        return [self.texts[self.sources.get(at, at)] for at in range(len(self.texts))]


def without_repeats(texts: Sequence[str], least: int = LEAST) -> Repeats:
    """Replace each text of at least ``least`` characters that stands before, equal to the byte, by a pointer.

    Earlier texts stay as they are, so a prefix that is cached stays one. A pointer quotes the beginning of its text, as
    far as no other text that stands before it begins so; where that would be long the text stays.
    """
    first: dict[str, int] = {}
    before, made, sources = list[str](), list[str](), dict[int, int]()
    for at, text in enumerate(texts):
        source = first.setdefault(text, at)
        pointer = ""
        if source == at:
            insort(before, text)
        elif len(text) >= least:
            pointer = _pointer(text, before)
        if pointer:
            sources[at] = source
        made.append(pointer or text)
    found = Repeats(tuple(made), sources)
    assert found.restored == list(texts), "a text would be lost"
    return found


def _pointer(text: str, before: Sequence[str]) -> str:
    """Return what points to a text among those ``before``, in ascending order; "": its beginning does not tell it."""
    at = bisect_left(before, text)
    beside = [*before[max(at - 1, 0) : at], *before[at + 1 : at + 2]]  # of sorted texts these share most
    length = _QUOTED
    while any(other.startswith(text[:length]) for other in beside):
        length += _QUOTED
        if length > _MOST_QUOTED:
            return ""
    quoted = " ".join(text[:length].split())
    return f'(Here stands once more, word for word, the text of {len(text):,} characters above that begins: "{quoted}")'
