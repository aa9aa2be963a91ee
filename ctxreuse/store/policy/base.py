"""What an eviction policy must do: keep held keys in the order in which they should go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

__all__ = ["Policy"]


class Policy(Protocol):
    """The order of eviction. Not thread-safe: the store serialises the calls.

    The store persists it as one sequence number a key, renewed at each access, and replays the keys in that order.
    """

    def insert(self, key: bytes, *, oldest: bool = False) -> None:
        """Hold one more key, as the newest; ``oldest`` puts it back at the head (an eviction that was undone)."""

    def access(self, path: Sequence[bytes]) -> None:
        """A path, root first and ending at any node, was used now. All its keys are held."""

    def remove(self, key: bytes) -> None:
        """Forget a key; raises KeyError if it is not held."""

    def order(self) -> Iterator[bytes]:
        """Held keys, first to go first. Valid until the next change."""

    def __len__(self) -> int: ...
