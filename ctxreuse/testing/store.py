"""StoreContract: what any store must do, as tests to inherit from.

::

    class TestMine(StoreContract):
        def open(self, folder: Path) -> Store: return MyStore(folder)
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxreuse.identity.keys import ROOT
from ctxreuse.store.base import Store
from ctxreuse.store.chunks.index import ChunkLocation
from ctxreuse.store.types import Entry
from ctxreuse.testing.store_context import Context

__all__ = ["Context", "StoreContract"]


class StoreContract(ABC):
    """Tests of one store. Its capacity must hold 64 small blocks (4 KiB each)."""

    @abstractmethod
    def open(self, folder: Path) -> Store:
        """Return the store under test, empty."""

    def open_by_recency(self, folder: Path) -> Store:
        """Return the store under test, empty, where it evicts what was used longest ago first."""
        return self.open(folder)

    @pytest.fixture
    def by_recency(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test that evicts by recency, closed afterwards."""
        with contextlib.closing(self.open_by_recency(tmp_path)) as store:
            yield store

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test, closed afterwards."""
        with contextlib.closing(self.open(tmp_path)) as store:
            yield store

    def test_what_was_put_is_matched_and_read(self, store: Store) -> None:
        context = Context(5)
        assert store.match(context.keys).blocks == 0
        assert context.fill(store) == 5
        match = store.match(context.keys)
        assert (match.blocks, match.tokens, match.state_blocks) == (5, 20, 0)
        assert context.intact(store)
        store.check()

    def test_a_match_ends_where_contexts_part(self, store: Store) -> None:
        one, two = Context(4), Context(4, branch=1, fork=2)
        one.fill(store)
        assert store.match(two.keys).blocks == 2
        two.fill(store)
        assert store.match(one.keys).blocks == store.match(two.keys).blocks == 4
        assert store.stats().blocks == 6
        store.check()

    def test_states_mark_where_to_resume(self, store: Store) -> None:
        context = Context(4)
        context.fill(store)
        assert store.put(context.keys[1], context.state(1), kind="state")
        store.flush()
        match = store.match(context.keys)
        assert (match.blocks, match.state_blocks, match.state_tokens) == (4, 2, 8)
        with store.read() as reader:
            view = reader.state(context.keys[1], context.run(1), context.space)
            assert view is not None
            assert bytes(view.buffer) == context.state(1).tobytes()
            del view
            assert reader.state(context.keys[2], context.run(2), context.space) is None
            assert reader.missed == "absent"
        store.check()

    def test_orphans_and_malformed_values_are_refused_and_counted(self, store: Store) -> None:
        context = Context(3)
        assert not store.put(context.keys[2], context.block(2))
        assert not store.put(context.keys[0], context.state(0), kind="state")
        assert not store.put(context.keys[0], context.block(1))
        assert not store.put(context.keys[0], context.block(0)[:-8])
        assert not store.put(context.keys[0], context.block(0), kind="state")
        assert store.stats().refused == {"orphan": 2, "malformed": 3}
        assert store.match(context.keys).blocks == 0
        store.check()

    def test_reads_of_others_miss(self, tmp_path: Path) -> None:
        context = Context(2)
        for space, tokens, reason in (
            (bytes(32), context.run(1), "space"),
            (context.space, context.run(0), "tokens"),
        ):
            (tmp_path / reason).mkdir()
            store = self.open(tmp_path / reason)
            try:
                context.fill(store)
                with store.read() as reader:
                    assert reader.block(context.keys[1], tokens, space) is None
                    assert reader.missed == reason
                store.flush()
                assert store.stats().misses == {reason: 1}
                # Either the caller or the entry lies; dropping it costs time at most, keeping it could miss for ever.
                assert store.match(context.keys).blocks == 1
                store.check()
            finally:
                store.close()

    def test_views_end_with_the_read(self, store: Store) -> None:
        context = Context(1)
        context.fill(store)
        with store.read() as reader:
            view = context.get(reader, 0)
            assert view is not None
            assert reader.served in ({"disk": 4}, {"host": 4})
        if reader.served == {"disk": 4}:
            try:
                bytes(view.buffer)
            except ValueError:
                return
            raise AssertionError("the view outlived its transaction")

    def test_walking_names_all_blocks_parents_first(self, store: Store) -> None:
        one, two = Context(4), Context(4, branch=1, fork=2)
        assert list(store.walk()) == []
        one.fill(store)
        two.fill(store)
        assert store.put(one.keys[2], one.state(2), kind="state")
        store.flush()
        found = list(store.walk())
        assert {entry.key for entry in found} == {*one.keys, *two.keys}
        seen = {ROOT}
        for entry in found:
            assert entry.parent in seen
            seen.add(entry.key)
        assert [entry.end for entry in found if entry.key in one.keys] == [4, 8, 12, 16]
        assert all(entry.tokens == 4 and entry.nbytes >= one.block(0).nbytes for entry in found)
        assert [entry.key for entry in found if entry.has_state] == [one.keys[2]]
        by_key: dict[bytes, Entry | None] = {entry.key: entry for entry in found}
        requested = [two.keys[3], b"?" * 32, one.keys[2]]
        assert store.entries(requested) == [by_key.get(key) for key in requested]

    def test_what_was_used_last_is_named_first(self, by_recency: Store) -> None:
        one, two = Context(3), Context(3, seed=1)
        one.fill(by_recency)
        two.fill(by_recency)
        assert set(by_recency.recent()[:3]) == set(two.keys)
        by_recency.touch([one.keys[2]])
        assert set(by_recency.recent()[:3]) == set(one.keys)
        assert len(by_recency.recent()) == 6

    def test_blocks_needed_elsewhere_are_listed_first_also_with_lookups(self, by_recency: Store) -> None:
        one, two = Context(3), Context(3, seed=1)
        for context in (one, two):
            by_recency.on_lookup(context.keys, context.size)
            context.fill(by_recency)
        assert set(by_recency.recent()[:3]) == set(two.keys)
        by_recency.touch([one.keys[2]], partial=True)
        assert set(by_recency.recent()[:3]) == set(one.keys)
        by_recency.touch([b"?" * 32], partial=True)
        by_recency.check()

    def test_it_knows_where_chunks_lie(self, tmp_path: Path) -> None:
        store, context = self.open(tmp_path), Context(3)
        try:
            context.fill(store)
            chunk, home = b"c" * 32, ChunkLocation(tuple(context.keys[1:]), 2, 5, 4)
            assert store.chunks.locations(chunk) == []
            assert store.chunks.add(chunk, home) == 1
            assert store.chunks.locations(chunk) == [home]
            store.drop(context.keys[0], "test")  # a home is a hint: what became of its blocks is another matter
            assert store.chunks.locations(chunk) == [home]
            store.chunks.check()
        finally:
            store.close()
        assert store.chunks.locations(chunk) == []
        assert store.chunks.add(chunk, home) == 0

    def test_peeking_needs_no_token_ids_and_is_no_use(self, store: Store) -> None:
        context = Context(2)
        context.fill(store)
        assert store.put(context.keys[1], context.state(1), kind="state")
        store.flush()
        with store.read() as reader:
            for i in range(2):
                view = reader.peek(context.keys[i])
                assert view is not None
                assert view.header.tokens == context.run(i).tobytes()
                assert bytes(view.buffer) == context.block(i).tobytes()
                del view
            state = reader.peek(context.keys[1], "state")
            assert state is not None
            assert state.header.kind == "state"
            del state
            assert reader.peek(context.keys[0], "state") is None
            assert reader.peek(b"?" * 32) is None
        stats = store.stats()
        assert (stats.hits, dict(stats.misses)) == (0, {})

    def test_watchers_are_notified_of_every_addition_and_removal(self, store: Store) -> None:
        context = Context(80)
        heard: set[bytes] = set()
        end = store.watch(heard.update)
        Context(3, seed=1).fill(store)
        assert heard == set(Context(3, seed=1).keys)
        known: dict[bytes, bool] = {}

        def follow() -> None:
            store.flush()
            keys = list(heard)
            heard.clear()
            known.update(zip(keys, (entry is not None for entry in store.entries(keys))))
            assert {key for key, present in known.items() if present} == {entry.key for entry in store.walk()}

        heard.update(Context(3, seed=1).keys)
        context.fill(store, 20)  # evicts nothing yet
        follow()
        for seed in range(2, 32):  # far more than fits
            Context(20, seed=seed).fill(store)
            follow()
        last = Context(20, seed=31)
        store.drop(last.keys[10], "corrupt")
        follow()
        assert store.forget(last.keys[:10]) == 10
        follow()
        end()
        heard.clear()
        Context(1, seed=40).fill(store)
        assert not heard

    def test_dropping_takes_all_below_and_is_seen_at_once(self, store: Store) -> None:
        one, two = Context(4), Context(4, branch=1, fork=2)
        one.fill(store)
        two.fill(store)
        store.drop(one.keys[2], "corrupt")
        assert store.match(one.keys).blocks == 2
        assert store.match(two.keys).blocks == 4
        store.drop(one.keys[0], "corrupt")
        assert store.match(two.keys).blocks == 0
        store.drop(one.keys[0], "corrupt")
        dropped = store.stats().dropped
        assert dropped == {"corrupt": 2, "below": 4}
        assert one.fill(store) == 4
        assert one.intact(store)
        store.check()

    def test_the_giver_of_a_block_is_known_while_it_is_stored(self, tmp_path: Path) -> None:
        given, own = Context(3), Context(2, seed=1)
        ann, bob = b"ann-0001", b"bob-0001"
        with contextlib.closing(self.open(tmp_path / "a")) as store:
            for i in range(3):
                assert store.put(given.keys[i], given.block(i), giver=bob if i else ann)
            own.fill(store)
            assert store.put(own.keys[1], own.state(1), kind="state", giver=bob)
            store.flush(20)
            expected = {given.keys[0]: ann, given.keys[1]: bob, given.keys[2]: bob, own.keys[1]: bob}
            assert store.givers() == expected
            assert store.put(given.keys[0], given.block(0), giver=bob)  # a duplicate
            store.flush(20)
            assert store.givers() == expected
            store.drop(given.keys[1], "audit")
            assert store.put(own.keys[1], own.state(1), kind="state", replace=True)
            store.flush(20)
            assert store.givers() == {given.keys[0]: ann}
            store.check()

    def test_forgetting_spares_what_is_shared(self, store: Store) -> None:
        one, two = Context(4), Context(4, branch=1, fork=2)
        one.fill(store)
        two.fill(store)
        assert store.forget(one.keys) == 2
        assert store.match(one.keys).blocks == 2
        assert store.match(two.keys).blocks == 4
        assert store.pin(two.keys[:3]) == 3
        assert store.forget(two.keys) == 1
        assert store.unpin(two.keys[:3]) == 3
        assert store.forget(two.keys) == 3
        assert store.forget(two.keys) == 0
        store.check()

    def test_partial_blocks_are_forgotten_with_what_they_follow(self, store: Store) -> None:
        one, two = Context(3), Context(3, branch=1, fork=2)
        one.fill(store)
        two.fill(store)
        partial = [one.partial(0, 2), one.partial(1, 1), one.partial(2, 3), two.partial(2, 3)]
        for key, data in partial:
            assert store.put(key, data)
        store.flush()
        store.check()
        assert [found is not None and found.tokens for found in store.entries([key for key, _ in partial])] == [
            2,
            1,
            3,
            3,
        ]
        with store.read() as reader:
            view = reader.peek(partial[2][0])
            assert view is not None
            assert bytes(view.buffer) == partial[2][1].tobytes()
            del view
        store.forget(one.keys)
        store.flush()
        store.check()
        # The last of what is shared is looked at too; the one before is not reached.
        assert [found is not None for found in store.entries([key for key, _ in partial])] == [True, False, False, True]
        assert store.match(one.keys).blocks == 2
        assert store.match(two.keys).blocks == 3
        store.drop(two.keys[0], "corrupt")
        store.flush()
        store.check()
        assert not any(store.entries([key for key, _ in partial]))

    def test_putting_again_and_replacing(self, store: Store) -> None:
        context = Context(2)
        context.fill(store)
        assert store.put(context.keys[1], context.block(1, fill=7))
        store.flush()
        assert context.intact(store)
        assert store.put(context.keys[1], context.block(1, fill=7), replace=True)
        store.flush()
        with store.read() as reader:
            view = context.get(reader, 1)
            assert view is not None
            assert set(bytes(view.plane(0, "k"))) == {7}
            del view
        assert store.stats().blocks == 2
        store.check()

    def test_many_threads(self, store: Store) -> None:
        contexts = [Context(6, seed=seed) for seed in range(4)]
        wrong: list[object] = []

        def work(context: Context) -> None:
            try:
                for _ in range(3):
                    context.fill(store)
                    store.pin(context.keys)
                    assert context.intact(store)
                    store.unpin(context.keys)
                    assert store.forget(context.keys) == 6
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.stats().blocks == 0
        store.check()

    def test_a_closed_store_refuses(self, tmp_path: Path) -> None:
        store, context = self.open(tmp_path), Context(2)
        context.fill(store)
        before = set(threading.enumerate())
        store.close()
        store.close()
        assert set(threading.enumerate()) <= before
        assert not store.put(context.keys[0], context.block(0))
        assert store.stats().refused["closed"] == 1
