"""Which of the prompts in flight begin alike, and who waits for whose blocks. Nothing here waits or computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

__all__ = ["Following", "Prompt", "PromptTable"]

P = TypeVar("P", bound="Prompt")


class Prompt:
    """One prompt in flight: from before its first block is looked up until its context is released.

    Attributes:
        number: grows with every prompt.
        keys: prefix keys of its whole blocks; those of different tenants never match.
        usable: leading blocks that it may take from another; at least one token is computed.
        max_kl: the limit of the KV that it may hold.
        done: leading blocks that are in its context for good.
        ended: nothing more will come.
        wanted: by the number of each prompt that waits for it, the leading blocks that it waits for.
    """

    __slots__ = ("__weakref__", "done", "ended", "keys", "max_kl", "number", "usable", "wanted")

    def __init__(self, keys: Sequence[bytes], usable: int, max_kl: float | None) -> None:
        self.keys, self.usable, self.max_kl = keys, usable, max_kl
        self.number, self.done, self.ended = 0, 0, False
        self.wanted: dict[int, int] = {}


class Following(NamedTuple, Generic[P]):
    """A prompt that has the first ``blocks`` blocks of another, or will have them."""

    leader: P
    blocks: int

    @property
    def settled(self) -> bool:
        """True if they are there, or will never be."""
        return self.leader.ended or self.ready

    @property
    def ready(self) -> bool:
        """True if they are there."""
        return self.leader.done >= self.blocks


class PromptTable(Generic[P]):
    """The prompts in flight, as long as somebody has them. Not thread-safe.

    A prompt only ever waits for one that came earlier, so no two wait for each other; and when its leader fails, the
    next one that looks finds none, and computes for the others.
    """

    def __init__(self) -> None:
        self._prompts = WeakValueDictionary[int, P]()
        self._number = 0

    def prompts(self) -> list[P]:
        """Return all of them."""
        return list(self._prompts.values())

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: P) -> None:
        """Add a prompt, and give it its number."""
        self._number += 1
        prompt.number = self._number
        self._prompts[self._number] = prompt

    def follow(self, prompt: P, cached: int) -> Following[P] | None:
        """Let ``prompt`` wait for the earlier one that shares most blocks with it; None unless more than ``cached``."""
        best: Following[P] | None = None
        for other in self.prompts():
            if other.number >= prompt.number or not _within(other.max_kl, prompt.max_kl):
                continue
            blocks = min(_common(prompt.keys, other.keys), prompt.usable)
            if blocks > (best.blocks if best is not None else cached):
                best = Following(other, blocks)
        if best is not None:
            best.leader.wanted[prompt.number] = best.blocks
        return best

    def end(self, prompt: P) -> None:
        """Nothing more comes of ``prompt``."""
        prompt.ended = True
        self._prompts.pop(prompt.number, None)

    def check(self) -> None:
        """Raise AssertionError if a prompt is waited for by an earlier one, or has ended and is still here."""
        for prompt in self.prompts():
            assert not prompt.ended
            assert all(number > prompt.number for number in prompt.wanted), "a prompt waits for a later one"
            assert prompt.done <= len(prompt.keys)


def _within(limit: float | None, allowed: float | None) -> bool:
    """True if KV within ``limit`` is within ``allowed`` too."""
    return limit is None or (allowed is not None and limit <= allowed)


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Equal leading keys; each names all before it, so that the last equal one is found by halving."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
