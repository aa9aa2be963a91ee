"""The native walk through LMDB files: it finds what py-lmdb's verifier finds, and reads the rows that LMDB reads."""

from __future__ import annotations

from pathlib import Path
from random import Random

import lmdb
import numpy as np
import pytest
from lmdb.verify import VerifyError, verify

from ctxreuse.kernels.dispatch import native
from ctxreuse.store import Ledger, NewTurn
from ctxreuse.store.lmdb.records import ROW, Record, decode_tail
from ctxreuse.store.lmdb.recovery import scan, sound

ROUNDS = 400


def key(i: int) -> bytes:
    return Random(i).randbytes(32)


def record(i: int) -> Record:
    kinds = ("exact", "exact", None), ("kl-0.05@1", "exact", 0.1)
    return Record(key(i + 1), i, i + 7, 4096 * i, i % 3, i << 33, *kinds[i % 2])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of some depth, values inside and outside their pages, and pages that are free."""
    home = tmp_path_factory.mktemp("env")
    with lmdb.open(str(home), max_dbs=4, map_size=1 << 26) as env:
        meta, blocks, empty = (env.open_db(name) for name in (b"meta", b"blocks", b"empty"))
        for lot in range(4):
            with env.begin(write=True) as txn:
                for i in range(lot * 150, lot * 150 + 150):
                    txn.put(key(i), record(i).pack(), db=meta)
                    txn.put(key(i), bytes([i % 256]) * (100 if i % 3 else 9000), db=blocks)
        with env.begin(write=True) as txn:
            for i in range(0, 600, 7):
                txn.delete(key(i), db=meta)
                txn.delete(key(i), db=blocks)
        assert empty is not None
    return home


def findings(home: Path) -> list[str]:
    try:
        found = verify(str(home))
    except (VerifyError, OSError, ValueError, IndexError, OverflowError) as error:
        return [str(error) or "error"]
    # A page that is neither used nor free is lost room, which harms nothing.
    return [one for one in found if "leak" not in one]


def test_a_whole_file_is_sound_and_its_rows_are_read(home: Path) -> None:
    assert findings(home) == []
    wrong, rows, tails = scan(home, "meta")
    assert wrong == ""
    table = np.frombuffer(rows, ROW)
    kinds = [decode_tail(tail) for tail in tails]
    assert len(kinds) == 2
    read = {
        row["key"].tobytes(): Record(
            row["parent"].tobytes(),
            *(int(row[name]) for name in ("tokens", "depth", "nbytes", "state_nbytes", "used")),
            *kinds[row["kind"]],
        )
        for row in table
    }
    assert read == {key(i): record(i) for i in range(600) if i % 7}
    assert [row.tobytes() for row in table["key"]] == sorted(read)
    assert scan(home).rows == scan(home, "empty").rows == scan(home, "unknown").rows == b""


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_found_as_the_verifier_of_py_lmdb_finds_it(home: Path, tmp_path: Path, seed: int) -> None:
    whole, rng = (home / "data.mdb").read_bytes(), Random(seed)
    found = 0
    for _ in range(ROUNDS // 4):
        raw = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            page = rng.randrange(len(raw) // 4096)
            at = page * 4096 + (rng.randrange(24) if rng.random() < 0.5 else rng.randrange(4096))
            raw[at] ^= 1 << rng.randrange(8)
        (tmp_path / "data.mdb").write_bytes(raw)
        theirs, ours = findings(tmp_path), sound(tmp_path)
        assert bool(theirs) <= bool(ours), theirs
        found += bool(ours)
        if not ours:
            with lmdb.open(str(tmp_path), readonly=True, lock=False, max_dbs=4) as env, env.begin() as txn:
                assert sum(1 for _ in txn.cursor(db=env.open_db(b"blocks", txn=txn, create=False))) > 0
    assert found > ROUNDS // 40


@pytest.mark.parametrize("size", [0, 1, 16, 150, 4096, 4200, 8192, 12288])
def test_a_short_file_is_an_error(home: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "data.mdb").write_bytes((home / "data.mdb").read_bytes()[:size])
    assert sound(tmp_path)
    (tmp_path / "data.mdb").write_bytes(Random(size).randbytes(size))
    assert sound(tmp_path)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in sound(tmp_path)
    with pytest.raises(OSError):
        native.lmdb_scan(str(tmp_path / "none"), True, None)


def test_records_of_another_length_are_an_error(home: Path) -> None:
    assert scan(home, "blocks").wrong == "a record of another length"


def test_a_ledger_is_sound(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        session = ledger.create("a").id
        for i in range(40):
            ledger.append(session, [NewTurn("user", "x" * 500 * i)])
    assert sound(tmp_path / "ledger") == ""
