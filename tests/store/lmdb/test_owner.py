"""One owner at a time, who can be named; its death frees the store; readers come and go beside it."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import lmdb
import pytest

from ctxreuse.errors import StoreClosedError, StoreError, StoreOwnedError, StoreReadOnlyError
from ctxreuse.store import BlockStore, Ledger, NewTurn, open_store
from ctxreuse.testing.store import Context
from support.waiting import patient

HOLD = """
import sys
from ctxreuse.store import Ledger
ledger = Ledger.open(sys.argv[1])
ledger.create("theirs")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_told_who_owns_the_store(tmp_path: Path, spawn) -> None:
    other = spawn(HOLD, tmp_path)
    assert other.stdout.readline() == "ready\n"
    for part in (Ledger, BlockStore):
        with pytest.raises(StoreOwnedError) as caught:
            part.open(tmp_path)
        for word in (str(other.pid), os.uname().nodename, "since", "in Python, readonly=True"):
            assert word in str(caught.value)
    with Ledger.open(tmp_path, readonly=True) as ledger:
        assert ledger.session("theirs").head == 0
        with pytest.raises(StoreReadOnlyError):
            ledger.create("mine")
    other.kill()
    other.wait()
    with Ledger.open(tmp_path) as ledger, BlockStore.open(tmp_path):
        assert ledger.count() == 1


def test_one_process_may_open_each_part_once(tmp_path: Path) -> None:
    with Ledger.open(tmp_path), BlockStore.open(tmp_path):
        with pytest.raises(StoreOwnedError, match=str(os.getpid())):
            BlockStore.open(tmp_path)
        with pytest.raises(StoreOwnedError):
            Ledger.open(tmp_path)
    with BlockStore.open(tmp_path), Ledger.open(tmp_path):
        pass
    record = json.loads((tmp_path / "owner.json").read_text())
    assert record["pid"] == os.getpid()
    assert record["command"]
    assert all(part["clean"] for part in record["parts"].values())
    assert stat.S_IMODE((tmp_path / "owner.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b'{"pid": ', b'{"host": "\xff"}'])
def test_a_torn_owner_file_locks_nobody_out(tmp_path: Path, content: bytes) -> None:
    Ledger.open(tmp_path).close()
    (tmp_path / "owner.json").write_bytes(content)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.count() == 0


@pytest.mark.parametrize("since", ["1e300", "-1e300", "1e12"])
def test_an_owner_file_of_nonsense_still_says_that_the_store_is_owned(tmp_path: Path, since: str) -> None:
    with Ledger.open(tmp_path):
        (tmp_path / "owner.json").write_text(f'{{"pid": 7, "host": "h", "command": "c", "since": {since}}}')
        with pytest.raises(StoreOwnedError, match="process 7 on h"):
            Ledger.open(tmp_path)


def test_deleting_the_owner_file_frees_nothing(tmp_path: Path, spawn) -> None:
    other = spawn(HOLD, tmp_path)
    assert other.stdout.readline() == "ready\n"
    (tmp_path / "owner.json").unlink()
    with pytest.raises(StoreOwnedError, match="another process"):
        Ledger.open(tmp_path)


def test_nothing_is_left_after_closing(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    context = Context(4)
    for _ in range(3):
        with open_store(tmp_path, capacity=1 << 20) as store, Ledger.open(tmp_path) as ledger:
            context.fill(store)
            assert context.intact(store)
            ledger.create()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == files
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {
        "gone.journal",
        "owner.json",
        "chunks/sum",
        *(f"{part}/{file}.mdb" for part in ("blocks", "chunks", "ledger") for file in ("data", "lock")),
    }
    for part in ("blocks", "ledger"):
        with lmdb.open(str(tmp_path / part), readonly=True) as env:
            assert env.readers().strip() == "(no active readers)"


def test_use_after_closing_and_after_a_fork(tmp_path: Path) -> None:
    ledger, store = Ledger.open(tmp_path), BlockStore.open(tmp_path, capacity=1 << 20)
    context = Context(1)
    pid = os.fork()
    if not pid:
        code = 0
        try:
            ledger.count()
        except StoreError as error:
            code += "fork" in str(error)
        code += 2 * (not store.put(context.keys[0], context.block(0)))
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert context.fill(store) == 1
    ledger.close()
    store.close()
    with pytest.raises(StoreClosedError):
        ledger.count()
    with pytest.raises(StoreClosedError), store.read():
        pass


FORK = """
import os, sys
from ctxreuse.store import BlockStore, Ledger
from ctxreuse.testing.store import Context
store, ledger, context = BlockStore.open(sys.argv[1]), Ledger.open(sys.argv[1]), Context(3)
context.fill(store, upto=1)
pid = os.fork()
if not pid:
    assert not store.put(context.keys[1], context.block(1))
    store.flush(); store.match(context.keys); store.stats(); store.drop(context.keys[0], "x")
    store.close(); ledger.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert context.fill(store) == 3 and context.intact(store)
ledger.create("after")
store.close(); ledger.close()
print("fine")
"""


def test_a_forked_child_that_ends_normally_disturbs_nothing(tmp_path: Path, spawn) -> None:
    out, err = spawn(FORK, tmp_path).communicate(timeout=patient(60))
    assert (out, err) == ("fine\n", "")
    with BlockStore.open(tmp_path) as store, Ledger.open(tmp_path) as ledger:
        assert store.stats().recovered == ""
        assert Context(3).intact(store)
        assert ledger.count() == 1


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    hear, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(say)
        os.read(hear, 1)
        os._exit(0)
    os.close(hear)
    ledger.close()
    Ledger.open(tmp_path).close()
    os.close(say)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("part", [Ledger, BlockStore])
def test_paths_that_cannot_hold_a_store(tmp_path: Path, part) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        part.open(tmp_path / "file")
    with pytest.raises(StoreError, match="missing"):
        part.open(tmp_path / "no" / "where")
    with pytest.raises(StoreError, match="no store here"):
        part.open(tmp_path / "nowhere", readonly=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"there (is|are) no"):
        part.open(tmp_path / "empty", readonly=True)
    (tmp_path / "taken").mkdir()
    for name in ("ledger", "blocks"):
        (tmp_path / "taken" / name).write_text("not a folder")
    with pytest.raises(StoreError):
        part.open(tmp_path / "taken")


READ_ONLY = """
import sys
from ctxreuse.errors import StoreError
from ctxreuse.store import BlockStore, Ledger
from ctxreuse.testing.store import Context
for part in (Ledger, BlockStore):
    try:
        part.open(sys.argv[1])
    except StoreError as error:
        assert "readonly=True" in str(error), error
    else:
        raise AssertionError("opened for writing")
with Ledger.open(sys.argv[1], readonly=True) as ledger:
    assert ledger.turns(ledger.session("kept").head)[0].content == "text"
with BlockStore.open(sys.argv[1], readonly=True) as store:
    assert Context(3).intact(store)
    assert store.match(Context(3).keys).blocks == 3
print("fine")
"""


def fill(folder: Path) -> None:
    with Ledger.open(folder) as ledger, BlockStore.open(folder, capacity=1 << 20) as store:
        ledger.append(ledger.create("kept").id, [NewTurn("user", "text")])
        Context(3).fill(store)


def test_a_read_only_file_system(tmp_path: Path, spawn, mounts) -> None:
    fill(tmp_path)
    prefix = mounts(f"mount --bind '{tmp_path}' '{tmp_path}' && mount -o remount,ro,bind '{tmp_path}'")
    out, err = spawn(READ_ONLY, tmp_path, prefix=prefix).communicate(timeout=patient(60))
    assert out == "fine\n", err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(tmp_path: Path, spawn) -> None:
    fill(tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o055)
    out, err = spawn(
        READ_ONLY.replace("import sys\n", "import sys, os\n").replace(
            "from ctxreuse.testing.store import Context\n",
            "from ctxreuse.testing.store import Context\nos.setgid(65534); os.setuid(65534)\n",
        ),
        tmp_path,
    ).communicate(timeout=patient(60))
    assert out == "fine\n", err


WATCH = """
import sys
from ctxreuse.store import BlockStore, Ledger
from ctxreuse.testing.store import Context
store, ledger = BlockStore.open(sys.argv[1], readonly=True), Ledger.open(sys.argv[1], readonly=True)
for line in sys.stdin:
    context = Context(6, seed=int(line), floats=3000)
    match = store.match(context.keys)
    assert not store.put(context.keys[0], context.block(0))
    print(match.blocks, context.intact(store, range(match.blocks)), ledger.count(), flush=True)
store.close(); ledger.close()
"""


def test_reader_processes_see_each_commit(tmp_path: Path, spawn) -> None:
    with (
        BlockStore.open(tmp_path, capacity=8 << 20, map_size=1 << 20) as store,
        Ledger.open(tmp_path, map_size=1 << 20) as ledger,
    ):
        readers = [spawn(WATCH, tmp_path) for _ in range(3)]
        for seed in range(12):
            ledger.append(ledger.create().id, [NewTurn("user", "x" * 100_000)])
            Context(6, seed=seed, floats=3000).fill(store)
            for reader in readers:
                reader.stdin.write(f"{seed}\n")
                reader.stdin.flush()
            for reader in readers:
                assert reader.stdout.readline() == f"6 True {seed + 1}\n"
        for reader in readers:
            out, err = reader.communicate(timeout=patient(30))
            assert (out, err, reader.returncode) == ("", "", 0)
        store.check()
