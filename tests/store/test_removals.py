"""What left a store is remembered as it happened: when, how, by which rule, for whom; bounded, over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store import BlockStore, open_store
from ctxreuse.store.removals import FILE, Removal, RemovalLog, read_removals
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


EVENTS = st.lists(
    st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from(["evicted", "dropped", "refused"])),
    max_size=30,
)


@given(EVENTS)
def test_the_last_that_happened_to_a_key_counts(events: list[tuple[list[int], str]]) -> None:
    clock = FakeClock()
    book = RemovalLog(clock=clock.now, most=12)
    added: list[tuple[int, str, float]] = []
    for keys, how in events:
        clock.advance(1)
        book.add([key(n) for n in keys], how, "x", key(keys[0]) if keys[0] % 2 else b"")  # type: ignore[arg-type]
        added = [*added, *((n, how, clock.now()) for n in keys)][-12:]
        book.check()
    model = {n: (how, at) for n, how, at in added}
    for n in range(31):
        gone = book.removal(key(n))
        assert (None if gone is None else (gone.how, gone.at)) == model.get(n)
    assert len(book) == len(model)
    newest = list(dict.fromkeys(at for n, how, at in reversed(added) if model[n] == (how, at)))
    found = book.newest(3)
    assert [(one.at, blocks) for _, one, blocks in found] == [
        (at, sum(at == last for _, last in model.values())) for at in newest[:3]
    ]
    assert len({number for number, _, _ in found}) == len(found)


def test_it_is_kept_over_restarts_and_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    clock = FakeClock()
    book = RemovalLog(tmp_path / FILE, clock=clock.now)
    book.open()
    book.add([key(1), key(2)], "evicted", "lru", key(9))
    book.add([], "dropped", "rebuilt")
    book.close()
    for again in (RemovalLog(tmp_path / FILE), None):
        if again is not None:
            again.open()
        found = again or read_removals(tmp_path)
        assert found.removal(key(2)) == Removal(clock.now(), "evicted", "lru", key(9)[:8])
        assert found.removal(ROOT) == Removal(clock.now(), "dropped", "rebuilt")
        found.close()
    raw = bytearray((tmp_path / FILE).read_bytes())
    raw[20] ^= 1
    (tmp_path / FILE).write_bytes(bytes(raw))
    with pytest.raises(FormatError, match="checksum") as damaged:
        read_removals(tmp_path)
    assert "Delete the file" in damaged.value.fix
    fresh = RemovalLog(tmp_path / FILE)
    fresh.open()
    assert len(fresh) == 0
    fresh.add([key(3)], "dropped", "corrupt")
    fresh.close()
    assert read_removals(tmp_path).removal(key(3)) is not None
    assert (tmp_path / (FILE + ".bad")).exists()


def test_a_disk_that_fails_only_ends_the_writing(tmp_path: Path) -> None:
    book = RemovalLog(tmp_path / "nowhere" / FILE)
    book.open()
    book.add([key(1)], "evicted", "lru")
    assert book.removal(key(1)) is not None
    book.close()


def test_a_store_says_how_its_blocks_left(tmp_path: Path) -> None:
    clock = FakeClock()
    one, two, three = Context(4, seed=1), Context(12, seed=2), Context(2, seed=3)
    with open_store(tmp_path, capacity=12 * 4080, policy="lru", clock=clock.now) as store:
        for context in (one, two):
            for i in range(len(context)):
                assert store.put(context.keys[i], context.block(i))
            store.flush()
            clock.advance(1)
        gone = store.removal(one.keys[-1])
        assert gone is not None
        assert (gone.how, gone.why, gone.at) == ("evicted", "lru", clock.now() - 1)
        assert gone.by in {key[:8] for key in two.keys}
        store.drop(two.keys[2], "corrupt")
        assert [found and found.how for found in map(store.removal, two.keys)][:4] == [None, None, "dropped", "dropped"]
        assert store.removal(two.keys[3]) == Removal(clock.now(), "dropped", "corrupt")
        store.forget(two.keys[:2])
        assert store.removal(two.keys[0]) == Removal(clock.now(), "dropped", "forgotten")
        store.put(three.keys[1], three.block(1))  # before its parent
        store.flush()
        assert store.removal(three.keys[1]) == Removal(clock.now(), "refused", "orphan")
    with BlockStore.open(tmp_path, clock=clock.now) as again:
        assert again.removal(one.keys[-1]) == gone
        assert again.removal(ROOT) is None


def test_host_memory_alone_says_it_too() -> None:
    one, two = Context(4, seed=1), Context(4, seed=2)
    with open_store(None, host_bytes=5 * len(one.block(0))) as store:
        for context in (one, two):
            for i in range(4):
                store.put(context.keys[i], context.block(i))
        gone = store.removal(one.keys[-1])
        assert gone is not None
        assert (gone.how, gone.why, gone.by) == ("evicted", "host memory", two.keys[1][:8])
