"""Items beside the sessions: order of keys, transactions, backups, checks, rescue, and files written before them."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import SessionError, StoreDamagedError, StoreError, StoreReadOnlyError
from ctxreuse.store import Ledger, NewTurn, backup, rescue
from ctxreuse.store.items import Items, ItemTable, item_key
from support.examples import examples

parts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=4)


@examples("light")
@given(parts, parts)
def test_keys_sort_and_begin_as_their_parts_do(one: list[str], other: list[str]) -> None:
    here, there = item_key(*one), item_key(*other)
    assert (here < there) == ([part.encode() for part in one] < [part.encode() for part in other])
    assert there.startswith(here) == (other[: len(one)] == one)


def test_long_parts_are_shortened_and_differ() -> None:
    keys = {item_key("x" * size) for size in (99, 100, 101, 102, 5000)}
    assert len(keys) == 5
    assert max(map(len, keys)) <= 101
    with pytest.raises(StoreError, match="names of an item"):
        item_key(*("x" * 90 for _ in range(6)))
    with pytest.raises(SessionError):
        item_key("\ud800")


def put(items: Items, *names: str) -> None:
    def work(table: ItemTable) -> None:
        for name in names:
            table.put(item_key(*name.split("/")), f"the text of {name}".encode())

    items.write(work)


def test_items_are_read_in_order_and_from_either_end(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        items = Items(ledger)
        put(items, "b/1", "a/2", "a/1", "a", "ab/1", "a/3")
        with items.read() as table:
            assert [body.decode()[12:] for _, body in table.scan(item_key("a"))] == ["a", "a/1", "a/2", "a/3"]
            assert next(body.decode()[12:] for _, body in table.scan(item_key("a"), reverse=True)) == "a/3"
            assert next(body.decode()[12:] for _, body in table.scan(b"", reverse=True)) == "b/1"
            assert len(table.keys(item_key("b"))) == 1
            assert table.get(item_key("c")) is None
        assert ledger.deleted_since() is None
        assert items.write(lambda table: table.delete(item_key("a", "1")))
        assert ledger.deleted_since() is not None
    with Ledger.open(tmp_path, readonly=True) as ledger, Items(ledger).read() as table:
        assert len(table.keys(item_key("a"))) == 3
    with Ledger.open(tmp_path, readonly=True) as ledger, pytest.raises(StoreReadOnlyError):
        put(Items(ledger), "d")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def work(table: ItemTable) -> None:
        table.put(item_key("a"), b"x")
        raise KeyError("later")

    with Ledger.open(tmp_path) as ledger:
        with pytest.raises(KeyError):
            Items(ledger).write(work)
        with Items(ledger).read() as table:
            assert table.keys(b"") == []


def test_a_file_that_grows_runs_the_work_again(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, map_size=1 << 20) as ledger:
        items = Items(ledger)
        for number in range(8):
            items.write(lambda table, n=number: table.put(item_key(str(n)), bytes(300_000)))  # type: ignore[misc]
        with items.read() as table:
            assert len(table.keys(b"")) == 8


def test_backups_and_rewrites_have_them(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "m") as ledger:
        ledger.create("s", turns=[NewTurn("user", "hi")])
        items = Items(ledger)
        put(items, "a/SECRET", "a/2")
        items.write(lambda table: table.delete(item_key("a", "SECRET")))
        assert b"SECRET" in (tmp_path / "m/ledger/data.mdb").read_bytes()
        ledger.compact()
        assert b"SECRET" not in (tmp_path / "m/ledger/data.mdb").read_bytes()
        backup(tmp_path / "m", tmp_path / "copy")
    with Ledger.open(tmp_path / "copy") as ledger, Items(ledger).read() as table:
        assert table.get(item_key("a", "2")) == b"the text of a/2"
        assert ledger.verify().problems == ()


def test_damage_is_found_and_the_rest_is_rescued(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "m") as ledger:
        put(Items(ledger), *(f"item {n}" for n in range(5)))
    file = tmp_path / "m/ledger/data.mdb"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"the text of item 3", b"the text of item 9"))
    with Ledger.open(tmp_path / "m") as ledger:
        assert [problem for problem in ledger.verify().problems if "item 3" in problem]
        with Items(ledger).read() as table:
            with pytest.raises(StoreDamagedError):
                table.get(item_key("item 3"))
            assert table.get(item_key("item 2")) == b"the text of item 2"
    found = rescue(tmp_path / "m", tmp_path / "new")
    assert any("item 3" in lost for lost in found.lost)
    with Ledger.open(tmp_path / "new") as ledger, Items(ledger).read() as table:
        assert table.keys(b"") == [item_key(f"item {n}") for n in (0, 1, 2, 4)]


def test_a_file_from_before_has_none_and_takes_them(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.create("s")
    env = lmdb.open(str(tmp_path / "ledger"), max_dbs=16)
    with env.begin(write=True) as txn:
        txn.drop(env.open_db(b"items", txn))
    env.close()
    with Ledger.open(tmp_path, readonly=True) as ledger:
        with Items(ledger).read() as table:
            assert (table.keys(b""), table.get(b"x"), list(table.scan(b"", reverse=True))) == ([], None, [])
        assert ledger.verify().problems == ()
    with Ledger.open(tmp_path) as ledger:
        put(Items(ledger), "a")
        with Items(ledger).read() as table:
            assert len(table.keys(b"")) == 1
