"""The contract of eviction policies: an author's own policy passes it by subclassing `PolicyContract` in a test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ctxreuse.store.policy import Facts, Policy, Shadow

__all__ = ["PolicyContract", "traffic"]


def traffic(requests: int, *, seed: int = 0, longest: int = 12) -> list[tuple[int, ...]]:
    """Paths of numbered blocks: contexts that share beginnings, grow by a few blocks, fork, and come back."""
    rng = Random(seed)
    recent: list[tuple[int, ...]] = []
    made: list[tuple[int, ...]] = []
    fresh = 0
    for _ in range(requests):
        path: tuple[int, ...] = ()
        if recent and rng.random() < 0.8:
            path = recent[-min(int(rng.paretovariate(0.8)), len(recent))]
            if rng.random() < 0.2:
                path = path[: rng.randrange(len(path) + 1)]
        grown = min(rng.randrange(3) + (not path), longest - len(path))
        path = (*path, *range(fresh, fresh + grown))
        fresh += grown
        recent = [*recent[-200:], path]
        made.append(path)
    return made


class PolicyContract(ABC):
    """What every policy must do. Give `make`; keys are ints here."""

    @abstractmethod
    def make(self) -> Policy[int]:
        """A fresh policy."""

    def test_orders_the_resident_blocks(self) -> None:
        policy = self.make()
        for key, parent, depth in ((1, None, 4), (2, 1, 8), (3, 1, 8), (4, None, 4)):
            policy.insert(Facts(key, parent, 4, depth, 100), 0.0)
        policy.access([1, 2], 1.0)
        policy.access([1, 3], 2.0)
        policy.access([4], 3.0)
        assert len(policy) == 4
        order = list(policy.order())
        assert sorted(order) == [1, 2, 3, 4]
        assert order.index(1) > max(order.index(2), order.index(3)), "a parent goes before its child"
        policy.remove(2, 4.0)
        assert sorted(policy.order()) == [1, 3, 4]
        assert len(policy) == 3

    def test_removing_an_absent_block_is_an_error(self) -> None:
        policy = self.make()
        with pytest.raises(KeyError):
            policy.remove(7, 0.0)

    def test_marks_may_name_anything(self) -> None:
        policy = self.make()
        policy.insert(Facts(1, None, 4, 4, 100), 0.0)
        policy.access([1], 0.0)
        for label in (0, 1, 7, 255):
            policy.on_pause(1, label, 1.0)
            policy.on_pause(99, label, 1.0)
        assert list(policy.order()) == [1]

    def test_a_block_may_come_back(self) -> None:
        shadow = Shadow(self.make(), 3)
        for path in ((1, 2), (3, 4), (1, 2), (5, 6), (1, 2), (3, 4)):
            shadow.request(path, 1, 1, 0.0)
            shadow.check()
            assert shadow.match(path) == 2 or shadow.policy.has_admission

    def test_a_path_longer_than_the_cache_keeps_its_beginning(self) -> None:
        shadow = Shadow(self.make(), 5)
        shadow.request((100, 101), 1, 1, 0.0)
        shadow.request(tuple(range(9)), 1, 1, 1.0)
        shadow.check()
        assert shadow.match(range(9)) == 5

    def test_asking_changes_nothing(self) -> None:
        requested, left = Shadow(self.make(), 40), Shadow(self.make(), 40)
        for now, path in enumerate(traffic(400, seed=3)):
            list(requested.order())
            next(iter(requested.order()), None)
            assert requested.request(path, 1, 16, now) == left.request(path, 1, 16, now)

    def test_sizes_differ(self) -> None:
        shadow, rng = Shadow(self.make(), 10_000), Random(5)
        size = {key: rng.randrange(1, 900) for key in range(2_000)}
        for now, path in enumerate(traffic(500, seed=4)):
            shadow.request(path, [size[key] for key in path], [16] * len(path), now)
            shadow.check()

    def test_learnt_state_survives_export_and_import(self) -> None:
        policy, other = self.make(), self.make()
        if not policy.dump():
            return
        shadow = Shadow(policy, 40)
        for now, path in enumerate(traffic(300, seed=6)):
            shadow.request(path, 1, 16, now)
        raw = policy.dump()
        assert len(raw) <= 1 << 16
        assert other.load(raw) is True
        for junk in (b"", b"\x00", raw[:-1], raw + b"\x00", b"\x93" * 50, bytes(len(raw))):
            assert self.make().load(junk) is False

    def test_any_sequence(self) -> None:
        make = self.make

        class Machine(RuleBasedStateMachine):
            @initialize(capacity=st.integers(1, 30))
            def start(self, capacity: int) -> None:
                self.shadow = Shadow(make(), capacity)
                self.known: list[tuple[int, ...]] = [()]
                self.fresh, self.now = 0, 0.0

            @rule(data=st.data(), grown=st.integers(0, 5), later=st.sampled_from((0.0, 0.5, 100.0, -1.0)))
            def request(self, data: st.DataObject, grown: int, later: float) -> None:
                base = data.draw(st.sampled_from(self.known))
                base = base[: data.draw(st.integers(0, len(base)))]
                path = (*base, *range(self.fresh, self.fresh + grown))
                self.fresh, self.now = self.fresh + grown, self.now + later
                served = self.shadow.request(path, 1, 1, self.now)
                assert served.blocks <= len(base)
                self.known = [*self.known[-20:], path]

            @rule(data=st.data(), label=st.integers(0, 9))
            def mark(self, data: st.DataObject, label: int) -> None:
                path = data.draw(st.sampled_from(self.known))
                if path:
                    self.shadow.on_pause(path[-1], label, self.now)

            @rule(data=st.data())
            def drop(self, data: st.DataObject) -> None:
                path = data.draw(st.sampled_from(self.known))
                resident = self.shadow.match(path)
                if resident and self.shadow.leaf(path[resident - 1]):
                    self.shadow.remove(path[resident - 1], self.now)

            @invariant()
            def sound(self) -> None:
                if hasattr(self, "shadow"):
                    self.shadow.check()

        limits = settings(
            max_examples=max(1, settings().max_examples // 4),  # of the profile that is active
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(Machine, settings=limits)
