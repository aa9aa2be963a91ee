"""Texts that a prompt has twice, byte for byte: the later one can be a line that points to the earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["LEAST", "Repeats", "without_repeats"]

#: Characters below which a text stays: a pointer has some 100 itself.
LEAST = 400
#: Characters of a text that a pointer quotes at first, and how many more until no other begins with them.
_QUOTED, _MORE = 40, 40


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
    far as no other text that stands before it begins so.
    """
    first: dict[str, int] = {}
    made, sources = list[str](), dict[int, int]()
    for at, text in enumerate(texts):
        source = first.setdefault(text, at)
        if source == at or len(text) < least:
            made.append(text)
        else:
            sources[at] = source
            made.append(_pointer(text, [one for one in first if one != text]))
    found = Repeats(tuple(made), sources)
    assert found.restored == list(texts), "a text would be lost"
    return found


def _pointer(text: str, others: Sequence[str]) -> str:
    length = _QUOTED
    while length < len(text) and any(other.startswith(text[:length]) for other in others):
        length += _MORE
    quoted = " ".join(text[:length].split())
    return f'(Here stands once more, word for word, the text of {len(text):,} characters above that begins: "{quoted}")'
