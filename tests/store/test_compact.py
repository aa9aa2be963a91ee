"""Compaction: what was deleted is in no file, all else is as before, for those who read meanwhile too."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ctxreuse.errors import SessionError, StoreReadOnlyError
from ctxreuse.store import BlockStore, Ledger, NewTurn, verify
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store_context import Context
from support.raw_files import found_in_files
from support.waiting import patient, until

SECRET, OTHER = "the key lies under the ninth stone", "swallows nest in May"
SPACE = b"s" * 32


def filled(ledger: Ledger, count: int = 40) -> None:
    for n in range(count):
        text = SECRET if n % 2 else OTHER
        ids = b"".join((1000 * n + i).to_bytes(4, "little") for i in range(32))
        ledger.create(f"{text} {n}", turns=[NewTurn("user", f"{text} {n} {i}", {}, ids, SPACE) for i in range(5)])


def test_deleted_texts_are_in_no_page(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        filled(ledger)
        before = {one.name: ledger.turns(one.head) for one in ledger.sessions() if OTHER in one.name}
        for session in ledger.sessions():
            if SECRET in session.name:
                ledger.delete(session.id)
        ledger.gc()
        ledger.create("more")
        assert found_in_files(tmp_path, [SECRET]), "LMDB keeps what it frees: compaction has something to do"
        ledger.compact()
        assert found_in_files(tmp_path, [SECRET], [[1000 * n + i for i in range(32)] for n in range(1, 40, 2)]) == []
        assert {one.name: ledger.turns(one.head) for one in ledger.sessions() if one.head} == before
        ledger.check()
        ledger.append(f"{OTHER} 0", [NewTurn("user", "goes on")])
    with Ledger.open(tmp_path) as ledger:
        assert ledger.turns(ledger.session(f"{OTHER} 0").head)[-1].content == "goes on"
    assert verify(tmp_path).clean


def test_what_a_fork_shares_stays(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.create("one", turns=[NewTurn("user", OTHER), NewTurn("user", SECRET)])
        ledger.fork("one", "two", at=1)
        ledger.delete("one")
        assert ledger.compact() == 1
        assert [turn.content for turn in ledger.turns(ledger.session("two").head)] == [OTHER]
        assert found_in_files(tmp_path, [SECRET]) == []


def test_the_time_of_the_first_deletion_is_known_until_compaction(tmp_path: Path) -> None:
    clock = FakeClock(1000.0)
    with Ledger.open(tmp_path, clock=clock) as ledger:
        filled(ledger, 4)
        assert ledger.deleted_since() is None
        ledger.delete(f"{SECRET} 1", note=b"what is left to do")
        clock.advance(50)
        ledger.delete(f"{SECRET} 3")
        ledger.note_deletion(b"and more")
    with Ledger.open(tmp_path, clock=clock) as ledger:
        assert ledger.deleted_since() == 1000.0
        assert ledger.deletions() == {1: b"what is left to do", 2: b"and more"}
        ledger.deletion_done(1)
        ledger.compact()
        assert (ledger.deleted_since(), ledger.deletions()) == (None, {2: b"and more"})
        with pytest.raises(SessionError):
            ledger.delete("nobody")
        assert ledger.deleted_since() is None


def test_deletions_during_compaction_stand_for_the_next_time(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        filled(ledger, 8)
        ledger.delete(f"{SECRET} 1")
        begun = threading.Event()
        other = threading.Thread(target=lambda: begun.wait(60) and ledger.delete(f"{SECRET} 3"))
        other.start()
        ledger.compact(lambda done, total: begun.set())
        other.join()
        assert ledger.deleted_since() is not None
        ledger.compact()
        assert ledger.deleted_since() is None
        assert ledger.count() == 6


_BESIDE = """
import sys
from ctxreuse.store import BlockStore, Ledger
with Ledger.open(sys.argv[1], readonly=True) as ledger, BlockStore.open(sys.argv[1], readonly=True) as store:
    for line in sys.stdin:
        keys = [bytes.fromhex(key) for key in line.split()]
        print(ledger.count(), store.match(keys).blocks, flush=True)
"""


def test_a_process_that_reads_beside_goes_on_with_the_new_files(tmp_path: Path) -> None:
    kept, gone = Context(6, seed=1), Context(6, seed=2)
    with Ledger.open(tmp_path) as ledger, BlockStore.open(tmp_path, capacity=64 << 20) as store:
        filled(ledger, 4)
        for context in (kept, gone):
            context.fill(store)
        words = [sys.executable, "-c", _BESIDE, str(tmp_path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as beside:

            def seen(context: Context) -> list[int]:
                assert beside.stdin is not None
                assert beside.stdout is not None
                beside.stdin.write(" ".join(key.hex() for key in context.keys) + "\n")
                beside.stdin.flush()
                return [int(word) for word in beside.stdout.readline().split()]

            assert seen(gone) == [4, 6]
            ledger.delete(f"{SECRET} 1")
            store.drop(gone.keys[2], "forgotten")
            ledger.compact()
            store.compact()
            assert seen(gone) == [3, 2]
            ledger.create("after")
            gone.fill(store)
            assert seen(gone) == [4, 6]
            assert seen(kept) == [4, 6]
            beside.communicate(timeout=patient(60))


def test_puts_while_the_cache_is_rewritten_are_stored(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        first, second = Context(6, seed=1), Context(6, seed=2)
        first.fill(store)
        puts: list[bool] = []

        def put(done: int, total: int) -> None:
            if not puts:
                puts.extend(store.put(second.keys[i], second.block(i)) for i in range(6))
                until(lambda: store._writer is not None and len(store._writer._queue) < 6)

        store.compact(put)
        store.flush()
        assert puts == [True] * 6
        assert first.intact(store)
        assert second.intact(store)
        assert not any(store.stats().errors.values())
        store.check()


def test_who_only_reads_cannot_compact(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger, BlockStore.open(tmp_path):
        filled(ledger, 2)
    with Ledger.open(tmp_path, readonly=True) as ledger, pytest.raises(StoreReadOnlyError):
        ledger.compact()
    with BlockStore.open(tmp_path, readonly=True) as store, pytest.raises(StoreReadOnlyError):
        store.compact()


def test_what_a_killed_compaction_left_is_removed(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        filled(ledger, 4)
    half = tmp_path / "ledger" / "fresh"
    half.mkdir()
    (half / "data.mdb").write_bytes(SECRET.encode())
    with Ledger.open(tmp_path) as ledger:
        assert not half.exists()
        assert ledger.count() == 4


def test_blocks_stay_as_they_are_and_dropped_ones_are_in_no_page(tmp_path: Path) -> None:
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        kept, gone = Context(6, seed=1, size=16), Context(6, seed=2, size=16)
        for context in (kept, gone):
            assert context.fill(store) == 6
        store.drop(gone.keys[0], "forgotten")
        store.compact()
        ids = [gone.run(n).tolist() for n in range(6)]
        assert found_in_files(tmp_path, [], ids) == []
        assert store.verify() == []
        store.check()
        assert kept.intact(store)
        gone.fill(store)
        store.check()
        assert found_in_files(tmp_path, [], ids), "the search finds what is stored"


_COMPACTS = """
import sys
import time
from pathlib import Path
from ctxreuse import _native
from ctxreuse.store import BlockStore
from ctxreuse.testing.store_context import Context

def anonymous():
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon"))

with BlockStore.open(sys.argv[1], capacity=64 << 20) as store:
    contexts = [Context(20, seed=n, size=64) for n in range(100)]
    for one in contexts:
        one.fill(store)
    store.compact()
    _native.trim_memory()
    before = anonymous()
    for one in contexts[:3]:
        store.drop(one.keys[0], "forgotten")
        store.compact()
    until = time.monotonic() + 10  # what another thread takes for a moment is no growth
    while (grown := anonymous() - before) >= 1 << 20 and time.monotonic() < until:
        time.sleep(0.05)
    print(grown)
"""


def test_memory_of_a_compaction_is_given_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _COMPACTS, tmp_path], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 1 << 20


_BOTH = """
import sys
from pathlib import Path
from ctxreuse import _native
from ctxreuse.store import BlockStore, Ledger, NewTurn

def anonymous():
    _native.trim_memory()
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon"))

place = Path(sys.argv[1])
with Ledger.open(place / "ledger") as ledger, BlockStore.open(place / "blocks", capacity=8 << 20) as store:
    for n in range(300):
        ledger.create(f"one {n}", turns=[NewTurn("user", "word " * 60)])
    before = anonymous()
    for round in range(3):
        ledger.compact()
        store.compact()
        for n in range(50):
            ledger.create(f"two {round} {n}", turns=[NewTurn("user", "word " * 60)])
    print(anonymous() - before)
"""


def test_files_that_were_rewritten_take_no_more_memory_than_before(tmp_path: Path) -> None:
    """The lists of each environment that was opened anew were 2 MB of zeros on the heap."""
    done = subprocess.run([sys.executable, "-c", _BOTH, tmp_path], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 2 << 20
