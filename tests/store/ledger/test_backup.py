"""Backups while the store is written, bringing them back, and saving what a damaged ledger still has."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.errors import StoreDamagedError, StoreError, StoreOwnedError
from ctxreuse.store import Ledger, NewTurn, backup, rescue, restore, verify
from ctxreuse.store.ledger.history import turn_key
from ctxreuse.store.lmdb.recovery import sound

SPACE = bytes(range(32))


def content(folder: Path) -> dict[str, Any]:
    with Ledger.open(folder, readonly=True) as ledger:
        ledger.check()
        return {
            s.name: [s, [(turn, ledger.tokens(turn.id, SPACE)) for turn in ledger.turns(s.head)]]
            for s in ledger.sessions()
        }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    with Ledger.open(place) as ledger:
        ledger.create(
            "long", turns=[NewTurn("user", f"text {i} " * (1 + i % 7 * 40), {}, bytes(8), SPACE) for i in range(60)]
        )
        ledger.fork("long", "fork", at=30)
        ledger.append("fork", [NewTurn("assistant", f"own {i}") for i in range(3)])
        ledger.create("other", turns=[NewTurn("user", "other text")])
        ledger.delete(ledger.create("gone", turns=[NewTurn("user", "x" * 50_000)]).name)
        ledger.gc()
    return place


def test_a_backup_is_a_store_of_its_own_and_comes_back(store: Path, tmp_path: Path) -> None:
    before = content(store)
    steps: list[tuple[int, int]] = []
    made = backup(store, tmp_path / "backup", lambda done, total: steps.append((done, total)))
    assert (made.sessions, made.turns) == (3, 64)
    assert steps[-1][0] == steps[-1][1]
    assert made.bytes < (store / "ledger" / "data.mdb").stat().st_size, "free pages are not copied"
    assert content(tmp_path / "backup") == before
    with Ledger.open(store) as ledger:
        ledger.append("other", [NewTurn("user", "after the backup")])
    with pytest.raises(StoreError, match="there is a ledger already") as caught:
        restore(tmp_path / "backup", store)
    assert "--replace" in caught.value.fix
    assert content(store) != before
    again = restore(tmp_path / "backup", store, replace=True)
    assert content(store) == before
    assert Path(again.replaced).stat().st_size > 0, "what was there is kept"
    assert restore(tmp_path / "backup", tmp_path / "new").sessions == 3
    assert content(tmp_path / "new") == before
    with Ledger.open(store) as ledger:
        assert ledger.append("other", [NewTurn("user", "goes on")])[0].depth == 2
        ledger.check()


def test_what_was_replaced_in_one_second_is_all_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form, *_: "20260102-030405")
    backup(store, tmp_path / "backup")
    kept = [Path(restore(tmp_path / "backup", store, replace=True).replaced) for _ in range(3)]
    assert len(set(kept)) == 3
    assert all(file.stat().st_size for file in kept)


def test_a_backup_beside_a_writer_holds_one_moment(store: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    with Ledger.open(store) as ledger:
        ledger.create("pair")

        def write() -> None:
            n = 0
            while not stop.is_set():
                ledger.append("pair", [NewTurn("user", f"{n} one"), NewTurn("user", f"{n} two")])
                ledger.rename("other", f"other {n}") if not n else None
                n += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            backup(store, tmp_path / "one")
            backup(store, tmp_path / "two")
        finally:
            stop.set()
            writer.join()
    first, second = (len(content(tmp_path / name)["pair"][1]) for name in ("one", "two"))
    assert first % 2 == second % 2 == 0
    assert first <= second


def test_what_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    for call in (backup, rescue):
        with pytest.raises(StoreError, match="something here already"):
            call(store, tmp_path / "full")
        with pytest.raises(StoreError, match="no ledger here"):
            call(tmp_path / "empty", tmp_path / "new")
    with pytest.raises(StoreError, match="no backup here"):
        restore(tmp_path / "empty", store)
    with pytest.raises(StoreError, match="the store itself"):
        restore(store, store, replace=True)
    backup(store, tmp_path / "backup")
    with Ledger.open(store):
        with pytest.raises(StoreOwnedError):
            restore(tmp_path / "backup", store, replace=True)
        with pytest.raises(StoreOwnedError):
            rescue(store, tmp_path / "new")
    change(tmp_path / "backup", b"text 3 ", b"text 4 ")
    with pytest.raises(StoreDamagedError, match="turn 4"):
        restore(tmp_path / "backup", store, replace=True)
    assert verify(store).clean
    change(store, b"text 3 ", b"text 4 ")
    with pytest.raises(StoreDamagedError, match="turn 4"):
        backup(store, tmp_path / "of-damage")


def change(folder: Path, old: bytes, new: bytes) -> None:
    file = folder / "ledger" / "data.mdb"
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


def pages(folder: Path, where: Callable[[bytes], bool]) -> list[int]:
    """The pages of the newest commit for which ``where`` holds."""
    data = (folder / "ledger" / "data.mdb").read_bytes()
    return [at for at in range(0, len(data), 4096) if where(data[at : at + 4096])]


def zero(folder: Path, at: int) -> None:
    with open(folder / "ledger" / "data.mdb", "r+b") as file:
        file.seek(at)
        file.write(bytes(4096))


def texts(folder: Path, name: str) -> list[str]:
    return [turn.content for turn, _ in content(folder)[name][1]]


def test_a_sound_ledger_is_rescued_whole(store: Path, tmp_path: Path) -> None:
    found = rescue(store, tmp_path / "new")
    assert (found.sessions, found.turns, found.lost_turns, found.lost) == (3, 64, 0, ())
    assert content(tmp_path / "new") == content(store)
    with Ledger.open(tmp_path / "new") as ledger:
        assert ledger.append("other", [NewTurn("user", "goes on")])[0].id > 64


def test_a_lost_text_is_named_and_the_rest_is_saved(store: Path, tmp_path: Path) -> None:
    before, data = texts(store, "long"), (store / "ledger" / "data.mdb").read_bytes()
    change(store, b"text 8 ", b"text 9 ")
    found = rescue(store, tmp_path / "new")
    assert found.lost_turns == 1
    assert sorted(found.lost) == ["session 'long': turn 9"] or sorted(found.lost) == ["session 'fork': turn 9"]
    after = texts(tmp_path / "new", "long")
    assert after[8] == "[1 turn of this conversation was lost]"
    assert after[:8] + after[9:] == before[:8] + before[9:]
    assert texts(tmp_path / "new", "fork")[8] == after[8]
    with Ledger.open(tmp_path / "new", readonly=True) as ledger:
        assert ledger.turn(9).meta == {"lost": 1}
        assert ledger.turn(9).role == "user"
    assert (store / "ledger" / "data.mdb").stat().st_size == len(data), "the damaged ledger stays as it is"


@pytest.mark.parametrize("key", [turn_key(20), turn_key(60)])
def test_a_lost_page_costs_its_turns_only(store: Path, tmp_path: Path, key: bytes) -> None:
    """A page in the middle of a history, and the one with its end."""
    before = {name: texts(store, name) for name in ("long", "fork", "other")}
    whole = (store / "ledger" / "data.mdb").read_bytes()
    for at in pages(store, lambda page: page[10:12] == b"\2\0" and key in page and b"text" in page):
        (store / "ledger" / "data.mdb").write_bytes(whole)
        zero(store, at)
        if sound(store / "ledger"):  # no page of an earlier commit
            break
    found = rescue(store, tmp_path / "new")
    assert found.lost
    saved = content(tmp_path / "new")
    for name, was in before.items():
        left = [turn.content for turn, _ in saved[name][1] if "lost" not in turn.meta]
        assert set(left) <= set(was), "nothing else is in it"
    every = {turn.content for session in saved.values() for turn, _ in session[1]}
    assert len({text for was in before.values() for text in was} - every) < 40


def test_a_lost_root_costs_nothing(store: Path, tmp_path: Path) -> None:
    """The table of tables and all inner pages: what they led to is found by what it is."""
    before = content(store)
    for at in pages(store, lambda page: page[10:12] == b"\1\0" or (b"names" in page and b"tokens" in page)):
        zero(store, at)
    found = rescue(store, tmp_path / "new")
    assert found.lost_turns == 0, found
    assert any("table of tables" in line for line in found.lost)
    assert content(tmp_path / "new") == before


def test_a_removed_text_does_not_come_back(store: Path, tmp_path: Path) -> None:
    zero(store, pages(store, lambda page: b"names" in page and b"tokens" in page)[-1])
    rescue(store, tmp_path / "new")
    assert "gone" not in content(tmp_path / "new")
    assert b"xxxxxxxxxx" not in (tmp_path / "new" / "ledger" / "data.mdb").read_bytes()


def test_commands(store: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "ctxreuse", "store", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    path = ("--path", str(store))
    assert "Backed up: 3 sessions, 64 turns" in run("backup", str(tmp_path / "b"), *path)
    assert "is kept in" in run("restore", str(tmp_path / "b"), "--replace", *path)
    change(store, b"text 8 ", b"text 9 ")
    out = run("rescue", str(tmp_path / "r"), *path)
    assert "turn 9" in out
    assert "3 sessions, 64 turns; 1 turns are lost" in out
    assert '"turns": 64' in run("restore", str(tmp_path / "r"), "--replace", "--json", *path)
