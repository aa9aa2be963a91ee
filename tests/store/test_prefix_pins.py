"""Pins of prefixes: they hold blocks in a full store until their time is over, within limits, and over restarts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import StoreError
from ctxreuse.store import TieredStore, open_store
from ctxreuse.store.prefix_pins import PrefixPins
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context

# Blocks of a context take 4 KiB each: 128 fit, and pins may have 32 of them.
CAPACITY = 128 * 4096


@contextmanager
def opened(folder: Path, clock: FakeClock) -> Iterator[tuple[TieredStore, PrefixPins]]:
    """A store of the disk alone, and its pins, which work when they are called."""
    store = open_store(folder / "store", capacity=CAPACITY, host_bytes=0, policy="lru", clock=clock)
    with closing(store), closing(PrefixPins(store, folder / "prefixes.json", clock=clock)) as pins:
        yield store, pins
        pins.check()
        store.check()


def flood(store: TieredStore, first: int) -> None:
    for seed in range(first, first + 12):
        Context(16, seed=seed).fill(store)
    store.flush()


def kept(store: TieredStore, context: Context) -> int:
    return store.match(context.keys).blocks


def test_a_pin_holds_until_its_time_after_the_last_use(tmp_path: Path) -> None:
    clock, context, other = FakeClock(), Context(10), Context(10, seed=1)
    with opened(tmp_path, clock) as (store, pins):
        context.fill(store)
        other.fill(store)
        pins.keep(context.keys[:8], 300.0)
        pins.work()
        flood(store, 100)
        assert (kept(store, context), kept(store, other)) == (8, 0)
        for _ in range(3):
            clock.advance(299)
            pins.use(context.keys)
            pins.work()
        flood(store, 200)
        assert kept(store, context) == 8
        clock.advance(301)
        pins.work()
        assert (len(pins), pins.nbytes) == (0, 0)
        flood(store, 300)
        assert kept(store, context) == 0


def test_pins_outlive_the_process_and_end_while_it_is_down(tmp_path: Path) -> None:
    clock, short, long = FakeClock(), Context(6), Context(6, seed=1)
    with opened(tmp_path, clock) as (store, pins):
        for context, seconds in ((short, 300.0), (long, 3600.0)):
            context.fill(store)
            pins.keep(context.keys, seconds, "sk-secret")
        pins.work()
        assert len(pins) == 2
    assert "sk-secret" not in (tmp_path / "prefixes.json").read_text()
    clock.advance(301)
    with opened(tmp_path, clock) as (store, pins):
        assert len(pins) == 1
        flood(store, 100)
        assert (kept(store, short), kept(store, long)) == (0, 6)
        clock.advance(3600)
        pins.work()
        assert len(pins) == 0


def test_what_is_forgotten_is_pinned_no_more(tmp_path: Path) -> None:
    context = Context(6)
    with opened(tmp_path, FakeClock()) as (store, pins):
        context.fill(store)
        pins.keep(context.keys, 3600.0)
        pins.work()
        store.drop(context.keys[0], "forgotten")
        store.flush()
        pins.work()
        assert (len(pins), pins.nbytes) == (0, 0)


def test_a_conversation_that_grows_has_one_pin_and_a_shorter_time_ends_no_longer_one(tmp_path: Path) -> None:
    clock, context = FakeClock(), Context(12)
    with opened(tmp_path, clock) as (store, pins):
        context.fill(store)
        pins.keep(context.keys[:2], 3600.0)
        for end in (4, 8, 12):
            pins.keep(context.keys[:end], 300.0)
            pins.work()
            assert len(pins) == 2
        clock.advance(301)
        pins.work()
        flood(store, 100)
        assert kept(store, context) == 2


def test_pins_have_a_share_of_the_store_and_the_greediest_caller_gives_first(tmp_path: Path) -> None:
    clock, mine = FakeClock(), Context(4)
    with opened(tmp_path, clock) as (store, pins):
        mine.fill(store)
        pins.keep(mine.keys, 300.0, "me")
        for seed in range(1, 9):
            greedy = Context(8, seed=seed)
            greedy.fill(store)
            pins.keep(greedy.keys, 3600.0, "greedy")
            pins.work()
            assert pins.nbytes <= CAPACITY // 4
        flood(store, 100)
        assert kept(store, mine) == 4
        assert kept(store, greedy) == 8
        endless = Context(60, seed=50)
        endless.fill(store)
        pins.keep(endless.keys, 300.0, "other")
        pins.work()
        pins.check()
        flood(store, 200)
        assert 20 <= kept(store, endless) <= 32


def test_nothing_is_pinned_that_the_disk_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(4)
    with opened(tmp_path, FakeClock()) as (store, pins):
        context.fill(store)

        def full(timeout: float | None = None) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "flush", full)
            pins.keep(context.keys, 300.0)
            pins.work()
        assert len(pins) == 0
        pins.keep(context.keys, 300.0)
        pins.work()
        assert len(pins) == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"key": "?", "seconds": 1, "expires": 1e18}]'])
def test_a_broken_file_pins_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "prefixes.json").write_text(text)
    with opened(tmp_path, FakeClock()) as (_, pins):
        assert len(pins) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 8), st.sampled_from([0.0, 5.0, 60.0]), st.sampled_from("ab")),
        max_size=12,
    )
)
def test_any_order_of_pins_and_ends_adds_up(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple]) -> None:
    clock = FakeClock()
    with opened(tmp_path_factory.mktemp("pins"), clock) as (store, pins):
        contexts = [Context(8), Context(8, branch=1, fork=3), Context(8, branch=2, fork=6), Context(8, seed=9)]
        for context in contexts:
            context.fill(store)
        for number, end, seconds, caller in steps:
            pins.keep(contexts[number].keys[:end], seconds, caller)
            clock.advance(1)
            pins.use(contexts[number].keys)
            pins.work()
            pins.check()
        clock.advance(100)
        pins.work()
        assert (len(pins), pins.nbytes) == (0, 0)
        assert all(node.pins == 0 for node in store._disk._index.tree)
