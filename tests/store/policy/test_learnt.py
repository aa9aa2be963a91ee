"""The adaptive policy: informed of prompts, kept over restarts and kills, in metrics, not trusted if damaged."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lmdb
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.metrics import Metrics
from ctxreuse.metrics.store import watch_store
from ctxreuse.store import BlockStore, PolicyStats, TieredStore, open_store
from ctxreuse.testing.store import Context

FLOATS = 3000


def capacity(blocks: int) -> int:
    return blocks * (-(-(Context(1, floats=FLOATS).block(0).nbytes + 16) // 4096) * 4096)


def serve(store: BlockStore | TieredStore, context: Context) -> None:
    """What a runtime does with a prompt: tell, read what is held, put the rest."""
    store.on_lookup(context.keys, 64)
    held = store.match(context.keys).blocks
    assert context.intact(store, range(held))
    for i in range(held, len(context.keys)):
        assert store.put(context.keys[i], context.block(i))
    store.flush()


def policy_stats(store: BlockStore | TieredStore) -> PolicyStats:
    found = store.stats().policy
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
    with BlockStore.open(tmp_path, capacity=capacity(6), policy="adaptive:lru,lfu,arc") as store:
        loop(store)
        found = policy_stats(store)
        assert found.leader in ("lfu", "arc")
        assert found.expert_hit_tokens[found.leader] > 2 * found.expert_hit_tokens["lru"]
        assert found.hit_tokens > 2 * found.expert_hit_tokens["lru"]
        assert found.switches >= 1
        assert sum(found.weights.values()) == pytest.approx(1)
        store.check()
        metrics = Metrics()
        watch_store(metrics, store.stats, store.stats)
        metrics.render()
        assert metrics.read("ctxreuse_policy_leading", found.leader) == 1
        assert metrics.read("ctxreuse_policy_leading", "lru") == 0
        assert metrics.read("ctxreuse_policy_hit_tokens_total", "real") == found.hit_tokens
        assert metrics.read("ctxreuse_policy_lookup_tokens_total") == found.lookup_tokens


def test_what_was_learnt_survives_closing(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        loop(store)
        before, order = policy_stats(store), list(store._index.policy.order())
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        after = policy_stats(store)
        assert (after.leader, after.expert_hit_tokens, after.lookup_tokens, after.hit_tokens) == (
            before.leader,
            before.expert_hit_tokens,
            before.lookup_tokens,
            before.hit_tokens,
        )
        assert sorted(store._index.policy.order()) == sorted(order)
        store.check()
        serve(store, Context(3, floats=FLOATS))
        assert policy_stats(store).lookup_tokens == before.lookup_tokens + 3 * 64
    with BlockStore.open(tmp_path, capacity=capacity(6), policy="adaptive:lfu,lru") as store:
        assert policy_stats(store).lookup_tokens == 0
        store.check()


def test_what_was_learnt_with_fewer_experts_is_read(tmp_path: Path) -> None:
    fewer = "adaptive:lru,lfu,arc,hazard"
    with BlockStore.open(tmp_path, capacity=capacity(6), policy=fewer) as store:
        loop(store)
        before = policy_stats(store)
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        after = policy_stats(store)
        assert after.leader == before.leader
        assert after.expert_hit_tokens == {**before.expert_hit_tokens, "pauses": 0}
        assert (after.lookup_tokens, after.hit_tokens) == (before.lookup_tokens, before.hit_tokens)
        assert 0 < after.weights["pauses"] < 0.02
        loop(store)
        assert policy_stats(store).expert_hit_tokens["pauses"] > 0
        store.check()
    with BlockStore.open(tmp_path, capacity=capacity(6), policy=fewer) as store:
        assert policy_stats(store).lookup_tokens == 0  # but not the other way round


def test_what_was_learnt_survives_a_kill(tmp_path: Path) -> None:
    ready, child_end = os.pipe()
    child = os.fork()
    if not child:
        store = BlockStore.open(tmp_path, capacity=capacity(6))
        loop(store)
        store._save()
        os.write(child_end, policy_stats(store).leader.encode())
        signal.pause()
    os.close(child_end)
    leader = os.read(ready, 100).decode()
    os.close(ready)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with BlockStore.open(tmp_path, capacity=capacity(6)) as store:
        assert store.stats().recovered == "kept"
        assert policy_stats(store).leader == leader
        assert policy_stats(store).lookup_tokens > 0
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
        assert policy_stats(store).lookup_tokens == 0
        assert policy_stats(store).leader == "pauses"
        serve(store, Context(3, floats=FLOATS))
        store.check()


def test_prompts_can_be_told_to_any_store(tmp_path: Path) -> None:
    context = Context(3, floats=FLOATS)
    with open_store(None, host_bytes=1 << 20) as memory, open_store(tmp_path, policy="gdsf") as disk:
        for store in (memory, disk):
            serve(store, context)
            store.on_pause(context.keys, 3)
            store.on_pause([bytes(32)], 3)
            store.set_recompute_cost(1e-3, 1e-7)
            assert store.stats().policy is None
            assert store.match(context.keys).blocks == 3
            store.check()


def test_names_are_checked(tmp_path: Path) -> None:
    for name in ("belady", "adaptive:lru,lru", "adaptive:lru,belady", "lru:arc", "adaptive:lru,"):
        with pytest.raises(ConfigError, match="no eviction policy"):
            BlockStore.open(tmp_path, capacity=1 << 20, policy=name)
