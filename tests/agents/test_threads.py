"""Threads and processes: nothing is lost, nothing is torn, everything is there afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ctxreuse_agents import Memory

from support.waiting import patient


def together(*jobs: Callable[[], None]) -> None:
    """Run all at once; the first error of any is raised here."""
    start, errors = threading.Barrier(len(jobs)), []

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_threads_on_one_session_lose_no_turn(memory: Memory) -> None:
    memory.create("shared")

    def write(k: int) -> None:
        session = memory.session("shared", create=False)  # a handle of its own
        for i in range(25):
            session.user(f"{k}:{i}")

    together(*(lambda k=k: write(k) for k in range(8)))
    got = [turn.content for turn in memory.session("shared").turns()]
    assert sorted(got) == sorted(f"{k}:{i}" for k in range(8) for i in range(25))
    for k in range(8):
        assert [text for text in got if text.startswith(f"{k}:")] == [f"{k}:{i}" for i in range(25)]


def test_eight_threads_on_forks_while_others_read(memory: Memory) -> None:
    trunk = memory.create("trunk")
    trunk.user("root")

    def branch(k: int) -> None:
        fork = trunk.fork(f"fork{k}")
        for i in range(15):
            fork.user(f"{k}:{i}")
            if i % 5 == 4:
                fork.rollback()

    def read() -> None:
        for _ in range(50):
            for session in memory.sessions():
                turns = session.turns()
                assert turns[0].content == "root"
            memory.search("root")

    together(*(lambda k=k: branch(k) for k in range(8)), read)
    for k in range(8):
        expected = [f"{k}:{i}" for i in range(15) if i % 5 != 4]
        assert [turn.content for turn in memory.session(f"fork{k}").turns()] == ["root", *expected]
    assert [turn.content for turn in trunk.turns()] == ["root"]


def test_forks_commit_onto_one_origin_from_many_threads(memory: Memory) -> None:
    trunk = memory.create("trunk")
    trunk.user("root")

    def work(k: int) -> None:
        fork = trunk.fork()
        fork.extend([])
        fork.user(f"{k}a")
        fork.user(f"{k}b")
        fork.commit(onto=True)

    together(*(lambda k=k: work(k) for k in range(8)))
    got = [turn.content for turn in trunk.turns()]
    assert got[0] == "root"
    assert sorted(got[1::2]) == [f"{k}a" for k in range(8)]
    assert [text[0] + "b" for text in got[1::2]] == got[2::2]


def test_one_name_is_made_once(memory: Memory) -> None:
    together(*(lambda: memory.session("the one").user("x") for _ in range(8)))
    assert len(memory.sessions()) == 1
    assert len(memory.session("the one").turns()) == 8


WRITE = """
import os, sys
from ctxreuse_agents import Memory
memory = Memory.open(sys.argv[1])
session = memory.session("story")
for i in range(5):
    session.user(f"line {i}", number=i)
session.fork("branch").user("other end")
os._exit(0)  # no close: what was acknowledged must be there all the same
"""


def test_the_next_process_finds_everything(tmp_path: Path, child_env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", WRITE, str(tmp_path / "m")], env=child_env, check=True, timeout=patient(60))
    with Memory.open(tmp_path / "m") as memory:
        memory.check()
        session = memory.session("story", create=False)
        assert [(turn.content, turn.meta) for turn in session.turns()] == [
            (f"line {i}", {"number": i}) for i in range(5)
        ]
        branch = memory.session("branch", create=False)
        assert branch.turns()[-1].content == "other end"
        assert branch.turns()[:-1] == session.turns()
