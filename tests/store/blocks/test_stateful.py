"""BlockStore against a naive model that evicts by the book: same held keys, same bytes, whatever the order of calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxreuse.identity.keys import ROOT
from ctxreuse.store import BlockStore
from ctxreuse.store.policy.base import prefill_line
from ctxreuse.store.policy.states import SHARE
from ctxreuse.testing.store import Context
from support.examples import examples

CAPACITY = 12 * 4096
CONTEXTS = [Context(6), Context(6, branch=1, fork=2), Context(6, branch=2, fork=4), Context(4, seed=1)]
BIG = Context(3, seed=2, floats=1500)
ALL = [*CONTEXTS, BIG]

contexts = st.sampled_from(ALL)


class Model:
    """Keys in order of eviction (first to go first) with their sizes; children of a key follow from the parents."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.parent: dict[bytes, bytes] = {}
        self.size: dict[bytes, int] = {}
        self.state: dict[bytes, int] = {}
        self.pins: dict[bytes, int] = {}

    def touch(self, key: bytes) -> None:
        while key != ROOT:
            self.order.remove(key)
            self.order.append(key)
            key = self.parent[key]

    def remove(self, key: bytes) -> None:
        self.order.remove(key)
        for table in (self.parent, self.size, self.state, self.pins):
            table.pop(key, None)

    def used(self) -> int:
        return sum(self.size.values()) + sum(self.state.values())

    def leaf(self, key: bytes) -> bool:
        return key not in self.parent.values()

    def replayed(self, key: bytes) -> float:
        """Seconds from the state before this one, for each context that goes on from here."""
        blocks, above = 1, self.parent[key]
        while above != ROOT and above not in self.state:
            blocks, above = blocks + 1, self.parent[above]
        return len([k for k in self.parent.values() if k == key]) * prefill_line()(self.depth(above), blocks * 4)

    def depth(self, key: bytes) -> int:
        return 0 if key == ROOT else 4 + self.depth(self.parent[key])

    def strip(self, need: int, keep: set[bytes]) -> None:
        """States inside contexts go first, but for what may always be there."""
        inner = [key for key in self.state if not self.leaf(key)]
        over = sum(self.state[key] for key in inner) - CAPACITY // SHARE
        worth = {key: (self.replayed(key) / self.state[key], self.depth(key), key) for key in inner}
        for key in sorted(inner, key=worth.__getitem__):
            if over > 0 and need > 0 and key not in keep and not self.pins.get(key):
                freed = self.state.pop(key)
                over, need = over - freed, need - freed

    def make_room(self, need: int, keep: set[bytes]) -> bool:
        self.strip(self.used() + need - CAPACITY, keep)
        gone: list[bytes] = []
        trial = Model()
        trial.order, trial.parent, trial.size = list(self.order), dict(self.parent), dict(self.size)
        trial.state, trial.pins = dict(self.state), dict(self.pins)
        while trial.used() + need > CAPACITY:
            free = [k for k in trial.order if trial.leaf(k) and not trial.pins.get(k) and k not in keep]
            if not free:
                return False
            gone.append(free[0])
            trial.remove(free[0])
        for key in gone:
            self.remove(key)
        return True

    def below(self, key: bytes) -> list[bytes]:
        found = [key]
        for k in self.order[::-1]:
            if self.parent[k] in found:
                found.append(k)
        return found


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.temp = tempfile.TemporaryDirectory()
        self.model = Model()
        self.open()

    def open(self) -> None:
        # A map that must grow several times on the way.
        self.store = BlockStore.open(Path(self.temp.name), capacity=CAPACITY, map_size=1 << 20, policy="lru")

    @rule(context=contexts, i=st.integers(0, 5), replace=st.booleans())
    def put(self, context: Context, i: int, replace: bool) -> None:
        self.put_one(context, i % len(context), replace)

    @rule(context=contexts)
    def fill(self, context: Context) -> None:
        for i in range(len(context)):
            self.put_one(context, i, False)

    def put_one(self, context: Context, i: int, replace: bool) -> None:
        key, parent, model = context.keys[i], context.parent(i), self.model
        data = context.block(i)
        accepted = self.store.put(key, data, replace=replace)
        self.store.flush()
        assert accepted == (key in model.size or parent == ROOT or parent in model.size)
        size = data.nbytes + 16
        if not accepted:
            return
        if key in model.size:
            model.touch(key)
        elif model.make_room(size, {key, parent}):
            model.order.append(key)
            model.parent[key], model.size[key] = parent, size
            model.touch(key)

    @rule(context=contexts, i=st.integers(0, 5))
    def put_state(self, context: Context, i: int) -> None:
        i %= len(context)
        key, model, data = context.keys[i], self.model, context.state(i)
        accepted = self.store.put(key, data, kind="state")
        self.store.flush()
        assert accepted == (key in model.size)
        if accepted and (key in model.state or model.make_room(data.nbytes + 16, {key, context.parent(i)})):
            model.state[key] = data.nbytes + 16
            model.touch(key)

    @rule(context=contexts, step=st.sampled_from([1, -1]))
    def pin(self, context: Context, step: int) -> None:
        model = self.model
        if step > 0:
            keys = [key for key in context.keys if key in model.size]
            assert self.store.pin(context.keys) == len(keys)
        else:
            keys = [key for key in context.keys if model.pins.get(key)]
            assert self.store.unpin(keys) == len(keys)
        for key in keys:
            model.pins[key] = model.pins.get(key, 0) + step

    @rule(context=contexts)
    def touch(self, context: Context) -> None:
        self.store.touch(context.keys)
        held = [key for key in context.keys if key in self.model.size]
        if held:
            self.model.touch(held[-1])

    @rule(context=contexts)
    def read(self, context: Context) -> None:
        held = [i for i, key in enumerate(context.keys) if key in self.model.size]
        assert self.store.match(context.keys).blocks == len(held)
        assert self.store.match(context.keys).state_blocks == max(
            (i + 1 for i in held if context.keys[i] in self.model.state), default=0
        )
        assert context.intact(self.store, held)
        if held:
            self.model.touch(context.keys[held[-1]])

    @rule(context=contexts, i=st.integers(0, 5))
    def drop(self, context: Context, i: int) -> None:
        key = context.keys[i % len(context)]
        self.store.drop(key, "test")
        if key in self.model.size:
            for below in self.model.below(key):
                self.model.remove(below)

    @rule(context=contexts)
    def forget(self, context: Context) -> None:
        gone = 0
        for key in reversed(context.keys):
            if key in self.model.size:
                if not self.model.leaf(key) or self.model.pins.get(key):
                    break
                self.model.remove(key)
                gone += 1
        assert self.store.forget(context.keys) == gone

    @precondition(lambda self: self.model.order)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        assert self.store.stats().recovered == ""
        self.model.pins.clear()

    @invariant()
    def agree(self) -> None:
        self.store.check()
        held = {key for context in ALL for key in context.keys if self.store.holdings([key])[0] is not None}
        assert held == set(self.model.size)
        stats = self.store.stats()
        assert (stats.blocks, stats.states, stats.nbytes) == (len(held), len(self.model.state), self.model.used())

    def teardown(self) -> None:
        self.store.close()
        self.temp.cleanup()


TestBlockStore = Machine.TestCase
TestBlockStore.settings = examples("normal", stateful_step_count=30, suppress_health_check=list(HealthCheck))
