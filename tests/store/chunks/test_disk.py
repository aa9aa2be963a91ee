"""The chunk index on disk: over restarts, deaths and damage, beside its writer, and as part of a store."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse.store import BlockStore, open_store
from ctxreuse.store.chunks.index import ChunkIndex, ChunkLocation
from ctxreuse.testing.store import Context
from support.examples import examples
from support.waiting import patient

HOME = ChunkLocation((b"k" * 32, b"l" * 32), 3, 64, 640)


def chunk(n: int) -> bytes:
    return n.to_bytes(32, "little")


def filled(path: Path, n: int = 40) -> None:
    index = ChunkIndex.open(path)
    index.add_many([(chunk(i), HOME) for i in range(n)])
    index.close()


def known(index: ChunkIndex, n: int = 40) -> int:
    return sum(map(bool, index.locations_many([chunk(i) for i in range(n)])))


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path / "chunks")
    index = ChunkIndex.open(tmp_path / "chunks")
    assert index.locations(chunk(7)) == [HOME]
    assert len(index) == known(index) == 40
    index.check()
    index.close()
    index.close()
    assert len(index) == 0


def _raw() -> bytes:
    with TemporaryDirectory() as folder:
        filled(Path(folder) / "chunks")
        return (Path(folder) / "chunks" / "data.mdb").read_bytes()


RAW = _raw()


@examples("heavy")
@given(at=st.integers(0, len(RAW) - 1), flip=st.integers(1, 255), cut=st.sampled_from([0, 0, 1, 4096, len(RAW)]))
@example(at=0, flip=1, cut=len(RAW) - 100)
def test_what_was_changed_on_disk_begins_anew(at: int, flip: int, cut: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chunks"
        filled(path)
        data = (path / "data.mdb").read_bytes()
        at = min(at, len(data) - 1)
        (path / "data.mdb").write_bytes((data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])[: len(data) - cut])
        index = ChunkIndex.open(path)
        assert known(index) == len(index) == 0
        assert index.add(chunk(1), HOME) == 1
        index.check()
        index.close()
        index = ChunkIndex.open(path)
        assert index.locations(chunk(1)) == [HOME]
        index.close()


@pytest.mark.parametrize("content", [b"", b"no database at all", bytes(1 << 16), b"\xff" * 9000])
@pytest.mark.parametrize("crashed", [True, False])
def test_other_files_in_its_place_are_replaced(tmp_path: Path, content: bytes, crashed: bool) -> None:
    path = tmp_path / "chunks"
    path.mkdir()
    (path / "data.mdb").write_bytes(content)
    index = ChunkIndex.open(path, crashed=crashed)
    assert index.add(chunk(1), HOME) == 1
    index.check()
    index.close()
    assert ChunkIndex.open(path, readonly=True).locations(chunk(1)) == [HOME]


def test_an_environment_of_another_kind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "chunks"
    with lmdb.open(str(path), max_dbs=3) as env:
        table = env.open_db(b"homes")
        with env.begin(write=True) as txn:
            txn.put(chunk(1), b"something", db=table)
    index = ChunkIndex.open(path, crashed=True)
    assert len(index) == 0
    index.check()
    index.close()


def test_where_no_folder_can_be_it_is_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "chunks").write_text("a file")
    with caplog.at_level(logging.WARNING):
        index = ChunkIndex.open(tmp_path / "chunks")
    assert "kept in memory" in caplog.text
    assert index.add(chunk(1), HOME) == 1
    assert index.locations(chunk(1)) == [HOME]
    index.close()
    assert (tmp_path / "chunks").read_text() == "a file"


def test_hostile_entries_are_no_homes_and_go(tmp_path: Path) -> None:
    """An environment that is sound as such, in which everything else is wrong."""
    path = tmp_path / "chunks"
    filled(path, 10)
    with lmdb.open(str(path), max_dbs=3) as env:
        homes, order = env.open_db(b"homes"), env.open_db(b"order")
        with env.begin(write=True) as txn:
            txn.put(chunk(1), b"", db=homes)
            txn.put(chunk(2), b"\xff" * 8, db=homes)
            txn.put(chunk(3), b"\xff" * 500, db=homes)
            txn.put(b"a key of another length", b"\0" * 40, db=homes)
            txn.put(b"\0not a number", chunk(5), db=order)
            txn.put(b"\0" * 8, b"not a key", db=order)
            txn.put(b"\x01" + b"\xff" * 7, chunk(6), db=order)
    (path / "sum").unlink()
    index = ChunkIndex.open(path, most=10, crashed=True)
    assert known(index) == 7
    for n in range(100, 120):
        index.add(chunk(n), HOME)
        index.forget(chunk(1), HOME)
        assert len(index) <= 10
    assert all(index.locations_many([chunk(n) for n in range(112, 120)]))
    index.close()


@pytest.mark.parametrize("last", [b"\xff" * 8, b"no number"])
def test_an_order_without_sense_begins_anew(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "chunks"
    filled(path)
    with lmdb.open(str(path), max_dbs=3) as env, env.begin(write=True) as txn:
        txn.put(last, chunk(6), db=env.open_db(b"order", txn=txn))
    (path / "sum").unlink()
    index = ChunkIndex.open(path, crashed=True)
    assert len(index) == 0
    assert index.add(chunk(1), HOME) == 1
    index.check()
    index.close()


WRITER = """
import sys
from pathlib import Path
from ctxreuse.store.chunks.index import ChunkIndex, ChunkLocation
index = ChunkIndex.open(Path(sys.argv[1]), most=300, crashed=True)
index.check()
print(len(index), flush=True)
n = int(sys.argv[2])
while len(sys.argv) < 4 or sys.stdin.readline():
    keys = [i.to_bytes(32, "little") for i in range(n, n + 50)]
    index.add_many([(key, ChunkLocation((key,), 1, 60, 64)) for key in keys])
    index.forget(keys[0], ChunkLocation((keys[0],), 1, 60, 64))
    index.locations_many(keys)
    print(n, flush=True)
    n += 37
"""


def test_a_writer_that_is_killed_leaves_an_index(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    path, n = tmp_path / "chunks", 0
    for death in range(8):
        writer = spawn(WRITER, path, n)
        held = int(writer.stdout.readline())
        assert held == (0 if death == 0 else 300)
        for _ in range(20 + 7 * death):
            n = int(writer.stdout.readline())
        writer.kill()
        n = int((f"{n}\n" + writer.stdout.read()).rpartition("\n")[0].split()[-1])  # the last that it said whole
        index = ChunkIndex.open(path, most=300, crashed=True)
        index.check()
        key = (n + 1).to_bytes(32, "little")
        assert index.locations(key) == [ChunkLocation((key,), 1, 60, 64)]
        assert len(index) == 300
        # As another owner's death would leave it: no checksum.
        index.close()
        (path / "sum").unlink()
        n += 1000


def test_a_reader_beside_the_writer_follows_it(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    with BlockStore.open(tmp_path, capacity=1 << 20):
        pass
    writer = spawn(WRITER, tmp_path / "chunks", 0, "step by step")
    writer.stdout.readline()

    def step(times: int) -> int:
        n = 0
        for _ in range(times):
            writer.stdin.write("\n")
            writer.stdin.flush()
            n = int(writer.stdout.readline())
        return n

    n = step(30)
    index = ChunkIndex.open(tmp_path / "chunks", readonly=True)
    key = (n + 1).to_bytes(32, "little")
    assert index.add(b"x" * 32, HOME) == 0
    assert index.locations(b"x" * 32) == []
    seen = index.locations(key)
    assert len(seen) == 1
    index.forget(key, seen[0])
    assert index.locations(key) == []
    assert len(index) == 300
    later = (step(30) + 1).to_bytes(32, "little")
    assert len(index.locations(later)) == 1
    index.check()
    index.close()


FULL = """
import logging, resource, signal, sys
from pathlib import Path
from ctxreuse.store.chunks.index import ChunkIndex, ChunkLocation
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(stream=sys.stdout, format="%(levelname)s")
key = lambda n: n.to_bytes(32, "little")
add = lambda n: index.add(key(n), ChunkLocation((key(n),), 1, 60, 64))
index = ChunkIndex.open(Path(sys.argv[1]))
held = sum(add(n) for n in range(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
refused = [n for n in range(100, 400) if not add(n)]
found = sum(bool(index.locations(key(n))) for n in range(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = add(1000)
index.check()
index.close()
print(held, len(refused) > 200, found, again)
"""


def test_a_full_disk_costs_what_is_added_and_is_said_once(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    out, err = spawn(FULL, tmp_path / "chunks").communicate(timeout=patient(60))
    assert out.splitlines() == ["WARNING", "100 True 100 1"], err
    index = ChunkIndex.open(tmp_path / "chunks")
    assert len(index.locations((1000).to_bytes(32, "little"))) == 1
    index.check()
    index.close()


def test_a_store_keeps_its_index_unless_the_machine_went_down(tmp_path: Path) -> None:
    context = Context(3)
    home = ChunkLocation(tuple(context.keys[:2]), 1, 5, 0)

    def open_(boot: str) -> BlockStore:
        return BlockStore.open(tmp_path, capacity=1 << 20, boot=boot)

    with open_("one") as store:
        context.fill(store)
        store.chunks.add(chunk(1), home)
    with open_("two") as store:  # closed before the machine went down
        assert store.chunks.locations(chunk(1)) == [home]
    shutil.copytree(tmp_path, tmp_path / "died")
    with BlockStore.open(tmp_path / "died", capacity=1 << 20, boot="two") as store:
        assert store.chunks.locations(chunk(1)) == [home]
        store.chunks.add(chunk(2), home)
        for boot, kept in (("two", [home]), ("three", [])):
            place = tmp_path / boot
            shutil.copytree(tmp_path / "died", place)
            with BlockStore.open(place, capacity=1 << 20, boot=boot) as again:
                assert again.chunks.locations(chunk(2)) == kept
                assert again.match(context.keys).blocks == 3
                again.check()
                again.chunks.check()


def test_tiers_and_readers_share_one_index(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert store.disk is not None
        assert store.chunks is store.disk.chunks
        store.chunks.add(chunk(1), HOME)
    with open_store(tmp_path / "store", readonly=True) as store:
        assert store.chunks.locations(chunk(1)) == [HOME]
        assert store.chunks.add(chunk(2), HOME) == 0
    with open_store(None) as store:
        assert store.chunks.add(chunk(1), HOME) == 1
        assert store.chunks.locations(chunk(1)) == [HOME]
