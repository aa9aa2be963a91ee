"""The store's duel: told of prompts, kept over restarts and kills, shown in metrics, never trusted when damaged."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lmdb
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.metrics import Metrics
from ctxreuse.metrics.store import watch_store
from ctxreuse.store import BlockStore, TieredStore, open_store
from ctxreuse.store.policy import Standing
from ctxreuse.testing.store import Context

FLOATS = 3000


def capacity(blocks: int) -> int:
    return blocks * (-(-(Context(1, floats=FLOATS).block(0).nbytes + 16) // 4096) * 4096)


def serve(store: BlockStore | TieredStore, context: Context) -> None:
    """What a runtime does with a prompt: tell, read what is held, put the rest."""
    store.asked(context.keys, 64)
    held = store.match(context.keys).blocks
    assert context.intact(store, range(held))
    for i in range(held, len(context.keys)):
        assert store.put(context.keys[i], context.block(i))
    store.flush()


def standing(store: BlockStore | TieredStore) -> Standing:
    found = store.stats().standing
    assert found is not None
    return found


def loop(store: BlockStore) -> None:
    """A context that returns all the time among others that never do: frequency wins over recency."""
    kept = Context(3, floats=FLOATS)
    for seed in range(1, 60):
        serve(store, kept)
        for other in range(3):
            serve(store, Context(2, seed=seed * 3 + other, floats=FLOATS))


def test_the_better_policy_leads(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        loop(store)
        found = standing(store)
        assert found.leader in ("lfu", "arc")
        assert found.hits[found.leader] > 2 * found.hits["lru"]
        assert found.real > 2 * found.hits["lru"]
        assert found.switches >= 1
        assert sum(found.weights.values()) == pytest.approx(1)
        store.check()
        metrics = Metrics()
        watch_store(metrics, store.stats, store.stats)
        metrics.render()
        assert metrics.read("ctxreuse_policy_leading", found.leader) == 1
        assert metrics.read("ctxreuse_policy_leading", "lru") == 0
        assert metrics.read("ctxreuse_policy_hit_tokens_total", "real") == found.real
        assert metrics.read("ctxreuse_policy_asked_tokens_total") == found.asked


def test_what_was_learnt_survives_closing(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        loop(store)
        before, order = standing(store), list(store._index.policy.order())
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        after = standing(store)
        assert (after.leader, after.hits, after.asked, after.real) == (
            before.leader,
            before.hits,
            before.asked,
            before.real,
        )
        assert sorted(store._index.policy.order()) == sorted(order)
        store.check()
        serve(store, Context(3, floats=FLOATS))
        assert standing(store).asked == before.asked + 3 * 64
    with BlockStore.open(tmp_path, capacity=capacity(6), policy="duel:lfu,lru") as store:
        assert standing(store).asked == 0
        store.check()


def test_what_was_learnt_survives_a_kill(tmp_path: Path) -> None:
    ready, child_end = os.pipe()
    child = os.fork()
    if not child:
        store = BlockStore.open(tmp_path, capacity=capacity(6))
        loop(store)
        store._save()
        os.write(child_end, standing(store).leader.encode())
        signal.pause()
    os.close(child_end)
    leader = os.read(ready, 100).decode()
    os.close(ready)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        assert store.stats().recovered == "kept"
        assert standing(store).leader == leader
        assert standing(store).asked > 0
        store.check()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign", "huge"])
def test_damage_is_not_believed(tmp_path: Path, damage: str) -> None:
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        loop(store)
    with lmdb.open(str(tmp_path / "blocks"), max_dbs=8) as env:
        info = env.open_db(b"info")
        with env.begin(write=True) as txn:
            raw = txn.get(b"policy", db=info)
            assert raw is not None
            raw = bytes(raw)
            flipped = raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
            values = {"flipped": flipped, "cut": raw[:-3], "empty": b"", "foreign": b"\xff" * 90, "huge": raw * 5000}
            txn.put(b"policy", values[damage], db=info)
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        assert standing(store).asked == 0
        assert standing(store).leader == "lru"
        serve(store, Context(3, floats=FLOATS))
        store.check()


def test_prompts_can_be_told_to_any_store(tmp_path: Path) -> None:
    context = Context(3, floats=FLOATS)
    with open_store(None, host_bytes=1 << 20) as memory, open_store(tmp_path, policy="gdsf") as disk:
        for store in (memory, disk):
            serve(store, context)
            store.mark(context.keys, 3)
            store.mark([bytes(32)], 3)
            store.price(1e-3, 1e-7)
            assert store.stats().standing is None
            assert store.match(context.keys).blocks == 3
            store.check()


def test_names_are_checked(tmp_path: Path) -> None:
    for name in ("belady", "duel:lru,lru", "duel:lru,belady", "lru:arc", "duel:lru,"):
        with pytest.raises(ConfigError, match="no eviction policy"):
            BlockStore.open(tmp_path, capacity=1 << 20, policy=name)
