"""Damaged ledgers: an error or the right content, whatever opens them, and never the end of the process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from ctxreuse import doctor
from ctxreuse.errors import StoreDamagedError, StoreError
from ctxreuse.store import BlockStore, Ledger, NewTurn, verify
from ctxreuse.store.ledger import opening
from ctxreuse.store.lmdb import apart
from support.examples import scale
from support.waiting import patient


@pytest.mark.slow
def test_no_damage_ends_a_process_or_changes_what_is_read(tmp_path: Path) -> None:
    count = scale(60)
    launcher = Path(__file__).with_name("damage_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path), str(count), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(30 + 5 * count))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["odd"], found
    for ended in found["ended"].values():
        assert sum(ended.values()) == count
        assert ended["error"] > count / 4


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path) as ledger:
        ledger.append(ledger.create("main").id, [NewTurn("user", f"turn {i} " * (1 + i % 2 * 400)) for i in range(40)])
    return tmp_path


def wreck_a_leaf(folder: Path) -> None:
    """Make a page of texts say that it has more of them than it can hold."""
    file = folder / "ledger" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = next(
        at
        for at in range(8192, len(data), 4096)
        if data[at + 10 : at + 12] == b"\2\0" and b"turn 2 " in data[at : at + 4096]
    )
    data[at + 12 : at + 14] = b"\xf0\x0f"
    file.write_bytes(data)


@pytest.mark.parametrize("readonly", [False, True])
def test_the_page_is_named_and_what_to_do(kept: Path, readonly: bool) -> None:
    wreck_a_leaf(kept)
    before = (kept / "ledger" / "data.mdb").read_bytes()
    with pytest.raises(StoreDamagedError, match=r"the ledger is damaged: main/turns DB.* page \d+") as caught:
        Ledger.open(kept, readonly=readonly)
    for word in ("ctxreuse store restore", "ctxreuse store rescue", "Nothing was changed"):
        assert word in caught.value.fix
    (problem,) = verify(kept).problems
    assert "page" in problem
    assert [found.status for found in doctor._health(kept)] == ["broken"]
    assert (kept / "ledger" / "data.mdb").read_bytes() == before


def leave(folder: Path, **changed: Any) -> None:
    """Change what the last owner wrote of the ledger."""
    record = msgspec.json.decode((folder / "owner.json").read_bytes())
    record["parts"]["ledger"].update(changed)
    (folder / "owner.json").write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize("readonly", [False, True])
def test_pages_are_walked_unless_nothing_happened_since_a_clean_close(
    kept: Path, monkeypatch: pytest.MonkeyPatch, readonly: bool
) -> None:
    walks: list[Path] = []
    for name in ("examine", "sound"):
        monkeypatch.setattr(opening, name, lambda home: walks.append(home) or "")

    def walked(boot: str | None = None) -> bool:
        walks.clear()
        Ledger.open(kept, readonly=readonly, boot=boot).close()
        return bool(walks)

    assert not walked()
    leave(kept, clean=False)
    assert walked()
    leave(kept, clean=True)
    assert walked("another boot")
    os.utime(kept / "ledger" / "data.mdb")
    if not readonly:
        leave(kept, boot=opening_boot())
    assert walked()


def opening_boot() -> str:
    from ctxreuse.store.lmdb.owner import boot_id

    return boot_id()


def test_beside_an_owner_pages_that_it_uses_again_are_no_damage(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commits overwrite freed pages while they are walked; a snapshot holds them still."""
    from ctxreuse.store.lmdb import recovery

    walk = recovery.sound
    monkeypatch.setattr(recovery, "sound", lambda home: "page 7 was used again while it was walked")
    with pytest.raises(StoreError, match="page 7"):
        Ledger.open(shutil.copytree(kept, kept / "copy"), readonly=True)
    with Ledger.open(kept, readonly=True) as reader:
        monkeypatch.setattr(recovery, "sound", walk)
        assert reader.count() == 1
    with Ledger.open(kept) as owner:
        monkeypatch.setattr(recovery, "sound", lambda home: "page 7 was used again while it was walked")
        assert recovery.examine(kept / "ledger") == ""
        assert verify(kept).clean
        owner.append("main", [NewTurn("user", "more")])


def die(*_: str, progress: Any) -> None:
    """What LMDB does when it meets a page that is not what it expects."""
    print("mdb.c:5542: Assertion 'IS_BRANCH(mp)' failed in mdb_page_search_root()", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)


def complain(*_: str, progress: Callable[[int, int], None]) -> None:
    progress(1, 2)
    raise StoreError("what", where="where", fix="fix")


def call(name: str, **options: Any) -> Any:
    return apart.call(f"store.ledger.test_damage:{name}", where=Path("/somewhere"), **options)


def test_a_fault_of_lmdb_is_an_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the folder where it runs')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with pytest.raises(StoreDamagedError, match=r"LMDB was ended by SIGABRT.*IS_BRANCH") as caught:
        call("die")
    assert caught.value.where == "/somewhere"
    assert "store rescue" in caught.value.fix
    steps: list[tuple[int, int]] = []
    with pytest.raises(StoreError, match="what") as error:
        call("complain", progress=lambda done, total: steps.append((done, total)))
    assert (error.value.where, error.value.fix, steps) == ("where", "fix", [(1, 2)])
    with pytest.raises(StoreError, match=r"code 1: AttributeError"):
        call("nothing")


BEGINNINGS = ["an empty file", "two meta pages", "some tables", "all tables"]


@pytest.mark.parametrize("begun", BEGINNINGS)
@pytest.mark.parametrize("part", ["ledger", "blocks"])
def test_a_store_that_was_killed_at_birth_was_not_begun(tmp_path: Path, begun: str, part: str) -> None:
    home = tmp_path / part
    home.mkdir()
    if begun == "an empty file":
        (home / "data.mdb").touch()
    else:
        tables = {"ledger": opening.TABLES, "blocks": ("blocks", "states", "meta", "info")}[part]
        with lmdb.open(str(home), max_dbs=8) as env:
            for name in {"two meta pages": (), "some tables": tables[:2], "all tables": tables}[begun]:
                env.open_db(name.encode())
    verdict = verify(tmp_path)
    assert verdict.clean, verdict
    assert verdict.not_begun == (part,) or (part, begun) == ("blocks", "all tables")
    if part == "ledger":
        assert [(found.status, found.value) for found in doctor._health(tmp_path)] == [("ok", "not begun")]
        with pytest.raises(StoreError, match="nothing was in it yet"):
            Ledger.open(tmp_path, readonly=True)
        with Ledger.open(tmp_path) as ledger:
            ledger.create("first")
    else:
        BlockStore.open(tmp_path, capacity=1 << 20).close()
    assert verify(tmp_path).not_begun == ()


def test_an_emptied_file_is_not_a_new_ledger(kept: Path) -> None:
    os.truncate(kept / "ledger" / "data.mdb", 0)
    for readonly in (False, True):
        with pytest.raises(StoreDamagedError, match="its file is empty, and had"):
            Ledger.open(kept, readonly=readonly)
    assert not verify(kept).clean
