"""A full store under a leader with admission: blocks that it would evict first do not come in, and others stay."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ctxreuse.store import BlockStore
from ctxreuse.store.policy import AdaptivePolicy, Facts, NativeShadow, NumberedShadow
from ctxreuse.testing.store import Context
from oracle.policy.lru import LRU

BLOCKS = 8


class Loyal(LRU):
    """Keeps whom it met first: the newest go first, also before they are in."""

    name = "loyal"
    has_admission = True

    def order(self):  # type: ignore[no-untyped-def]
        return reversed(list(super().order()))

    def access(self, path, now):  # type: ignore[no-untyped-def]
        """Uses change nothing."""


def full(path: Path, *policies: type[LRU]) -> tuple[BlockStore, Context, Context]:
    """A store that holds one context and has room for no other."""
    first, second = Context(BLOCKS, seed=1), Context(BLOCKS, seed=2)
    with BlockStore.open(path / "size") as store:
        first.fill(store)
        capacity = store.stats().nbytes
    experts = [NumberedShadow(policy(), capacity) for policy in policies]
    store = BlockStore.open(path / "store", capacity=capacity, policy=AdaptivePolicy(experts, capacity, Random(0)))
    for context in (first, second):
        store.on_lookup(context.keys, context.size)
        context.fill(store)
        store.flush()
    return store, first, second


def test_a_leader_with_admission_declines_what_it_would_let_go_first(tmp_path: Path) -> None:
    store, first, second = full(tmp_path, Loyal)
    with store:
        assert store.match(first.keys).blocks == BLOCKS
        assert store.match(second.keys).blocks == 0
        refused = store.stats().refused
        assert refused["declined"] >= 1
        assert refused["declined"] + refused.get("orphan", 0) == BLOCKS  # what follows it cannot come in either
        assert store.stats().evicted == 0
        gone = store.removal(second.keys[0])
        assert gone is not None
        assert (gone.how, gone.why) == ("refused", "declined")
        store.check()


def test_any_other_leader_takes_in_what_comes(tmp_path: Path) -> None:
    store, first, second = full(tmp_path, LRU)
    with store:
        assert store.match(second.keys).blocks == BLOCKS
        assert store.match(first.keys).blocks == 0
        assert "declined" not in store.stats().refused
        store.check()


def test_a_block_of_no_prompt_is_never_declined(tmp_path: Path) -> None:
    first, second = Context(BLOCKS, seed=1), Context(BLOCKS, seed=2)
    policy: AdaptivePolicy[bytes] = AdaptivePolicy([NumberedShadow(Loyal(), BLOCKS)], BLOCKS, Random(0))
    policy.on_lookup(first.keys, [1] * BLOCKS, [16] * BLOCKS, 0.0)
    for i, key in enumerate(first.keys):
        policy.insert(Facts(key, first.keys[i - 1] if i else None, 16, 16 * (i + 1), 1), 0.0)
    assert not any(policy.declines(key) for key in [*first.keys, *second.keys])
    policy.on_lookup(second.keys, [1] * BLOCKS, [16] * BLOCKS, 1.0)
    assert all(policy.declines(key) for key in second.keys)
    assert not any(policy.declines(key) for key in first.keys)


def test_a_native_leader_with_admission_declines() -> None:
    context = Context(BLOCKS + 3)
    for name, has_admission in (("hazard", True), ("lru", False)):
        policy: AdaptivePolicy[bytes] = AdaptivePolicy([NativeShadow(name, BLOCKS)], BLOCKS, Random(0))
        policy.on_lookup(context.keys, [1] * len(context), [16] * len(context), 0.0)
        assert [key in policy.leader for key in context.keys] == [True] * BLOCKS + [False] * 3
        assert [key for key in context.keys if policy.declines(key)] == context.keys[BLOCKS:] * has_admission
