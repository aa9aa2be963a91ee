"""Changes of several records are made whole or not at all, wherever the process ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ctxreuse_agents import Memory

from ctxreuse.errors import SessionError
from support.waiting import patient


@pytest.mark.parametrize(("change", "writes"), [("commit", 5), ("import", 10)])
def test_a_kill_at_each_write_leaves_all_or_nothing(tmp_path: Path, change: str, writes: int) -> None:
    launcher = Path(__file__).with_name("kill_launcher.py")
    words = [sys.executable, str(launcher), str(tmp_path), change]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["killed"]) >= writes
    for one in seen["killed"]:
        assert one == {"after": seen["before"], "retried": seen["done"]}
    assert seen["done"] != seen["before"]


def test_what_a_commit_and_an_import_leave(tmp_path: Path) -> None:
    with Memory.open(tmp_path) as memory:
        base = memory.create("base")
        base.user("start")
        fork = base.fork("fork")
        base.user("moved on")
        fork.user("mine")
        with pytest.raises(SessionError, match="has new turns since"):
            fork.commit()
        assert fork.commit(onto=True).id == base.id
        assert [turn.content for turn in base.turns()] == ["start", "moved on", "mine"]
        assert fork.head == base.head
        with pytest.raises(SessionError, match="no origin"):
            base.commit()
        memory.check()


@pytest.mark.parametrize("onto", [False, True])
def test_a_fork_whose_fork_point_was_collected_commits(tmp_path: Path, onto: bool) -> None:
    with Memory.open(tmp_path) as memory:
        base = memory.create("base")
        base.user("kept")
        base.user("removed")
        fork = base.fork("fork")
        for session in (base, fork):
            session.rollback(-1)
        assert memory.gc() == 1
        if onto:
            base.user("moved on")
        fork.user("mine")
        fork.commit(onto=onto)
        assert [turn.content for turn in base.turns()] == ["kept", *(["moved on"] if onto else []), "mine"]
        memory.check()


def test_a_fork_keeps_what_its_origin_went_back_behind(tmp_path: Path) -> None:
    """Going back behind the fork point is a move of the origin, also where the fork point itself was collected."""
    with Memory.open(tmp_path) as memory:
        base = memory.create("base")
        for text in ("one", "two", "three"):
            base.user(text)
        fork = base.fork("fork")
        fork.rollback(-1)
        base.rollback(-2)
        memory.gc()
        fork.user("mine")
        with pytest.raises(SessionError, match="has new turns since"):
            fork.commit()
        # A ledger that an earlier version collected still names the turn that went.
        ledger = memory.ledger
        record = ledger.session("fork")
        ledger._write(lambda txn, _: ledger._sessions(txn).change(record, forked_at=99))
        fork.commit(onto=True)
        assert [turn.content for turn in base.turns()] == ["one", "two", "mine"]
