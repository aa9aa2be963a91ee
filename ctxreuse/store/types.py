"""Values that a store takes and returns: entries, removals, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec

from ctxreuse.block.levels import EXACT
from ctxreuse.store.policy.base import Policy, PolicyStats

__all__ = ["Entry", "Holding", "PolicyStats", "Progress", "Removal", "StoreOptions", "StoreStats"]

#: Called as ``progress(done, total)`` from the working thread; both count entries.
Progress: TypeAlias = Callable[[int, int], None]


class StoreOptions(TypedDict, total=False):
    """Settings of a store by keyword; see `ctxreuse.config.StoreConfig`. ``policy`` may also be a policy itself."""

    capacity: int
    host_bytes: int
    policy: str | Policy[bytes]
    level: str
    recompress: bool


class Entry(NamedTuple):
    """A stored block.

    ``tokens`` of this block, which end at position ``end`` of the context; ``nbytes`` in the store. ``level`` as in the
    block's header; ``state_level`` that of the state at its end, if ``has_state``.
    """

    key: bytes
    parent: bytes
    tokens: int
    end: int
    nbytes: int
    has_state: bool
    level: str = EXACT
    state_level: str = EXACT


class Holding(NamedTuple):
    """What is stored under a key: its tokens, and the levels of its block and its state ("": none).

    ``split``: blocks after it are stored too (unknown to a reader beside the writing process).
    """

    tokens: int
    block: str
    state: str
    split: bool = False


class Removal(msgspec.Struct, frozen=True):
    """How a block left the store, or why it was refused.

    ``at``: seconds since 1970. ``why``: for ``evicted`` the policy, for ``dropped`` the reason of `Store.drop`, or
    ``forgotten``, ``capacity``, ``rebuilt``; for ``refused`` see `StoreStats`. ``by``: first bytes of the key that
    needed the room, if any.
    """

    at: float
    how: Literal["evicted", "dropped", "refused"]
    why: str
    by: bytes = b""


class StoreStats(msgspec.Struct, frozen=True):
    """Figures of a store at one moment: counts since it was opened, sizes in bytes.

    ``nbytes``: whole pages of all values, at most ``capacity``; ``file_bytes``: the file, which keeps freed pages for
    reuse. Reasons in

    - ``misses``: ``absent``, ``corrupt``, ``truncated``, ``foreign`` (bytes of another key or program), ``older``,
      ``newer`` (format), ``space`` (another model), ``tokens`` (same key, other token ids), ``level`` (stored at a
      level that the reader does not allow), ``unreadable`` (the disk failed);
    - ``refused`` (puts): ``queue_full``, ``orphan`` (the parent is not stored), ``too_big``, ``no_room`` (all else is
      pinned), ``declined`` (by the policy of a full store), ``malformed``, ``disk`` (a failed commit), ``backoff``
      (too soon after one), ``readonly``, ``closed``;
    - ``dropped`` (removed other than by eviction): the reason of `Store.drop`, or ``below`` (under such an entry).

    ``unwritten``, ``unwritten_bytes``: values in memory that the disk refused and that are offered to it again;
    ``failing``: the disk's last write failed. ``recovered``: what opening found, ``""`` (nothing to do), ``kept``,
    ``verified`` or ``rebuilt``. ``levels``: blocks by level, without profile (empty beside the writing process).
    ``recompressed``: entries encoded smaller to make room, by ``FROM>TO``. ``policy``: None under a single policy.
    """

    blocks: int
    states: int
    tokens: int
    nbytes: int
    capacity: int
    queued: int
    queued_bytes: int
    file_bytes: int
    hits: int
    misses: Mapping[str, int]
    puts: int
    duplicates: int
    refused: Mapping[str, int]
    evicted: int
    dropped: Mapping[str, int]
    errors: Mapping[str, int]
    recovered: str = ""
    levels: Mapping[str, int] = {}
    recompressed: Mapping[str, int] = {}
    policy: PolicyStats | None = None
    unwritten: int = 0
    unwritten_bytes: int = 0
    failing: bool = False

    def fields(self) -> dict[str, Any]:
        """Return all figures as JSON types, also under the names that version 0.1.0 gave to some of them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        policy = found["policy"]
        names = ("leader", "switches", "asked", "real", "hits", "weights")
        old = None if policy is None else dict(zip(names, policy.values()))
        return {**found, "demoted": found["recompressed"], "standing": old}
