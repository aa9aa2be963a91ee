"""A full store under a choosy leader: what the policy would let go first does not come in, and what it keeps stays."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ctxreuse.store import BlockStore
from ctxreuse.store.policy.base import Facts
from ctxreuse.store.policy.duel import Duel
from ctxreuse.store.policy.lru import LRU
from ctxreuse.store.policy.shadow import Shadow
from ctxreuse.testing.store import Context

BLOCKS = 8


class Loyal(LRU):
    """Keeps whom it met first: the newest go first, also before they are in."""

    name = "loyal"
    choosy = True

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
    contenders = [Shadow(policy(), capacity) for policy in policies]
    store = BlockStore.open(path / "store", capacity=capacity, policy=Duel(contenders, capacity, Random(0)))
    for context in (first, second):
        store.asked(context.keys, context.size)
        context.fill(store)
        store.flush()
    return store, first, second


def test_a_choosy_leader_declines_what_it_would_let_go_first(tmp_path: Path) -> None:
    store, first, second = full(tmp_path, Loyal)
    with store:
        assert store.match(first.keys).blocks == BLOCKS
        assert store.match(second.keys).blocks == 0
        refused = store.stats().refused
        assert refused["declined"] >= 1
        assert refused["declined"] + refused.get("orphan", 0) == BLOCKS  # what follows it cannot come in either
        assert store.stats().evicted == 0
        gone = store.gone(second.keys[0])
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


def test_what_nobody_asked_for_is_never_declined(tmp_path: Path) -> None:
    first, second = Context(BLOCKS, seed=1), Context(BLOCKS, seed=2)
    duel: Duel[bytes] = Duel([Shadow(Loyal(), BLOCKS)], BLOCKS, Random(0))
    duel.asked(first.keys, [1] * BLOCKS, [16] * BLOCKS, 0.0)
    for i, key in enumerate(first.keys):
        duel.insert(Facts(key, first.keys[i - 1] if i else None, 16, 16 * (i + 1), 1), 0.0)
    assert not any(duel.declines(key) for key in [*first.keys, *second.keys])
    duel.asked(second.keys, [1] * BLOCKS, [16] * BLOCKS, 1.0)
    assert all(duel.declines(key) for key in second.keys)
    assert not any(duel.declines(key) for key in first.keys)
