"""Why blocks of a prompt had to be computed: they were removed from the store, never there, or not usable."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ctxreuse.store.removals import SHORT_KEY
from ctxreuse.store.types import Removal
from ctxreuse.why.records import LoggedEntry, MissSpan

__all__ = ["REFINED", "miss_spans", "removal_reason", "shared_blocks"]

#: Values of `Usage.miss_reason` that the log can refine.
REFINED = ("", "absent", "no store")
#: Refusals because the disk failed to write, or had just failed.
_DISK = ("disk", "backoff")
# The first block's reason holds for all blocks computed before: they were there but could not be used.
_OF_ITS_OWN = ("", "new", "evicted", "dropped", "refused", "disk", "lost", "running", "space")


def removal_reason(removal: Removal) -> str:
    """Return the reason of a miss that a removal is."""
    return "disk" if removal.how == "refused" and removal.why in _DISK else removal.how


def shared_blocks(one: LoggedEntry, two: LoggedEntry) -> int:
    """Return how many leading blocks two requests of the same space and tenant have in common."""
    low, high = 0, min(len(one.keys), len(two.keys)) // SHORT_KEY
    while low < high:  # a key names all that is before it, so one look at each halving is enough
        middle = (low + high + 1) // 2
        if (
            one.keys[(middle - 1) * SHORT_KEY : middle * SHORT_KEY]
            == two.keys[(middle - 1) * SHORT_KEY : middle * SHORT_KEY]
        ):
            low = middle
        else:
            high = middle - 1
    return low


def miss_spans(
    entry: LoggedEntry, removal: Callable[[bytes], Removal | None], seen: Mapping[bytes, float], shared: int
) -> tuple[MissSpan, ...]:
    """Return the computed spans of an entry, cut where the reason changes; known reasons are kept.

    ``removal``: how a block was removed last; ``seen``: when keys were first computed; ``shared``: leading blocks that
    another request was computing at the same time.
    """
    found: list[MissSpan] = []
    for run in entry.misses:
        found += [run] if run.reason else _run(entry, run.start, run.end, removal, seen, shared)
    return tuple(found)


def _run(
    entry: LoggedEntry,
    start: int,
    end: int,
    removal: Callable[[bytes], Removal | None],
    seen: Mapping[bytes, float],
    shared: int,
) -> list[MissSpan]:
    size, whole = entry.unit, (entry.tokens - 1) // entry.unit * entry.unit
    spans: list[MissSpan] = []

    def add(stop: int, reason: str, left: Removal | None = None) -> None:
        nonlocal start
        miss = MissSpan(start, stop, reason, *((left.at, left.why, left.by) if left is not None else ()))
        before = spans[-1] if spans else None
        if before is not None and (before.reason, before.rule) == (reason, miss.rule) and before.end == start:
            spans[-1] = MissSpan(before.start, stop, reason, before.at, before.rule, before.by)
        else:
            spans.append(miss)
        start = stop

    stop = min(end, whole)
    first = True
    while start < stop:
        i = start // size
        reason, left = _block(entry, entry.keys[i * SHORT_KEY : (i + 1) * SHORT_KEY], removal, seen, first=first)
        if start < shared * size:
            reason, left = "running", None
        if reason in ("new", "space"):
            break  # nothing that follows what is new can be old
        add(min((i + 1) * size, stop), reason, left)
        first = False
    if start < stop:
        add(stop, entry.why if first and entry.why in ("new", "space") else "new")
    if start < end:
        add(end, "tail")
    return spans


def _block(
    entry: LoggedEntry,
    key: bytes,
    removal: Callable[[bytes], Removal | None],
    seen: Mapping[bytes, float],
    *,
    first: bool,
) -> tuple[str, Removal | None]:
    known = seen.get(key, entry.at + 1) <= entry.at
    own = entry.why in _OF_ITS_OWN
    if not own and (first or known):
        return entry.why, None
    left = removal(key)
    if left is not None and left.at > entry.at:
        left = None
    if left is not None:
        return removal_reason(left), left
    if first and entry.why in ("refused", "disk"):
        return entry.why, None  # it was offered again since, in vain or not
    return ("lost" if known else entry.why if first and entry.why == "running" else "new"), None
