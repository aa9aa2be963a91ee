"""Sync gives a cloud what it lacks, whatever happened before, and no more often than it must."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.block.format import parse
from ctxreuse.identity.keys import ROOT, giver_id, prefix_keys, tenant_salt
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.sync.sync import Sync, SyncOptions
from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.testing.peer import until
from support.memory_node import MemoryNode
from support.tenant_service import Given, service
from support.waiting import patient

Given, service = Given, service


def local(blocks: int, tenant: str = "default", **options: Any) -> Any:
    """A context as this device's own runtime keeps it."""
    return Given(tenant_salt(tenant), blocks, **options)


def keep(store: TieredStore, context: Any) -> None:
    for key, data in zip(context.keys, context.blocks):
        assert store.put(key, data)
    assert store.put(context.keys[-1], context.state(len(context.keys) - 1), kind="state")
    store.flush(20)


def there(link: Any, context: Any) -> int:
    """How many leading blocks of a local context the cloud holds."""
    assert link.welcome is not None
    keys = prefix_keys(context.space, link.welcome.salt, context.tokens, context.context.size)
    return link.match(context.space, keys, 20.0).blocks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def linked(folder: Path, store: Any = None, **options: Any) -> Iterator[Any]:
    """A cloud and a link to it that is up."""
    with service(folder, store, **options) as cloud:
        node = MemoryNode(cloud)
        try:
            link = node.link("ann", ())
            until(lambda: link.state == "up", "the link does not come up")
            yield cloud, link
        finally:
            node.close()


@pytest.mark.parametrize("disk", [False, True])
def test_everything_is_given_once_under_the_keys_of_the_link(tmp_path: Path, disk: bool) -> None:
    below = BlockStore.open(tmp_path / "edge", capacity=8 << 20) if disk else None
    with TieredStore(0 if disk else 8 << 20, below) as store, linked(tmp_path) as (cloud, link):
        first, second = local(5), local(4, branch=1, fork=2)
        for context in (first, second):
            keep(store, context)
        steps: list[tuple[int, int]] = []
        sync = Sync(store, [link])
        done = sync.sync_now(lambda *step: steps.append(step)).links[0]
        assert (done.sent_blocks, done.pending_blocks, done.pending_bytes, done.refused) == (7, 0, 0, 0)
        assert steps[-1][0] == steps[-1][1] == sum(first.sizes) + sum(second.sizes[2:])
        assert (there(link, first), there(link, second)) == (5, 4)
        mine = Given(link.welcome.salt, 5)
        with cloud.store.read() as reader:
            for i in range(5):
                view = reader.block(mine.keys[i], mine.tokens[4 * i : 4 * i + 4], mine.space)
                assert bytes(view.buffer) == mine.blocks[i].tobytes()
                del view
        assert cloud.match("a", mine.space, mine.keys).state_blocks == 5
        again = sync.sync_now().links[0]
        assert again.sent_blocks == 7
        assert cloud.counts["taken"] == 9  # the blocks, and the state of each context
        sync.close()


def test_contexts_of_other_tenants_of_the_device_stay_here(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (cloud, link):
        mine, theirs = local(2), local(3, tenant="guest", seed=1)
        keep(store, mine)
        keep(store, theirs)
        sync = Sync(store, [link])
        assert sync.sync_now().links[0].sent_blocks == 2
        assert (there(link, mine), there(link, theirs)) == (2, 0)
        assert len(list(cloud.store.walk())) == 2
        sync.close()


def test_the_last_used_context_goes_first(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (cloud, link):
        contexts = [local(2, seed=seed) for seed in range(3)]
        for context in contexts:
            keep(store, context)
        store.touch([contexts[1].keys[1]])
        came: list[bytes] = []
        cloud.store.watch(lambda keys: came.extend(key for key in keys if key not in came))
        sync = Sync(store, [link])
        sync.sync_now()
        names = [key for i in (1, 2, 0) for key in Given(link.welcome.salt, 2, seed=i).keys]
        assert came == names
        sync.close()


def test_after_a_time_offline_only_the_difference_is_given(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        first, second = local(3), local(6)  # the second goes on where the first ended
        keep(store, first)
        before = Sync(store, [link])
        before.sync_now()
        before.close()
        link.cut()
        keep(store, second)
        until(lambda: link.state == "up", "the link does not come back")
        until(lambda: link.announced(Given(link.welcome.salt, 3).keys) == 3, "nothing is announced")
        # Another life of the device, which remembers nothing.
        after = Sync(store, [link])
        assert after.sync_now().links[0].sent_blocks == 3
        assert there(link, second) == 6
        after.close()


def test_a_link_that_is_down_is_waited_for(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        keep(store, local(2))

        class Away:
            name, state, welcome, withdrawn = "away", "down", None, frozenset[bytes]()

        sync = Sync(store, [Away(), link])  # type: ignore[list-item]
        away, up = sync.sync_now().links
        assert (away.sent_blocks, away.state, up.sent_blocks) == (0, "down", 2)
        assert away.last == 0
        sync.close()


def test_a_cloud_in_quarantine_is_given_nothing(tmp_path: Path) -> None:
    quarantine = Quarantine(None, seconds=60)
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        keep(store, local(2))
        quarantine.add(link.name, "audit")
        sync = Sync(store, [link], SyncOptions(quarantine=quarantine))
        assert sync.sync_now().links[0].sent_bytes == 0
        quarantine.clear(link.name)
        assert sync.sync_now().links[0].sent_blocks == 2
        sync.close()


def test_what_is_refused_is_put_off_for_longer_and_longer(tmp_path: Path) -> None:
    clock = Clock()
    small = TieredStore(2 * 4096)
    with small, TieredStore(8 << 20) as store, linked(tmp_path, small) as (cloud, link):
        keep(store, local(4))
        offers = [0]
        receiver = cloud.open_put

        def counted(*arguments: Any, **options: Any) -> Any:
            offers[0] += 1
            return receiver(*arguments, **options)

        cloud.open_put = counted
        sync = Sync(store, [link], SyncOptions(clock=clock))
        sync.sync_now()
        assert offers[0] == 1
        for wait in (60, 120, 240):
            clock.now += wait - 1
            sync.sync_now()
            before = offers[0]
            clock.now += 2
            sync.sync_now()
            assert offers[0] > before
        assert offers[0] <= 10
        sync.close()


def test_nothing_is_offered_while_a_request_is_served(tmp_path: Path) -> None:
    busy, asked = threading.Event(), threading.Event()
    busy.set()

    def serving() -> bool:
        asked.set()
        return busy.is_set()

    with TieredStore(8 << 20) as store, linked(tmp_path) as (cloud, link):
        keep(store, local(3))
        sent: list[tuple[str, int, int]] = []
        sync = Sync(store, [link], SyncOptions(busy=serving, on_sent=lambda *row: sent.append(row)))
        sync.start()
        assert asked.wait(patient(20))
        until(lambda: sync.status().paused, "sync does not pause")
        assert list(cloud.store.walk()) == []
        busy.clear()
        until(lambda: sync.status().links[0].sent_blocks == 3, "sync does not go on")
        assert sum(row[1] for row in sent) == 3
        keep(store, local(5))  # found without being told
        until(lambda: sync.status().links[0].sent_blocks == 5, "sync does not follow the store")
        sync.close()
        sync.close()


def test_a_block_that_is_evicted_here_meanwhile_does_no_harm(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        context = local(4)
        keep(store, context)
        put = link.put

        def dropping(*arguments: Any, **options: Any) -> Any:
            store.drop(context.keys[2], "evicted")
            return put(*arguments, **options)

        link.put = dropping
        sync = Sync(store, [link])
        status = sync.sync_now().links[0]
        assert (status.sent_blocks, status.refused) == (2, 0)
        assert there(link, context) == 2
        link.put = put
        keep(store, context)
        assert sync.sync_now().links[0].sent_blocks == 4
        sync.close()


def test_what_is_damaged_here_is_not_given(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (cloud, link):
        context = local(12)
        for data in context.blocks[2:]:
            data[parse(data).start] ^= 1
        keep(store, context)
        sync = Sync(store, [link])
        status = sync.sync_now().links[0]
        assert (status.sent_blocks, status.refused) == (2, 0)
        assert cloud.quarantine.names() == {}  # a bad disk does not make this device a liar
        sync.close()


def test_a_cloud_that_forgets_gets_everything_again(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store:
        context = local(3)
        keep(store, context)
        with linked(tmp_path / "one") as (_, link):
            sync = Sync(store, [link])
            assert sync.sync_now().links[0].sent_blocks == 3
            sync.close()
        with linked(tmp_path / "two") as (cloud, link):  # another node, another salt
            sync = Sync(store, [link])
            assert sync.sync_now().links[0].sent_blocks == 3
            assert cloud.snapshot("a")[1] == Given(link.welcome.salt, 3).keys
            assert cloud.snapshot("a")[1][0] != ROOT
            sync.close()


def test_a_request_to_sync_does_not_wait_for_a_round_that_waits_for_requests(tmp_path: Path) -> None:
    asked = threading.Event()

    def busy() -> bool:
        asked.set()
        return True

    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        keep(store, local(4))
        sync = Sync(store, [link], SyncOptions(busy=busy))
        sync.start()
        try:
            assert asked.wait(patient(20))
            done: list[Any] = []
            caller = threading.Thread(target=lambda: done.append(sync.sync_now()), daemon=True)
            caller.start()
            caller.join(patient(20))
            assert done
            assert done[0].links[0].sent_blocks == 4
        finally:
            sync.close()


def fetched(store: TieredStore, context: Any, name: str) -> None:
    """Keep a context as one that came from the cloud of that name."""
    for key, data in zip(context.keys, context.blocks):
        assert store.put(key, data, giver=giver_id(name.encode()))
    store.flush(20)


def test_what_was_fetched_is_not_given_on(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        theirs, mine = local(3), local(2, seed=1)
        fetched(store, theirs, "another cloud")
        keep(store, local(5))  # computed on top of theirs
        keep(store, mine)
        sync = Sync(store, [link])
        assert sync.sync_now().links[0].sent_blocks == 2
        assert (there(link, mine), there(link, local(5))) == (2, 0)
        sync.close()


def test_what_was_computed_on_top_of_a_cloud_goes_back_to_it(tmp_path: Path) -> None:
    with TieredStore(8 << 20) as store, linked(tmp_path) as (cloud, link):
        Given(link.welcome.salt, 3).put(cloud, user="ann-2")
        fetched(store, local(3), link.name)
        keep(store, local(5))
        sync = Sync(store, [link])
        assert sync.sync_now().links[0].sent_blocks == 2
        assert there(link, local(5)) == 5
        sync.close()


def test_copies_of_what_a_cloud_withdraws_are_dropped(tmp_path: Path) -> None:
    revoked: set[bytes] = set()
    dropped: list[bool] = []
    with TieredStore(8 << 20) as store, linked(tmp_path, revoked=lambda: frozenset(revoked)) as (cloud, link):
        lies, mine = local(3), local(2, seed=1)
        Given(link.welcome.salt, 3).put(cloud, user="liar")
        fetched(store, lies, link.name)
        keep(store, mine)
        sync = Sync(store, [link], SyncOptions(on_withdrawn=lambda: dropped.append(True)))
        sync.sync_now()
        assert store.match(lies.keys).blocks == 3
        revoked.add(giver_id(b"liar"))
        until(lambda: link.withdrawn, "nothing is said of it")
        sync.sync_now()
        assert store.match(lies.keys).blocks == 0
        assert store.match(mine.keys).blocks == 2
        assert dropped == [True]
        sync.close()


def test_copies_from_a_cloud_in_quarantine_are_dropped(tmp_path: Path) -> None:
    quarantine = Quarantine(None, seconds=60)
    with TieredStore(8 << 20) as store, linked(tmp_path) as (_, link):
        fetched(store, local(3), link.name)
        sync = Sync(store, [link], SyncOptions(quarantine=quarantine))
        quarantine.add(link.name, "audit")
        sync.sync_now()
        assert list(store.walk()) == []
        sync.close()
