"""What a node has probably cached: the beginnings of the requests that it was sent, newest last, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

__all__ = ["KnownPrefixes", "PrefixRun"]


class PrefixRun(NamedTuple):
    """A run of tokens in a prompt. ``key`` names all from the prompt's beginning to the end of the run."""

    key: Hashable
    tokens: int


class KnownPrefixes:
    """The runs that one node was sent, as an LRU of its size would keep them. Not thread-safe.

    Args:
        tokens: that the node keeps; what is beyond is forgotten, the least recently used first and of one prompt the
            end first.
        entries: runs at most, whatever their tokens.
    """

    def __init__(self, tokens: float, entries: int = 1 << 16) -> None:
        self._most, self._entries = tokens, entries
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._runs)

    def match(self, path: Sequence[PrefixRun]) -> int:
        """Return the leading tokens of a prompt that are known. Pure."""
        found, runs = 0, self._runs
        for key, tokens in path:
            if key not in runs:
                break
            found += tokens
        return found

    def missing(self, path: Sequence[PrefixRun]) -> list[Hashable]:
        """Return the keys of a prompt's runs that are not known. Pure."""
        runs = self._runs
        return [key for key, _ in path if key not in runs]

    def note(self, path: Sequence[PrefixRun]) -> None:
        """Note that the node computes a prompt."""
        runs = self._runs
        for key, tokens in reversed(path):  # so that the beginning of a prompt is newer than its end
            self.tokens += tokens - runs.pop(key, 0)
            runs[key] = tokens
        while self._runs and (self.tokens > self._most or len(self._runs) > self._entries):
            self.tokens -= self._runs.popitem(last=False)[1]

    def forget(self, key: Hashable) -> None:
        """Note that the node has removed a run."""
        self.tokens -= self._runs.pop(key, 0)

    def clear(self) -> None:
        """Note that the node has started again."""
        self._runs.clear()
        self.tokens = 0

    def check(self) -> None:
        """Raise AssertionError if a bound or a count is wrong."""
        assert self.tokens == sum(self._runs.values()), "tokens counted wrong"
        assert self.tokens <= self._most, "more tokens than the node keeps"
        assert len(self._runs) <= self._entries, "more runs than are remembered"
