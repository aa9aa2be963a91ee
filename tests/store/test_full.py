"""No room: the cache goes on smaller, the ledger says so and loses nothing; maps grow while others read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ctxreuse.errors import StoreError, StoreFullError
from ctxreuse.store import BlockStore, Ledger, NewTurn, TieredStore
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context
from support.full_disk import no_file_beyond
from support.waiting import patient, until


def test_cache_survives_a_full_disk_and_tries_again(tmp_path: Path, data_size) -> None:
    clock = FakeClock()
    with BlockStore.open(tmp_path, capacity=64 << 20, clock=clock) as store:
        first, second, third = (Context(8, seed=seed, floats=50_000) for seed in range(3))
        assert first.fill(store) == 8
        with no_file_beyond(data_size(tmp_path / "blocks") + 100_000):
            accepted = second.fill(store)
            assert accepted
            stats = store.stats()
            assert stats.errors == {"disk": 1}
            assert stats.refused["disk"] >= 1
            assert store.match(second.keys).blocks == 0
            assert first.intact(store)
            assert third.fill(store) == 0
            assert store.stats().refused["backoff"] + store.stats().refused["disk"] >= 8
            store.check()
        assert third.fill(store) == 0
        clock.advance(60)
        assert third.fill(store) == 8
        assert third.intact(store)
        assert first.intact(store)
        store.check()
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        assert first.intact(store)
        assert third.intact(store)
        store.check()


def test_a_failed_commit_evicts_nothing(tmp_path: Path, data_size) -> None:
    clock = FakeClock()
    first, second = Context(8, floats=3000), Context(2, seed=1, floats=20_000)
    capacity = 8 * (first.block(0).nbytes + 16)
    with BlockStore.open(tmp_path, capacity=capacity * 2, clock=clock) as store:
        first.fill(store)
        Context(3, seed=2, floats=3000).fill(store)
        order = list(store._index.policy.order())
        with no_file_beyond(data_size(tmp_path / "blocks")):
            second.fill(store)
            assert store.stats().errors == {"disk": 1}
        assert list(store._index.policy.order()) == order
        assert store.stats().evicted == 0
        assert first.intact(store)
        store.check()
        clock.advance(60)
        assert second.fill(store) == 2
        assert second.intact(store)
        assert store.stats().evicted > 0
        store.check()


def test_tiers_go_on_in_memory(tmp_path: Path, data_size) -> None:
    clock = FakeClock()
    with TieredStore(8 << 20, BlockStore.open(tmp_path, capacity=64 << 20, clock=clock)) as store:
        first, second = (Context(4, seed=seed, floats=50_000) for seed in range(2))
        first.fill(store)
        with no_file_beyond(data_size(tmp_path / "blocks") + 100_000):
            assert second.fill(store) == 4
            assert first.intact(store)
            assert second.intact(store)
            with store.read() as reader:
                assert second.get(reader, 0) is not None
                assert reader.served == {"host": 4}
        store.check()


def test_what_the_disk_could_not_take_is_told_and_written_when_there_is_room(tmp_path: Path, data_size) -> None:
    clock = FakeClock()
    disk = BlockStore.open(tmp_path, capacity=64 << 20, clock=clock)
    with TieredStore(8 << 20, disk) as store:
        first, second, third = (Context(4, seed=seed, floats=50_000) for seed in range(3))
        first.fill(store)
        assert not store.stats().failing
        with no_file_beyond(data_size(tmp_path / "blocks") + 100_000):
            assert second.fill(store) == 4
            assert third.fill(store) == 4
            until(
                lambda: (
                    (disk.stats().refused["disk"] + disk.stats().refused["backoff"], store.stats().unwritten) == (8, 8)
                )
            )
            stats = store.stats()
            assert stats.failing
            assert stats.unwritten_bytes >= 8 * 4 * 50_000
            assert (stats.blocks, disk.stats().blocks) == (12, 4)
            refused = disk.stats().refused
            assert refused["disk"] >= 1
            assert disk.removal(second.keys[0]).why in ("disk", "backoff")
            clock.advance(6)
            until(lambda: disk.stats().errors["disk"] >= 2)  # it tries, with one value
            until(lambda: store.stats().unwritten == 8)
        clock.advance(6)
        until(lambda: store.stats().unwritten == 0)
        store.flush()
        assert not store.stats().failing
        assert (store.stats().blocks, disk.stats().blocks) == (12, 12)
        store.check()
    with BlockStore.open(tmp_path, capacity=64 << 20) as again:
        assert all(context.intact(again) for context in (first, second, third))


def test_a_store_that_nothing_is_owed_to_is_not_called_failing_for_ever(tmp_path: Path, data_size) -> None:
    clock = FakeClock()
    with BlockStore.open(tmp_path, capacity=64 << 20, clock=clock) as store:
        with no_file_beyond(data_size(tmp_path / "blocks")):
            Context(2, floats=50_000).fill(store)
            assert store.stats().failing
        clock.advance(6)
        until(lambda: not store.stats().failing)


def test_ledger_says_so_and_loses_nothing(tmp_path: Path, data_size) -> None:
    with Ledger.open(tmp_path) as ledger:
        session = ledger.create("main")
        kept = ledger.append(session.id, [NewTurn("user", "before")])
        with no_file_beyond(data_size(tmp_path / "ledger") + 50_000):
            for _ in range(2):
                with pytest.raises(StoreFullError, match="Make room"):
                    ledger.append(session.id, [NewTurn("user", "x" * 1_000_000)])
            assert ledger.session("main").head == kept[-1].id
            ledger.check()
        ledger.append(session.id, [NewTurn("user", "y" * 1_000_000)], expected_head=kept[-1].id)
        ledger.check()
    with Ledger.open(tmp_path) as ledger:
        assert [turn.content[:6] for turn in ledger.turns(ledger.session("main").head)] == ["before", "y" * 6]


TMPFS = """
import os, sys
from ctxreuse.errors import StoreFullError
from ctxreuse.store import BlockStore, Ledger, NewTurn
from ctxreuse.testing.store import Context
folder = sys.argv[1] + "/store"
ledger, store = Ledger.open(folder), BlockStore.open(folder, capacity=64 << 20)
session = ledger.create("main").id
contexts = [Context(8, seed=seed, floats=20_000) for seed in range(40)]
for context in contexts:
    context.fill(store)
assert store.stats().errors["disk"] >= 1, store.stats()
acked = []
try:
    while True:
        acked += ledger.append(session, [NewTurn("user", "z" * 20_000)])
except StoreFullError:
    pass
assert not os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize > 200_000
held = [context for context in contexts if store.match(context.keys).blocks]
assert held and all(context.intact(store, range(store.match(context.keys).blocks)) for context in held)
store.check(); ledger.check()
assert ledger.turns(ledger.session("main").head) == acked
store.close(); ledger.close()
ledger, store = Ledger.open(folder, readonly=True), BlockStore.open(folder, readonly=True)
assert ledger.turns(ledger.session("main").head) == acked
assert store.verify() == []
assert all(context.intact(store, range(store.match(context.keys).blocks)) for context in held)
print("fine")
"""


def test_a_disk_that_is_really_full(tmp_path: Path, spawn, mounts) -> None:
    prefix = mounts(f"mount -t tmpfs -o size=12m none '{tmp_path}'")
    out, err = spawn(TMPFS, tmp_path, prefix=prefix).communicate(timeout=patient(100))
    assert out == "fine\n", err


def test_no_room_even_to_open(tmp_path: Path) -> None:
    for part in (Ledger, BlockStore):
        with no_file_beyond(0), pytest.raises(StoreFullError, match="Make room"):
            part.open(tmp_path)
        part.open(tmp_path).close()


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(40, floats=100_000)
    size = context.block(0).nbytes
    monkeypatch.setattr(BlockStore, "QUEUE_BYTES", 2 * size)
    with BlockStore.open(tmp_path, capacity=1 << 30, map_size=1 << 20) as store:
        release, entered = threading.Event(), threading.Event()

        def stall(_: object) -> None:
            entered.set()
            release.wait(patient(30))

        store.subscribe(stall)
        store.put(context.keys[0], context.block(0))
        entered.wait(patient(30))
        accepted = 0
        while store.put(context.keys[accepted + 1], context.block(accepted + 1), wait=0.0):
            accepted += 1
        assert accepted <= 2
        assert store.stats().refused == {"queue_full": 1}
        with pytest.raises(StoreError, match="still queued"):
            store.flush(0.01)
        release.set()
        store.flush()
        assert store.match(context.keys).blocks == accepted + 1
        store.check()


def test_the_map_grows_beside_readers(tmp_path: Path) -> None:
    contexts = [Context(4, seed=seed, floats=20_000) for seed in range(20)]
    with BlockStore.open(tmp_path, capacity=1 << 30, map_size=1 << 20) as store:
        contexts[0].fill(store)
        done, wrong = threading.Event(), []

        def read() -> None:
            while not done.is_set():
                if not contexts[0].intact(store):
                    wrong.append("lost")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for context in contexts:
            assert context.fill(store) == 4
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store._env.file_bytes() > 8 << 20
        assert all(context.intact(store) for context in contexts)
        assert store.stats().errors == {}
        store.check()


def test_the_ledger_map_grows(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, map_size=1 << 20) as ledger:
        session = ledger.create("long")
        for _ in range(10):
            ledger.append(session.id, [NewTurn("user", "x" * 500_000)])
        assert len(ledger.turns(ledger.session("long").head)) == 10
        ledger.check()


def test_what_is_larger_than_the_store_or_has_no_room(tmp_path: Path) -> None:
    big, small = Context(2, floats=20_000), Context(10, seed=1)
    with BlockStore.open(tmp_path, capacity=10 * 4096) as store:
        assert not store.put(big.keys[0], big.block(0))
        assert small.fill(store) == 10
        store.pin(small.keys)
        other = Context(1, seed=2)
        other.fill(store)
        assert store.match(other.keys).blocks == 0
        store.unpin(small.keys)
        other.fill(store)
        assert store.match(other.keys).blocks == 1
        assert store.match(small.keys).blocks == 9
        stats = store.stats()
        assert stats.refused == {"too_big": 1, "no_room": 1}
        assert stats.evicted == 1
        store.check()
    with BlockStore.open(tmp_path, capacity=3 * 4096) as store:
        assert store.stats().nbytes <= 3 * 4096
        assert store.stats().blocks == 3
        store.check()
