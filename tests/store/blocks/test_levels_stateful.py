"""A store of several levels under any order of calls: room is kept, readers get what they allow, promises last."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT, PACKED, allowed_by, is_exact, quality_key
from ctxreuse.store import BlockStore
from ctxreuse.store.lmdb.records import footprint
from ctxreuse.testing.store_levels import CodedContext, codec
from support.examples import examples

CONTEXTS = [CodedContext(4), CodedContext(4, branch=1, fork=2), *(CodedContext(3, seed=seed) for seed in range(1, 5))]
PLACES = {key: (context, i) for context in CONTEXTS for i, key in enumerate(context.keys)}
CAPACITY = 8 * footprint(CONTEXTS[0].block(0).nbytes)

contexts = st.sampled_from(CONTEXTS)
permissions = st.sampled_from([None, 0.01, 0.05])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.temp = tempfile.TemporaryDirectory()
        #: Keys that were held exactly when somebody used them who wants them so.
        self.promised: set[bytes] = set()
        self.open(EXACT)

    def open(self, level: str) -> None:
        self.store = BlockStore.open(Path(self.temp.name), capacity=CAPACITY, map_size=1 << 20, level=level)
        self.store.register_codec(codec())

    def levels(self) -> dict[bytes, str]:
        return {entry.key: entry.level for entry in self.store.walk()}

    @rule(context=contexts, max_kl=permissions)
    def fill(self, context: CodedContext, max_kl: float | None) -> None:
        for i, key in enumerate(context.keys):
            self.store.put(key, context.block(i), max_kl=max_kl)
        self.store.flush()
        if max_kl is None:
            held = self.levels()
            exact = {key for key in context.keys if key in held and is_exact(held[key])}
            self.promised |= exact
            # One that was coded stays so only where the exact one, which is larger, has no room.
            if len(exact) < len(held.keys() & set(context.keys)):
                assert self.store.stats().nbytes + footprint(context.block(0).nbytes) > CAPACITY

    @rule(
        context=contexts,
        i=st.integers(0, 3),
        level=st.sampled_from([PACKED, "kl-0.01", "kl-0.05", "approx~kl-0.05"]),
        replace=st.booleans(),
    )
    def put_coded(self, context: CodedContext, i: int, level: str, replace: bool) -> None:
        i %= len(context)
        before = self.levels().get(context.keys[i])
        self.store.put(context.keys[i], context.at(i, level), replace=replace, max_kl=0.05)
        self.store.flush()
        after = self.levels().get(context.keys[i])
        if before is not None and after is not None:
            assert quality_key(after) <= max(
                quality_key(before), quality_key("kl-0.05") if is_exact(before) else quality_key(before)
            )

    @rule(context=contexts, max_kl=permissions)
    def read(self, context: CodedContext, max_kl: float | None) -> None:
        held, served = self.levels(), []
        with self.store.read(max_kl) as reader:
            for i, key in enumerate(context.keys):
                view = context.get(reader, i)
                assert (view is not None) == (key in held and allowed_by(held[key], max_kl))
                if view is None:
                    continue
                assert view.header.level == held[key]
                served.append(key)
                raw, real = parse(codec().decode(view)), parse(context.block(i))
                for role in "kv":
                    error = np.abs(raw.array(0, role) - real.array(0, role)).max()
                    assert error <= (0.0 if is_exact(held[key]) else 0.5)
        assert self.store.match(context.keys, max_kl).blocks <= len(served)
        if max_kl is None:
            self.promised |= set(served)

    @rule(context=contexts, i=st.integers(0, 3))
    def drop(self, context: CodedContext, i: int) -> None:
        self.store.drop(context.keys[i % len(context)], "test")

    @rule(context=contexts, on=st.booleans())
    def pin(self, context: CodedContext, on: bool) -> None:
        (self.store.pin if on else self.store.unpin)(context.keys)

    @rule(level=st.sampled_from([EXACT, PACKED, "kl-0.05"]))
    def reopen(self, level: str) -> None:
        before = self.levels()
        self.store.close()
        self.open(level)
        assert self.store.stats().recovered == ""
        assert self.levels() == before

    @invariant()
    def agree(self) -> None:
        self.store.check()
        stats, held = self.store.stats(), self.levels()
        assert stats.nbytes <= CAPACITY
        assert sum(stats.levels.values()) == stats.blocks == len(held)
        self.promised &= set(held)
        assert all(is_exact(held[key]) for key in self.promised)

    def teardown(self) -> None:
        self.store.close()
        self.temp.cleanup()


def test_a_full_store_leaves_a_coded_block_as_it_is_where_the_exact_one_has_no_room() -> None:
    machine, (pinned, context, other) = Machine(), (CONTEXTS[4], CONTEXTS[2], CONTEXTS[0])
    try:
        for filled, max_kl in ((pinned, None), (context, 0.01), (other, None)):
            machine.fill(filled, max_kl)
        for one in (pinned, other):
            machine.pin(one, True)
        coded = {key for key in context.keys if not is_exact(machine.levels()[key])}
        assert coded, "there was no room for all"
        machine.fill(context, None)
        machine.agree()
        with machine.store.read(None) as reader:
            assert all(context.get(reader, context.keys.index(key)) is None for key in coded), "nobody gets it as exact"
    finally:
        machine.teardown()


TestLevels = Machine.TestCase
TestLevels.settings = examples("heavy", stateful_step_count=25, suppress_health_check=list(HealthCheck))
