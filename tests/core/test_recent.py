"""Entries of a dict that must not grow without end."""

from __future__ import annotations

import sys

from ctxreuse.recent import keep_newest
from ctxreuse.store.removals import RemovalLog


def test_no_more_than_the_most_and_the_newest_of_them() -> None:
    entries = {n: str(n) for n in range(80)}
    assert keep_newest(entries, 80) is entries
    entries[80] = "80"
    assert list(keep_newest(entries, 80).items()) == [(n, str(n)) for n in range(11, 81)]
    assert list(keep_newest(dict.fromkeys(range(1000)), 80)) == list(range(930, 1000))
    assert list(keep_newest(dict.fromkeys(range(5)), 3)) == [2, 3, 4]


def test_it_is_as_large_when_full_as_it_stays() -> None:
    """One entry deleted for each that is added: the dict doubled once a third more entries had passed than it keeps."""
    most, entries, sizes = 1 << 12, dict[int, None](), list[int]()
    for n in range(8 * most):
        entries[n] = None
        entries = keep_newest(entries, most)
        if n >= most:
            sizes.append(sys.getsizeof(entries))
    assert max(sizes) <= sys.getsizeof(dict.fromkeys(range(most)))


def test_removals_stay_as_large_as_when_full() -> None:
    log = RemovalLog(most=1 << 12)
    full = 0
    for n in range(1 << 15):
        log.add([n.to_bytes(8, "little")], "evicted", "capacity")
        if n == 1 << 12:
            full = sys.getsizeof(log._row)
    assert len(log) == 1 << 12
    assert sys.getsizeof(log._row) <= full
    log.check()
