"""Why blocks of a prompt had to be computed: they had left the store, were never there, or could not serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ctxreuse.store.gone import SHORT, Gone
from ctxreuse.why.records import Entry, Lack

__all__ = ["REFINED", "lacks_of", "shared_blocks"]

#: Words of `Usage.missed` that say less than can be known.
REFINED = ("", "absent", "no store")
# The first block's reason holds for all that were known before, as they were there but could not be used.
_OF_ITS_OWN = ("", "new", "evicted", "dropped", "refused", "lost", "running", "space")


def shared_blocks(one: Entry, two: Entry) -> int:
    """How many leading blocks two requests of the same space and tenant have in common."""
    low, high = 0, min(len(one.keys), len(two.keys)) // SHORT
    while low < high:  # a key names all that is before it, so one look at each halving is enough
        middle = (low + high + 1) // 2
        if one.keys[(middle - 1) * SHORT : middle * SHORT] == two.keys[(middle - 1) * SHORT : middle * SHORT]:
            low = middle
        else:
            high = middle - 1
    return low


def lacks_of(
    entry: Entry, gone: Callable[[bytes], Gone | None], seen: Mapping[bytes, float], beside: int
) -> tuple[Lack, ...]:
    """The runs that an entry had computed, cut where the reason changes; what had a reason already keeps it.

    ``gone``: how a block left last; ``seen``: when keys were first computed; ``beside``: leading blocks that
    another request was computing meanwhile.
    """
    found: list[Lack] = []
    for run in entry.lacks:
        found += [run] if run.reason else _run(entry, run.start, run.end, gone, seen, beside)
    return tuple(found)


def _run(
    entry: Entry,
    start: int,
    end: int,
    gone: Callable[[bytes], Gone | None],
    seen: Mapping[bytes, float],
    beside: int,
) -> list[Lack]:
    size, whole = entry.unit, (entry.tokens - 1) // entry.unit * entry.unit
    spans: list[Lack] = []

    def add(stop: int, reason: str, left: Gone | None = None) -> None:
        nonlocal start
        lack = Lack(start, stop, reason, *((left.at, left.why, left.by) if left is not None else ()))
        before = spans[-1] if spans else None
        if before is not None and (before.reason, before.rule) == (reason, lack.rule) and before.end == start:
            spans[-1] = Lack(before.start, stop, reason, before.at, before.rule, before.by)
        else:
            spans.append(lack)
        start = stop

    stop = min(end, whole)
    first = True
    while start < stop:
        i = start // size
        reason, left = _block(entry, entry.keys[i * SHORT : (i + 1) * SHORT], gone, seen, first=first)
        if start < beside * size:
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
    entry: Entry, key: bytes, gone: Callable[[bytes], Gone | None], seen: Mapping[bytes, float], *, first: bool
) -> tuple[str, Gone | None]:
    known = seen.get(key, entry.at + 1) <= entry.at
    own = entry.why in _OF_ITS_OWN
    if not own and (first or known):
        return entry.why, None
    left = gone(key)
    if left is not None and left.at > entry.at:
        left = None
    if left is not None:
        return left.how, left
    return ("lost" if known else entry.why if first and entry.why == "running" else "new"), None
