"""Compaction by itself: in idle time after a deletion, within a day in any case, and again after a full disk."""

from __future__ import annotations

from ctxreuse.errors import StoreFullError
from ctxreuse.store.idle_compaction import IdleCompaction
from ctxreuse.testing.clock import FakeClock


class Machine:
    """A store that was deleted from at ``since``; ``full``: its disk has no room."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.since: float | None = None
        self.busy = self.full = False
        self.done = 0
        self.compaction = IdleCompaction(lambda: self.since, self.work, lambda: self.busy, self.clock)

    def work(self) -> None:
        if self.full:
            raise StoreFullError("no room")
        self.done += 1
        self.since = None

    def hours(self, count: float) -> None:
        for _ in range(int(count * 60)):
            self.clock.advance(60)
            self.compaction.round()


def test_nothing_is_rewritten_without_a_deletion() -> None:
    machine = Machine()
    machine.hours(48)
    assert machine.done == 0


def test_idle_time_is_used_some_minutes_later() -> None:
    machine = Machine()
    machine.since = machine.clock.now()
    machine.hours(0.15)
    assert machine.done == 0
    machine.hours(0.1)
    assert machine.done == 1
    machine.hours(48)
    assert machine.done == 1


def test_a_machine_that_is_never_idle_compacts_within_a_day() -> None:
    machine = Machine()
    machine.busy, machine.since = True, machine.clock.now()
    machine.hours(19)
    assert machine.done == 0
    machine.hours(2)
    assert machine.done == 1


def test_a_full_disk_is_tried_again() -> None:
    machine = Machine()
    machine.full, machine.since = True, machine.clock.now()
    machine.hours(1)
    assert machine.done == 0
    machine.full = False
    machine.hours(0.5)
    assert machine.done == 1


def test_a_clock_that_was_set_back_puts_nothing_off() -> None:
    machine = Machine()
    machine.since = machine.clock.now() + 1e6
    machine.compaction.round()
    assert machine.done == 1
