"""The small parts: gate, writer, policy, records; and what a store does around its edges."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ctxreuse.block.format import BlockView, Buffer, parse
from ctxreuse.errors import ConfigError, StoreError
from ctxreuse.store import BlockStore, TieredStore, open_store
from ctxreuse.store.blocks import pending, recompress, tables
from ctxreuse.store.blocks.pending import Put
from ctxreuse.store.blocks.writer import Writer
from ctxreuse.store.host import HostTier
from ctxreuse.store.lmdb.records import Record, footprint
from ctxreuse.store.lmdb.rwlock import MapLock
from ctxreuse.store.policy import NAMES, Facts, make_policy
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context
from oracle.policy.lru import LRU
from support.waiting import patient, until


def test_lru_keeps_children_older_than_parents() -> None:
    lru: LRU[bytes] = LRU()
    for key, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"a"), (b"e", None)):
        lru.insert(Facts(key, parent, 1, 1, 1), 0.0)
    lru.access([b"a", b"b", b"c"], 1.0)
    assert b"".join(lru.order()) == b"decba"
    lru.access([b"a", b"d"], 2.0)
    assert b"".join(lru.order()) == b"ecbda"
    lru.remove(b"c", 3.0)
    assert b"".join(lru.order()) == b"ebda"
    with pytest.raises(KeyError):
        lru.remove(b"z", 4.0)


def test_policies_by_name() -> None:
    for name in NAMES:
        assert make_policy(name, 1).name in (name, "adaptive")
    mine: LRU[bytes] = LRU()
    assert make_policy(mine, 1) is mine
    with pytest.raises(ConfigError, match="lru"):
        make_policy("fifo", 1)


def test_records_and_footprints() -> None:
    record = Record(bytes(range(32)), 4, 8, 4096, 0, 1 << 40)
    assert Record.unpack(record.pack()) == record
    with pytest.raises(ValueError, match="record of 3 bytes"):
        Record.unpack(b"abc")
    assert [footprint(n) for n in (0, 1, 4080, 4081, 65520, 65536)] == [0, 4096, 4096, 8192, 65536, 69632]


def test_the_gate_lets_nested_reads_in_and_the_lone_one_first() -> None:
    gate = MapLock()
    gate.enter()
    with gate.exclusive(10.0) as alone:
        assert not alone
    inside, left, events = threading.Event(), threading.Event(), []

    def resize() -> None:
        with gate.exclusive(30.0) as alone:
            events.append(("alone", alone, gate._readers))
            inside.set()
            left.wait(patient(30))

    thread = threading.Thread(target=resize)
    thread.start()
    until(lambda: gate._wanted)
    gate.enter()
    assert gate._readers == 2
    gate.leave()
    gate.leave()
    assert inside.wait(patient(30))
    late = threading.Thread(target=lambda: (gate.enter(), events.append(("late",)), gate.leave()))
    late.start()
    left.set()
    thread.join()
    late.join()
    assert events == [("alone", True, 0), ("late",)]


def test_a_failing_batch_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def commit(items: list[int]) -> None:
        if 1 in items:
            raise RuntimeError("bad luck")
        seen.extend(items)

    writer = Writer(commit, lambda: False, limit_bytes=10, batch=1)
    assert all(writer.put(item, 1, 10.0) for item in range(4))
    assert writer.flush(30)
    assert seen == [0, 2, 3]
    assert "bad luck" in caplog.text
    writer.close()
    assert not writer.put(5, 1, 0.0)
    assert writer.queued == (0, 0)


def test_the_tick_comes_after_items_until_it_is_content() -> None:
    calls: list[str] = []
    content = threading.Event()

    def tick() -> bool:
        calls.append("tick")
        if calls.count("tick") == 3:
            content.set()
        return calls.count("tick") < 3

    writer = Writer(lambda items: calls.append("commit"), tick, limit_bytes=10, period=0.001)
    assert calls == []
    writer.put(1, 1, 1.0)
    assert content.wait(patient(30))
    writer.close()
    assert calls == ["commit", "tick", "tick", "tick"]


def test_what_was_committed_is_synced_by_the_tick(tmp_path: Path) -> None:
    clock = FakeClock()
    with BlockStore.open(tmp_path, capacity=1 << 20, clock=clock) as store:
        Context(2).fill(store)
        store._retry_at = clock() + 1.0
        store._dirty = True
        assert store._tick()
        clock.advance(2.0)
        assert not store._tick()
        assert not store._dirty


def test_batches_are_bounded_by_bytes_and_count() -> None:
    batches: list[list[int]] = []
    start = threading.Event()

    def commit(items: list[int]) -> None:
        start.wait(patient(30))
        batches.append(items)

    writer = Writer(commit, lambda: False, limit_bytes=1000, batch=4, batch_bytes=100)
    for nbytes in [40] * 10 + [1] * 10 + [300]:
        assert writer.put(nbytes, nbytes, 1.0)
    start.set()
    writer.close()
    assert [nbytes for items in batches for nbytes in items] == [40] * 10 + [1] * 10 + [300]
    assert all(len(items) <= 4 and (sum(items) <= 100 or len(items) == 1) for items in batches)
    assert max(map(len, batches)) == 4


def test_host_tier_evicts_leaves_first() -> None:
    context, other = Context(3), Context(3, seed=1)
    host = HostTier(3 * context.block(0).nbytes)

    def put(source: Context, i: int) -> bool:
        item = Put.parse(source.keys[i], source.block(i), "block", False)
        assert item is not None
        return host.put(item)

    assert all(put(context, i) for i in range(3))
    host.touch([context.keys[2]])
    assert put(other, 0)
    assert [("block", key) in host for key in context.keys] == [True, True, False]
    host.pins[context.keys[1]] += 1
    host.pins[other.keys[0]] += 1
    assert not put(other, 1)
    host.check()


def test_a_state_that_the_disk_refused_makes_room_in_memory_and_can_be_forgotten(tmp_path: Path) -> None:
    """Its block is on disk only, so it had no place in memory's order of eviction and stayed for good."""
    contexts = [Context(1, seed=seed) for seed in range(3)]
    room = 2 * contexts[0].state(0).nbytes
    with TieredStore(room, BlockStore.open(tmp_path, capacity=3 * 4096)) as store:
        for context in contexts:
            assert store.put(context.keys[0], context.block(0))
            store.flush()  # memory has no room for a third
            store.pin(context.keys)
        states = [store.put(context.keys[0], context.state(0), kind="state") for context in contexts]
        assert states == [True] * 3
        store.flush()
        assert store.disk is not None
        assert store.disk.stats().refused == {"no_room": 3}
        assert store.stats().evicted == 1
        assert [store.match(context.keys).state_blocks for context in contexts] == [0, 1, 1]
        store.check()
        store.unpin(contexts[2].keys)
        assert store.forget(contexts[2].keys) == 1
        assert store.stats().states == 1
        store.check()


def test_closing_inside_a_read_is_refused_and_can_be_repeated(tmp_path: Path) -> None:
    store, context = BlockStore.open(tmp_path, capacity=1 << 20), Context(2)
    context.fill(store)
    with store.read() as reader:
        assert context.get(reader, 0) is not None
        with pytest.raises(StoreError, match="open reads"):
            store.close()
        assert context.get(reader, 1) is not None
    store.close()
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        assert store.stats().recovered == ""
        assert context.intact(store)


FORGETFUL = """
import sys
from ctxreuse.store import BlockStore
from ctxreuse.testing.store import Context
store, context = BlockStore.open(sys.argv[1], capacity=1 << 24), Context(200)
for i in range(200):
    assert store.put(context.keys[i], context.block(i), wait=10)
"""


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path, spawn) -> None:
    out, err = spawn(FORGETFUL, tmp_path).communicate(timeout=patient(60))
    assert (out, err) == ("", "")
    with BlockStore.open(tmp_path, capacity=1 << 24) as store:
        assert store.stats().recovered == ""
        assert store.match(Context(200).keys).blocks == 200


def test_the_file_stays_near_the_capacity(tmp_path: Path) -> None:
    capacity = 256 * 4096
    with BlockStore.open(tmp_path, capacity=capacity) as store:
        for seed in range(60):
            Context(64, seed=seed).fill(store)
        stats = store.stats()
        assert stats.nbytes == capacity
        assert stats.evicted == 60 * 64 - 256
        assert stats.file_bytes < 1.6 * capacity
        store.check()


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    old, new = Context(4), Context(4, seed=1)
    with BlockStore.open(tmp_path, capacity=8 * 4096) as store:
        old.fill(store)
        new.fill(store)
        assert old.intact(store)
    with BlockStore.open(tmp_path, capacity=8 * 4096) as store:
        Context(4, seed=2).fill(store)
        assert (store.match(old.keys).blocks, store.match(new.keys).blocks) == (4, 0)


def test_the_back_off_is_not_longer_when_the_clock_is_set_back(tmp_path: Path) -> None:
    clock = FakeClock()
    with BlockStore.open(tmp_path, capacity=1 << 20, clock=clock) as store:
        store._retry_at = clock() + 5.0
        assert Context(1).fill(store) == 0
        clock.jump(clock() - 3600.0)
        assert Context(1).fill(store) == 1


def test_memory_only_and_beside_an_owner(tmp_path: Path) -> None:
    context = Context(3)
    with open_store(None, host_bytes=1 << 20) as store:
        assert context.fill(store) == 3
        assert context.intact(store)
    with open_store(tmp_path) as store:
        context.fill(store)
    with open_store(tmp_path, readonly=True) as store:
        assert store.match(context.keys).blocks == 3
        assert context.intact(store)
        assert not store.put(Context(1, seed=9).keys[0], Context(1, seed=9).block(0))
        assert store.pin(context.keys) == 0
        assert store.forget(context.keys) == 0
        store.drop(context.keys[0], "test")
        assert context.intact(store)
        store.check()
        assert store.stats().blocks == 3


def test_what_is_queued_can_be_read_from_memory(tmp_path: Path) -> None:
    context = Context(6)
    with open_store(tmp_path) as store:
        assert store.disk is not None
        release = threading.Event()
        store.disk.subscribe(lambda _: release.wait(patient(30)) and None)
        for i in range(6):
            assert store.put(context.keys[i], context.block(i))
        assert store.match(context.keys).blocks == 6
        assert context.intact(store)
        release.set()
        store.flush()
        with store.read() as reader:
            assert all(context.get(reader, i) is not None for i in range(6))
            assert reader.served == {"disk": 24}
        store.check()


def test_drops_while_a_batch_is_being_committed(tmp_path: Path) -> None:
    context = Context(4)
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        context.fill(store, upto=2)
        write = store._env.write
        during: list[bytes] = [context.keys[1]]

        def slow_write(work):
            while during:
                store.drop(during.pop(), "test")
            return write(work)

        store._env.write = slow_write
        # A new block whose parent goes while it is written.
        assert store.put(context.keys[2], context.block(2))
        store.flush()
        assert store.match(context.keys).blocks == 1
        assert store.stats().dropped == {"test": 1}
        # A held block that goes while its replacement is written.
        during.append(context.keys[0])
        assert store.put(context.keys[0], context.block(0), replace=True)
        store.flush()
        assert store.match(context.keys).blocks == 0
        assert context.fill(store) == 4
        assert context.intact(store)
        store.check()
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        assert context.intact(store)
        store.check()


def test_a_parent_is_never_older_than_its_child_after_a_crash(tmp_path: Path) -> None:
    context, other = Context(3), Context(2, seed=1)
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        context.fill(store)
        other.fill(store)
        # Renewed numbers are written later than values: set them as a crash in between may leave them.
        tables = store._env.tables
        for used, key in enumerate([*context.keys, *other.keys], 1):

            def rewrite(txn, key=key, used=used) -> None:
                record = Record.unpack(txn.get(key, db=tables["meta"]))._replace(used=used)
                txn.put(key, record.pack(), db=tables["meta"])

            store._env.write(rewrite)
        store._index.renewals()
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        store.check()
        assert list(store._index.policy.order()) == [*reversed(context.keys), *reversed(other.keys)]


def test_a_block_is_parsed_once_on_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def counted(data: Buffer) -> BlockView:
        parsed.append(data)
        return parse(data)

    for module in (pending, recompress, tables):
        monkeypatch.setattr(module, "parse", counted)
    context = Context(3)
    with open_store(tmp_path) as store:
        for i in range(3):
            assert store.put(context.keys[i], context.block(i))
        assert store.put(context.keys[2], context.state(2), kind="state")
        store.flush()
        assert len(parsed) == 4
