"""The chunk index keeps what it was told, in memory and on disk, within its bound, and forgets what it must."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxreuse.store.chunks import index as chunks
from ctxreuse.store.chunks.index import MOST_LOCATIONS, ChunkIndex, ChunkLocation
from support.examples import examples


def chunk(n: int) -> bytes:
    return n.to_bytes(32, "little")


def home(n: int, first: int = 64, count: int = 64) -> ChunkLocation:
    """A home in blocks of 64 tokens that are made up from ``n``."""
    keys = tuple(bytes([n, i]) * 16 for i in range(-(-(first % 64 + count) // 64)))
    return ChunkLocation(keys, first % 64, count, first // 64 * 64)


def newest(homes: list[ChunkLocation]) -> list[ChunkLocation]:
    """What is kept of these, newest first: four, and among them one that was not at position 0 if there is one."""
    kept = homes[:MOST_LOCATIONS]
    if len(homes) > MOST_LOCATIONS and not any(one.first for one in kept):
        behind = next((one for one in homes[MOST_LOCATIONS:] if one.first), None)
        kept = kept if behind is None else [*kept[:-1], behind]
    return kept


class Model(RuleBasedStateMachine):
    """Against a dictionary; nothing is evicted here."""

    disk = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.homes: dict[bytes, list[ChunkLocation]] = {}
        self.open()

    def open(self) -> None:
        self.index = ChunkIndex.open(Path(self.folder.name) / "chunks" if self.disk else None, most=100)

    homes_ = st.builds(home, st.integers(0, 5), st.sampled_from([0, 30, 64]), st.just(64))
    pairs = st.lists(st.tuples(st.integers(0, 7), homes_), min_size=1, max_size=6)

    @rule(pairs=pairs)
    def add(self, pairs: list[tuple[int, ChunkLocation]]) -> None:
        assert self.index.add_many([(chunk(n), one) for n, one in pairs]) == len(pairs)
        fresh: dict[bytes, list[ChunkLocation]] = {}
        for n, one in pairs:
            fresh.setdefault(chunk(n), []).insert(0, one)
        for key, more in fresh.items():
            self.homes[key] = newest(list(dict.fromkeys([*more, *self.homes.get(key, [])])))

    @rule(pairs=pairs)
    def forget(self, pairs: list[tuple[int, ChunkLocation]]) -> None:
        self.index.forget_many([(chunk(n), one) for n, one in pairs])
        for n, one in pairs:
            left = [other for other in self.homes.get(chunk(n), []) if other != one]
            self.homes[chunk(n)] = left

    @precondition(lambda self: self.disk)
    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.open()

    @invariant()
    def same(self) -> None:
        self.index.check()
        for n in range(8):
            assert self.index.locations(chunk(n)) == self.homes.get(chunk(n), []), n

    def teardown(self) -> None:
        self.index.close()
        self.folder.cleanup()


class DiskModel(Model):
    disk = True


TestMemory = Model.TestCase
TestDisk = DiskModel.TestCase
TestMemory.settings = examples("heavy", stateful_step_count=15)
TestDisk.settings = examples("heavy", stateful_step_count=10)


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "chunks" if request.param == "disk" else None


def test_the_only_home_behind_a_head_is_kept(place: Path | None) -> None:
    index = ChunkIndex.open(place)
    behind = home(9, first=64)
    index.add(chunk(1), behind)
    for n in range(6):
        index.add(chunk(1), home(n, first=0))
    assert index.locations(chunk(1)) == [*(home(n, first=0) for n in (5, 4, 3)), behind]
    index.check()
    index.close()


def test_a_home_of_which_more_is_stored_later_is_one_home(place: Path | None) -> None:
    index = ChunkIndex.open(place)
    whole = home(1, first=70, count=60)
    part = ChunkLocation(whole.keys[:1], whole.row, 40, whole.at)
    for one in (part, whole, part):
        index.add(chunk(1), one)
        index.check()
    assert index.locations(chunk(1)) == [whole]
    index.close()


def test_the_least_recently_used_go_first(place: Path | None) -> None:
    index = ChunkIndex.open(place, most=100)
    index.add_many([(chunk(n), home(1)) for n in range(100)])
    wanted = [chunk(n) for n in range(10)]
    for start in range(100, 600, 20):
        assert all(index.locations_many(wanted)), start
        index.add_many([(chunk(n), home(1)) for n in range(start, start + 20)])
        index.check()
        assert len(index) == 100
    assert not any(index.locations_many([chunk(n) for n in range(10, 400)]))
    assert all(index.locations_many([chunk(n) for n in range(580, 600)]))
    index.close()


def test_what_cannot_be_a_home_is_not_noted(place: Path | None) -> None:
    index = ChunkIndex.open(place)
    wrong = [
        ChunkLocation((), 0, 1, 0),
        ChunkLocation((b"short",), 0, 1, 0),
        ChunkLocation((bytes(32),) * 256, 0, 1, 0),
        ChunkLocation((bytes(32),), -1, 1, 0),
        ChunkLocation((bytes(32),), 0, 0, 0),
        ChunkLocation((bytes(32),), 0, 1 << 16, 0),
        ChunkLocation((bytes(32),), 0, 1, 1 << 40),
    ]
    assert index.add_many([(chunk(1), one) for one in wrong]) == 0
    assert index.add(b"short", home(1)) == 0
    assert len(index) == 0
    assert index.locations_many([b"", b"short", chunk(1)]) == [[], [], []]
    index.check()
    index.close()


def test_many_forgotten_ones_are_written_and_stay_forgotten(tmp_path: Path) -> None:
    index = ChunkIndex.open(tmp_path / "chunks")
    index.add_many([(chunk(n), home(1)) for n in range(1000)])
    for n in range(0, 1000, 2):
        index.forget(chunk(n), home(1))
    index.check()
    index.add(chunk(0), home(1))  # again
    index.close()
    index = ChunkIndex.open(tmp_path / "chunks")
    assert [n for n in range(1000) if index.locations(chunk(n))] == [0, *range(1, 1000, 2)]
    assert len(index) == 501
    index.check()
    index.close()


def test_threads_see_whole_homes(place: Path | None) -> None:
    index = ChunkIndex.open(place, most=50)
    wrong: list[object] = []

    def work(n: int) -> None:
        try:
            for i in range(60):
                index.add(chunk(i), home(n))
                for one in index.locations(chunk(i)):
                    assert one in [home(k) for k in range(4)]
                index.forget(chunk(i), home(n))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    index.check()
    index.close()


def test_a_forked_child_finds_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    index = ChunkIndex.open(tmp_path / "chunks")
    index.add(chunk(1), home(1))
    with index._lock:  # as a thread would hold it that the child does not have
        pid = os.fork()
        if not pid:
            empty = index.locations(chunk(1)) == [] and index.add(chunk(2), home(1)) == 0
            index.close()
            os._exit(0 if empty else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert index.locations(chunk(1)) == [home(1)]
    index.add(chunk(2), home(2))
    index.check()
    index.close()


@examples("normal")
@given(data=st.data())
def test_any_value_is_read_as_homes_or_as_none(data: st.DataObject) -> None:
    good = chunks._encode([home(1), home(2, first=0)])
    raw = bytearray(data.draw(st.one_of(st.binary(max_size=300), st.just(good))))
    for at in data.draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), max_size=3)):
        if raw:
            raw[at] = data.draw(st.integers(0, 255))
    value = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    found = chunks._decode(value)
    assert len(found) <= MOST_LOCATIONS
    assert all(chunks._sound(one) for one in found)
    assert not found or chunks._encode(found) == value
