"""`ctxreuse store`: what is there is shown, what is corrupt is found and can be dropped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import BlockWriter, Plane, layout_of
from ctxreuse.identity.keys import ROOT, as_tokens, prefix_keys
from ctxreuse.store import BlockStore, Ledger, NewTurn
from ctxreuse.store.chunks.index import ChunkLocation
from ctxreuse.testing.store_levels import CodedContext

PLANES = (Plane(0, "k", "float32", (2, 4, 8)), Plane(0, "v", "float32", (2, 4, 8)))
SPACE = b"s" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with a chain of three blocks of four tokens, two sessions of which one is a fork, and a lost turn."""
    place = tmp_path / "store"
    tokens = as_tokens(range(12))
    keys = prefix_keys(SPACE, bytes(16), tokens, 4)
    with BlockStore.open(place) as store:
        for i, (parent, key) in enumerate(zip([ROOT, *keys], keys, strict=False)):
            fields = {"kind": "block", "space": SPACE, "key": key, "parent": parent, "end": 4 * i + 4}
            writer = BlockWriter(layout_of(PLANES), tokens=tokens[4 * i : 4 * i + 4], **fields)
            for plane in PLANES:
                writer.plane(plane.layer, plane.role)[:] = np.frombuffer(b"block-%d." % i * 32, np.uint8)
            assert store.put(key, writer.seal())
        store.flush()
        store.chunks.add(b"c" * 32, ChunkLocation(tuple(keys[:2]), 1, 5, 0))
    with Ledger.open(place) as ledger:
        session = ledger.create("trunk")
        turns = ledger.append(session.id, [NewTurn("user", "one"), NewTurn("assistant", "two")])
        ledger.fork(session.id, "twig [bold]", at=turns[0].id)
        lost = ledger.create("lost")
        ledger.append(lost.id, [NewTurn("user", "gone")])
        ledger.delete(lost.id)
    return place


def corrupt(folder: Path, block: int) -> None:
    file = folder / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = data.find(b"block-%d." % block)
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)


def test_ls(run: Any, folder: Path) -> None:
    out = run("store", "ls", "--path", str(folder)).out
    assert [line.split("  ")[0].strip() for line in out.splitlines()[1:]] == ["twig [bold]", "trunk"]
    body = json.loads(run("store", "ls", "--json", "--path", str(folder)).out)
    assert [(row["session"]["name"], row["turns"]) for row in body["sessions"]] == [("twig [bold]", 1), ("trunk", 2)]
    assert body["total"] == 2
    assert "1 more" in run("store", "ls", "-n", "1", "--path", str(folder)).out


def test_stat(run: Any, folder: Path) -> None:
    body = json.loads(run("store", "stat", "--json", "--path", str(folder)).out)
    assert (body["blocks"]["blocks"], body["blocks"]["tokens"], body["blocks"]["chunks"]) == (3, 12, 1)
    assert (body["ledger"]["sessions"], body["ledger"]["turns"]) == (2, 3)
    text = run("store", "stat", "--path", str(folder)).out
    assert "12 tokens in 3 blocks" in text
    assert "1 are known by content" in text
    assert "2 sessions, 3 turns" in text


def test_verify_finds_and_gc_drops(run: Any, folder: Path) -> None:
    assert run("store", "verify", "--path", str(folder)).code == 0
    corrupt(folder, 1)
    done = run("store", "verify", "--path", str(folder))
    assert done.code == 1
    assert "is corrupt" in done.out
    assert json.loads(run("store", "stat", "--json", "--path", str(folder)).out)["blocks"]["blocks"] == 3
    body = json.loads(run("store", "verify", "--json", "--path", str(folder)).out)
    assert (body["clean"], len(body["bad"]), body["problems"]) == (False, 1, [])
    # The third block hangs below the corrupt one and goes with it.
    assert json.loads(run("store", "gc", "--json", "--path", str(folder)).out)["entries"] == 2
    assert run("store", "verify", "--path", str(folder)).code == 0
    assert json.loads(run("store", "stat", "--json", "--path", str(folder)).out)["blocks"]["blocks"] == 1


def test_verify_survives_a_file_that_is_no_cache(run: Any, folder: Path) -> None:
    (folder / "blocks" / "data.mdb").write_bytes(b"not LMDB" * 2000)
    done = run("store", "verify", "--path", str(folder))
    assert done.code == 1
    assert "No errors" not in done.out


def test_gc(run: Any, folder: Path) -> None:
    assert run("store", "gc", "--path", str(folder)).out.startswith("1 turns and 0 corrupt entries")
    assert run("store", "gc", "--path", str(folder)).out.startswith("0 turns and 0 corrupt entries")


def test_reading_while_another_owns_it(run: Any, folder: Path) -> None:
    code = """
import sys
from ctxreuse.store import BlockStore, Ledger
with BlockStore.open(sys.argv[1]), Ledger.open(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        assert run("store", "verify", "--path", str(folder)).code == 0
        assert run("store", "stat", "--path", str(folder)).code == 0
        assert "trunk" in run("store", "ls", "--path", str(folder)).out
        done = run("store", "gc", "--path", str(folder))
        assert done.code == 3
        assert "StoreOwnedError" in done.err
        assert str(owner.pid) in done.err
        owner.communicate("")
    assert owner.returncode == 0


def test_stat_tells_levels_apart(run: Any, tmp_path: Path) -> None:
    context = CodedContext(5)
    levels = ("exact", "exact+rans", "kl-0.01", "kl-0.01", "approx~kl-0.01")
    with BlockStore.open(tmp_path / "store") as store:
        for i, level in enumerate(levels):
            assert store.put(context.keys[i], context.at(i, level))
        store.put(context.keys[1], context.at(1, "kl-0.05", state=True), kind="state")
        store.flush()
    body = json.loads(run("store", "stat", "--json", "--path", str(tmp_path / "store")).out)
    kept = body["blocks"]["levels"]
    assert {level: found[:2] for level, found in kept.items()} == {
        "exact": [1, 64], "exact+rans": [1, 64], "kl-0.01": [2, 128], "approx": [1, 64], "kl-0.05": [0, 0],
    }  # fmt: skip
    assert sum(found[2] for found in kept.values()) == body["blocks"]["nbytes"]
    out = run("store", "stat", "--path", str(tmp_path / "store")).out
    assert "kl-0.01     128 tokens in 2 blocks" in out
