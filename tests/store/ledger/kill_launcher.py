"""Kill a process with SIGKILL before each write of one change, and once after the last: ``FOLDER CHANGE``.

Prints what a reader finds after each kill, as JSON: the sessions with their texts, and whether the change was finished.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from ctxreuse_agents import Memory

from ctxreuse.store.lmdb.env import Env

SPACES = ["00" * 32, "11" * 32]
TURN = {"role": "user", "created": 1.0, "tokens": dict.fromkeys(SPACES, "AQAAAA==")}
FILE = {
    "format": "ctxreuse.session",
    "version": 1,
    "name": "copy",
    "turns": [TURN | {"content": text} for text in ("a", "b")],
}


def fork_that_was_left_behind(memory: Memory) -> None:
    base = memory.create("base")
    base.user("start")
    fork = base.fork("fork")
    base.user("moved on")
    fork.user("mine")
    fork.user("mine too")


CHANGES = {
    "commit": lambda memory: memory.session("fork", create=False).commit(onto=True),
    "import": lambda memory: memory.import_json(FILE),
}


class Counting:
    """A transaction that ends the process before its ``at``-th write."""

    left = 0

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "delete"):
            Counting.left -= 1
            if Counting.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._txn, name)


def found(folder: Path) -> dict[str, Any]:
    with Memory.open(folder) as memory:
        memory.check()
        texts = {session.name: [turn.content for turn in session.turns()] for session in memory.sessions()}
        kept = {turn.id: len(memory.ledger.spaces(turn.id)) for one in memory.sessions() for turn in one.turns()}
        stats = memory.ledger.stats()
        return {"texts": texts, "spaces": sorted(kept.values()), "turns": stats.turns}


def main(folder: Path, change: str) -> None:
    with Memory.open(folder / "before") as memory:
        fork_that_was_left_behind(memory)
    write, seen = Env.write, []
    for n in itertools.count():
        copy = folder / f"kill-{n}"
        shutil.copytree(folder / "before", copy)
        child = os.fork()
        if not child:
            with Memory.open(copy) as memory:
                Counting.left = n
                Env.write = lambda env, work: write(env, lambda txn: work(Counting(txn)))  # type: ignore[method-assign]
                CHANGES[change](memory)
                os.kill(os.getpid(), signal.SIGTERM)  # all was written
        _, status = os.waitpid(child, 0)
        after = found(copy)
        if os.WTERMSIG(status) == signal.SIGTERM:
            print(json.dumps({"killed": seen, "done": after, "before": found(folder / "before")}))
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        with Memory.open(copy) as memory:
            CHANGES[change](memory)
        seen.append({"after": after, "retried": found(copy)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
