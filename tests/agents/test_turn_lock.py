"""The turn lock: first come, first served, across threads and tasks."""

from __future__ import annotations

import threading

import pytest
from ctxreuse_agents.turn_lock import TurnLock

from ctxreuse.errors import SessionError


def test_the_holder_is_told_rather_than_left_to_wait_for_itself() -> None:
    gate = TurnLock()
    with gate.hold(), pytest.raises(SessionError, match="has not ended"):
        gate.wait()
    with gate.hold():
        pass


def test_waiters_get_it_in_the_order_of_asking() -> None:
    gate, order = TurnLock(), []
    gate.enter("first", lambda: None)
    for name in ("second", "third", "fourth"):
        assert not gate.enter(name, lambda name=name: order.append(name))
    gate.leave()
    assert order == ["second"]
    gate.leave()
    gate.leave()
    assert order == ["second", "third", "fourth"]
    gate.leave()
    assert gate.enter("fifth", lambda: None)


def test_who_forsakes_is_passed_over_even_if_it_was_handed_the_gate() -> None:
    gate, order = TurnLock(), []

    def second() -> None:
        order.append("second")

    def third() -> None:
        order.append("third")

    gate.enter("first", lambda: None)
    gate.enter("second", second)
    gate.enter("third", third)
    gate.cancel_wait(second)
    gate.leave()
    assert order == ["third"]
    gate.cancel_wait(third)  # handed over before it knew
    assert gate.enter("fourth", lambda: None)


def test_another_thread_may_leave_and_a_disowned_gate_makes_all_wait() -> None:
    gate = TurnLock()
    gate.wait()
    gate.disown()
    leaving = threading.Thread(target=gate.leave)
    asked = threading.Event()

    def wait() -> None:
        asked.set()
        with gate.hold():
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    asked.wait()
    leaving.start()
    leaving.join()
    gate.wait()
    gate.leave()
    waiting.join()


def test_many_threads_never_meet_inside() -> None:
    gate, inside, met = TurnLock(), [0], []

    def visit() -> None:
        for _ in range(200):
            with gate.hold():
                inside[0] += 1
                met.append(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=visit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1] * 1600
