"""What an eviction policy is told, and what it must answer: which held blocks go first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

__all__ = ["Asked", "Facts", "K", "Learner", "Policy", "Rebuild", "fill", "prefill_line"]

#: A block's name: 32 bytes in the store, an int in the lab.
K = TypeVar("K", bound=Hashable)

_K = TypeVar("_K", bound=Hashable, contravariant=True)

#: ``rebuild(start, tokens)``: seconds to compute ``tokens`` more tokens of a context after its first ``start``.
Rebuild: TypeAlias = Callable[[int, int], float]


class Facts(NamedTuple, Generic[K]):
    """A block as a policy sees it: ``tokens`` of its own, ``depth`` of its context up to its end, ``nbytes`` held.

    ``parent`` is None for the first block of a context.
    """

    key: K
    parent: K | None
    tokens: int
    depth: int
    nbytes: int

    @property
    def start(self) -> int:
        """Tokens of its context before it."""
        return self.depth - self.tokens


class Policy(Protocol[K]):
    """The order of eviction among held blocks. Not thread-safe: its owner serialises the calls.

    A path is root first and each block's parent is the one before it. ``now`` is seconds of the owner's clock and may
    stand still or go back a little. A block counts as used when it is accessed, not when it is inserted: who inserts
    blocks accesses the path that ends with them before anything else is asked.
    """

    name: str

    def insert(self, facts: Facts[K], now: float) -> None:
        """Hold one more block; its parent is held. A known key takes the new facts."""

    def access(self, path: Sequence[K], now: float) -> None:
        """One use of a path; all its blocks are held. What lies before its first block counts as not used."""

    def mark(self, tip: K, label: int, now: float) -> None:
        """The context that ends at ``tip`` paused for the reason ``label`` (0: unknown); an unknown key is ignored."""

    def remove(self, key: K, now: float) -> None:
        """A held block went: evicted or dropped, children first. Raises KeyError if it is not held."""

    def order(self) -> Iterator[K]:
        """All held keys, first to go first, children before parents where possible. Cheap to begin.

        Valid until the next change. Asking changes nothing that a later answer could show.
        """

    def __len__(self) -> int: ...


class Learner(Protocol):
    """A policy, or a part of one, that learns something worth keeping over a restart. It is found with `hasattr`."""

    def dump(self) -> bytes:
        """What was learnt so far, at most 64 KiB."""

    def load(self, raw: bytes) -> bool:
        """Go on from there; False (and no change) if the bytes are damaged or of another version. Never raises."""


class Asked(Protocol[_K]):
    """A policy that wants whole prompts, held or not."""

    def asked(self, path: Sequence[_K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """Somebody needed the context ``path``; ``sizes`` in bytes and ``tokens``, one a block."""


def fill(policy: Policy[K], facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> None:
    """Tell a fresh policy what its cache holds already, parents first, used in the order of ``uses``.

    A policy with a ``fill`` of its own is left to it.
    """
    if hasattr(policy, "fill"):
        policy.fill(facts, uses, now)
        return
    for one in facts:
        policy.insert(one, now)
    for path in uses:
        policy.access(path, now)


def prefill_line(per_token: float = 1e-3, per_pair: float = 1e-7) -> Rebuild:
    """The price of recomputing as a line: seconds a token, and a pair of a token with one before it (attention).

    The defaults are plausible for a small model on a laptop. Only ratios matter: policies compare blocks.
    """

    def rebuild(start: int, tokens: int) -> float:
        return per_token * tokens + per_pair * tokens * (start + tokens / 2)

    return rebuild
