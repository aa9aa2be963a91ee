"""Damage: each kind is a counted miss or a fresh start of the cache, and a clear error of the ledger."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from ctxreuse.errors import FormatError, StoreError
from ctxreuse.store import BlockStore, Ledger, NewTurn, gc, verify
from ctxreuse.testing.store import Context
from support.examples import examples

CONTEXT = Context(4)
CAPACITY = 1 << 20


@contextmanager
def tampering(home: Path) -> Iterator[Any]:
    """A write transaction on a closed environment, and its tables."""
    with lmdb.open(str(home), max_dbs=8) as env:
        tables = {name.decode(): env.open_db(name) for name in env.dbs()}
        with env.begin(write=True) as txn:
            yield txn, tables


def fill(folder: Path, *, boot: str = "one") -> None:
    with BlockStore.open(folder, capacity=CAPACITY, boot=boot) as store:
        CONTEXT.fill(store)


def replace(folder: Path, value: bytes, i: int = 2) -> None:
    with tampering(folder / "blocks") as (txn, tables):
        assert txn.replace(CONTEXT.keys[i], value, db=tables["blocks"]) is not None


RAW = CONTEXT.block(2).tobytes()
BAD = {
    "foreign": b"GGUF" + RAW[4:],
    "newer": RAW[:8] + b"\2\0" + RAW[10:],
    "older": RAW[:8] + b"\0\0" + RAW[10:],
    "truncated": RAW[:-4096],
    "truncated prelude": RAW[:20],
    "corrupt": RAW[:40] + bytes([RAW[40] ^ 1]) + RAW[41:],
    "corrupt length": RAW[:12] + b"\xff\xff\xff\xff" + RAW[16:],
    "corrupt checksum": RAW[:24] + bytes([RAW[24] ^ 1]) + RAW[25:],
    "corrupt tail": RAW + bytes(4096),
    "foreign key": CONTEXT.block(1).tobytes(),
    "foreign kind": CONTEXT.state(2).tobytes(),
    "space": Context(4, space=bytes(32)).block(2).tobytes(),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_misses_and_go_with_all_below(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    value, reason = BAD[name], name.split()[0]
    if reason == "space":
        # A value of another space under this key: its own key differs as well, which is found first.
        reason = "foreign"
    replace(tmp_path, value)
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="one") as store:
        with store.read() as reader:
            assert CONTEXT.get(reader, 2) is None
            assert reader.missed == reason
            assert CONTEXT.get(reader, 1) is not None
        assert store.match(CONTEXT.keys).blocks == 2
        stats = store.stats()
        assert stats.misses == {reason: 1}
        assert stats.dropped == {reason: 1, "below": 1}
        store.check()
        assert CONTEXT.fill(store) == 4
        assert CONTEXT.intact(store)


@examples("light", suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, len(RAW) - 1), flip=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_found_or_harmless(tmp_path: Path, at: int, flip: int) -> None:
    if not (tmp_path / "blocks").exists():
        fill(tmp_path)
    replace(tmp_path, RAW[:at] + bytes([RAW[at] ^ flip]) + RAW[at + 1 :])
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="one", readonly=True) as store, store.read() as reader:
        view = CONTEXT.get(reader, 2)
        if view is None:
            assert sum(store.stats().misses.values()) == 1
            return
        try:
            view.verify()
        except FormatError:
            assert [key for key, _ in store.verify()] == [CONTEXT.keys[2]]
            return
        # What is neither header nor plane is padding.
        assert bytes(view.plane(0, "k")) == bytes([CONTEXT.keys[2][0]]) * 256
        assert bytes(view.plane(0, "v")) == bytes([CONTEXT.keys[2][0]]) * 256
        del view


def flip_plane(folder: Path) -> None:
    # The last byte of plane v, which no parser looks at.
    at = RAW.rindex(bytes([CONTEXT.keys[2][0]]) * 4)
    replace(folder, RAW[:at] + bytes([RAW[at] ^ 1]) + RAW[at + 1 :])


def leave_unclean(folder: Path, boot: str) -> None:
    """What a power failure leaves: no process, and a note that says it was open."""
    record = msgspec.json.decode((folder / "owner.json").read_bytes())
    record["parts"]["blocks"] = {"clean": False, "boot": boot}
    (folder / "owner.json").write_bytes(msgspec.json.encode(record))


def test_a_death_in_this_boot_keeps_the_cache(tmp_path: Path) -> None:
    fill(tmp_path)
    leave_unclean(tmp_path, "one")
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="one") as store:
        assert store.stats().recovered == "kept"
        assert CONTEXT.intact(store)


def test_a_crash_of_the_machine_has_everything_verified(tmp_path: Path, caplog) -> None:
    fill(tmp_path)
    flip_plane(tmp_path)
    leave_unclean(tmp_path, "one")
    steps: list[tuple[int, int]] = []
    with BlockStore.open(
        tmp_path, capacity=CAPACITY, boot="two", progress=lambda done, total: steps.append((done, total))
    ) as store:
        assert store.stats().recovered == "verified"
        assert steps[-1] == (4, 4)
        assert store.match(CONTEXT.keys).blocks == 2
        assert CONTEXT.intact(store, [0, 1])
        store.check()
    assert "2 entries that cannot be used" in caplog.text
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="two") as store:
        assert store.stats().recovered == ""


def test_the_ledgers_use_says_nothing_about_the_cache(tmp_path: Path) -> None:
    fill(tmp_path)
    leave_unclean(tmp_path, "one")
    Ledger.open(tmp_path, boot="two").close()
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="two") as store:
        assert store.stats().recovered == "verified"


def pages(folder: Path, change: Any) -> None:
    with open(folder / "blocks" / "data.mdb", "r+b") as file:
        change(file)


def wreck_format(folder: Path) -> None:
    with tampering(folder / "blocks") as (txn, tables):
        txn.put(b"format", msgspec.msgpack.encode(99), db=tables["info"])


def wreck_record(folder: Path) -> None:
    with tampering(folder / "blocks") as (txn, tables):
        txn.put(CONTEXT.keys[1], b"short", db=tables["meta"])


def wreck_pairs(folder: Path) -> None:
    with tampering(folder / "blocks") as (txn, tables):
        txn.delete(CONTEXT.keys[3], db=tables["blocks"])


def wreck_table(folder: Path) -> None:
    with tampering(folder / "blocks") as (txn, tables):
        txn.drop(tables["meta"])


WRECKS = {
    "both meta pages": lambda folder: pages(folder, lambda file: file.write(os.urandom(8192))),
    "cut to nothing": lambda folder: pages(folder, lambda file: file.truncate(0)),
    "cut inside the meta pages": lambda folder: pages(folder, lambda file: file.truncate(5000)),
    "cut after the meta pages": lambda folder: pages(folder, lambda file: file.truncate(8192)),
    "cut in half": lambda folder: pages(folder, lambda file: file.truncate(file.seek(0, 2) // 2 & ~4095)),
    "cut in a page": lambda folder: pages(folder, lambda file: file.truncate(file.seek(0, 2) - 5000)),
    "another program's file": lambda folder: pages(folder, lambda file: file.write(b"SQLite format 3\0" * 1024)),
    "another format": wreck_format,
    "a record that is none": wreck_record,
    "a value without its record": wreck_pairs,
    "no records": wreck_table,
}


@pytest.mark.parametrize("name", WRECKS)
def test_a_wrecked_cache_starts_empty_and_works(tmp_path: Path, caplog, name: str) -> None:
    fill(tmp_path)
    WRECKS[name](tmp_path)
    caplog.set_level(logging.WARNING)
    with BlockStore.open(tmp_path, capacity=CAPACITY, boot="one") as store:
        recovered = store.stats().recovered
        # A file cut where nothing was stored may be whole enough to verify, and an empty file is a new cache.
        assert recovered == "rebuilt" or name.startswith("cut")
        if recovered == "rebuilt":
            assert "starts empty" in caplog.text
        held = store.match(CONTEXT.keys).blocks
        assert CONTEXT.intact(store, range(held))
        assert CONTEXT.fill(store) == 4
        assert CONTEXT.intact(store)
        store.check()
        assert store.verify() == []


@examples("normal", suppress_health_check=list(HealthCheck))
@example(page=9, at=237, junk=bytes(4096), crashed=False)  # the first page of a large value
@example(page=5, at=3961, junk=b"\x00", crashed=True)  # a value's key
@example(page=5, at=3961, junk=b"\x00", crashed=False)
@given(
    page=st.integers(0, 30),
    at=st.integers(0, 4080),
    junk=st.binary(min_size=1, max_size=16) | st.just(bytes(4096)),
    crashed=st.booleans(),
)
def test_random_damage(tmp_path: Path, page: int, at: int, junk: bytes, crashed: bool) -> None:
    """Pages as a lost power supply or a bad disk may leave them: LMDB, which would abort, never sees them."""
    folder = tmp_path / "store"
    if folder.exists():
        shutil.rmtree(folder)
    fill(folder)

    def damage(file: Any) -> None:
        file.seek(min(page * 4096 + at, file.seek(0, 2)))
        file.write(junk)

    pages(folder, damage)
    if crashed:
        leave_unclean(folder, "one")
    with BlockStore.open(folder, capacity=CAPACITY, boot="two" if crashed else "one") as store:
        held = store.match(CONTEXT.keys).blocks
        recovered = store.stats().recovered
        # After a clean close the values are believed until they are read, when their checksums tell.
        assert CONTEXT.intact(store, range(held)) or recovered == "verified" or not crashed
        assert store.verify() == [] or not crashed
        CONTEXT.fill(store)
        store.check()


def keep(folder: Path) -> None:
    with Ledger.open(folder) as ledger:
        ledger.append(ledger.create("main").id, [NewTurn("user", f"turn {i} " * 400) for i in range(40)])


@pytest.mark.parametrize("name", ["both meta pages", "cut after the meta pages", "cut in half", "another format"])
def test_a_damaged_ledger_is_an_error_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    keep(tmp_path)
    # The same wrecks, done to the ledger under the cache's name.
    (tmp_path / "ledger").rename(tmp_path / "blocks")
    WRECKS[name](tmp_path)
    (tmp_path / "blocks").rename(tmp_path / "ledger")
    before = (tmp_path / "ledger" / "data.mdb").read_bytes()
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"damaged|another format"):
            Ledger.open(tmp_path, readonly=readonly)
    assert (tmp_path / "ledger" / "data.mdb").read_bytes() == before
    # The cache beside it is not concerned.
    fill(tmp_path)


def test_verify_reports_and_gc_removes(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        verify(tmp_path)
    fill(tmp_path)
    keep(tmp_path)
    verdict = verify(tmp_path)
    assert verdict.clean
    assert (verdict.blocks, verdict.states, verdict.sessions, verdict.turns) == (4, 0, 1, 40)
    shutil.copytree(tmp_path, tmp_path / "copy")
    wreck_pairs(tmp_path / "copy")
    assert verify(tmp_path / "copy").problems
    wreck_record(tmp_path / "copy")
    assert verify(tmp_path / "copy").problems
    flip_plane(tmp_path)
    steps: list[tuple[int, int]] = []
    verdict = verify(tmp_path, lambda done, total: steps.append((done, total)))
    assert [key for key, _ in verdict.bad] == [CONTEXT.keys[2]]
    assert not verdict.clean
    assert steps[-1] == (4, 4)
    with Ledger.open(tmp_path) as ledger:
        ledger.delete("main")
    collected = gc(tmp_path)
    assert (collected.turns, collected.entries) == (40, 2)
    verdict = verify(tmp_path)
    assert verdict.clean
    assert (verdict.blocks, verdict.turns) == (2, 0)
