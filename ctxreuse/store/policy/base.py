"""The interface of eviction policies: events of the cache in, the order of eviction out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

__all__ = ["Facts", "K", "Policy", "PolicyStats", "RecomputeCost", "StoreContents", "prefill_line"]

#: A block's name: 32 bytes in the store, an int in the lab.
K = TypeVar("K", bound=Hashable)

#: ``cost(start, tokens)``: seconds to compute ``tokens`` more tokens of a context after its first ``start``.
RecomputeCost: TypeAlias = Callable[[int, int], float]


class Facts(NamedTuple, Generic[K]):
    """A block as a policy sees it: ``tokens`` of its own, ``depth`` of its context up to its end, ``nbytes`` stored.

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


class StoreContents(Protocol):
    """What a store holds when it is opened.

    ``tree``: the arena of its context tree, in which no place is free. ``order``: places (uint32) in the order of use,
    each path from its end to where the next one begins. ``unique``: no two keys begin with the same 8 bytes.
    """

    tree: Any
    order: Any
    unique: bool

    def unpacked(self) -> tuple[list[Facts[bytes]], list[list[bytes]]]:
        """Return the blocks, parents first, and the paths in the order of use, as `Policy.fill` takes them."""


class PolicyStats(msgspec.Struct, frozen=True):
    """Figures of an adaptive policy since the store was made.

    ``leader``: the expert that the cache follows; ``switches``: how often that changed. ``lookup_tokens`` of all
    prompts, ``hit_tokens`` of them in the cache itself, ``expert_hit_tokens`` in each expert's shadow.
    ``weights`` of the experts and of the greedy rule.
    """

    leader: str
    switches: int
    lookup_tokens: int
    hit_tokens: int
    expert_hit_tokens: Mapping[str, int]
    weights: Mapping[str, float]


class Policy(ABC, Generic[K]):
    """The order of eviction among cached blocks. Not thread-safe: its owner serialises the calls.

    A path is root first; each block's parent is the one before it. ``now`` is seconds of the owner's clock, which may
    stand still or go back a little. A block counts as used when it is accessed, not when it is inserted: the owner
    accesses the path that ends with inserted blocks before any other call.
    """

    name: str
    #: A block of the request itself may be the first to go: the policy decides what is admitted.
    has_admission: bool = False
    #: The next victim depends on the last: ask for the order again after each removal.
    evicts_one_at_a_time: bool = False
    #: `on_lookup` does something.
    wants_lookups: bool = False

    @abstractmethod
    def insert(self, facts: Facts[K], now: float) -> None:
        """Add a block whose parent is cached."""

    @abstractmethod
    def access(self, path: Sequence[K], now: float) -> None:
        """Count one use of a path of cached blocks. What lies before its first block counts as not used."""

    @abstractmethod
    def remove(self, key: K, now: float) -> None:
        """Remove a block that was evicted or dropped, children first. Raises KeyError if it is not cached."""

    @abstractmethod
    def order(self) -> Iterator[K]:
        """Iterate over all cached keys, first to go first, children before parents where possible. Cheap to begin.

        Valid until the next change; has no effect that a later answer could show.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> None:
        """Add what the cache holds already to a fresh policy: blocks parents first, then ``uses`` in order."""
        for one in facts:
            self.insert(one, now)
        for path in uses:
            self.access(path, now)

    def fill_stored(self, stored: StoreContents, now: float) -> None:
        """Add what a store holds to a fresh policy; see `fill`."""
        facts, uses = stored.unpacked()
        self.fill(facts, uses, now)  # type: ignore[arg-type]

    def on_lookup(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """Take note of a prompt, cached or not, before it is used; ``sizes`` in bytes and ``tokens``, one a block."""

    def on_partial_use(self, path: Sequence[K], now: float) -> None:
        """Count a use of cached blocks that belongs to no prompt."""
        self.access(path, now)

    def on_pause(self, tip: K, label: int, now: float) -> None:
        """Take note that the context ending at ``tip`` paused for reason ``label`` (0: unknown); any key will do."""

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """Set the seconds of prefill a token, and a pair of a token and one before it."""

    def declines(self, key: K) -> bool:
        """Return True if a full cache should rather keep what it has than admit the block ``key``."""
        return False

    def dump(self) -> bytes:
        """Return what was learnt, at most 64 KiB; b"" for a policy that learns nothing."""
        return b""

    def load(self, raw: bytes) -> bool:
        """Restore a `dump`. Returns False, with no change, for damaged bytes or another version. Never raises."""
        return False

    @property
    def stored_name(self) -> str:
        """The name under which a dump is stored."""
        return self.name

    @property
    def description(self) -> str:
        """The name, and for an adaptive policy the expert that leads."""
        return self.name

    @property
    def stats(self) -> PolicyStats | None:
        """Figures of an adaptive policy."""
        return None

    def check(self) -> None:
        """Raise AssertionError where its state is inconsistent. O(blocks)."""


def prefill_line(per_token: float = 1e-3, per_pair: float = 1e-7) -> RecomputeCost:
    """Return a linear cost: seconds a token, and a pair of a token with one before it (attention).

    The defaults are plausible for a small model on a laptop. Only ratios matter: policies compare blocks.
    """

    def cost(start: int, tokens: int) -> float:
        return per_token * tokens + per_pair * tokens * (start + tokens / 2)

    return cost
