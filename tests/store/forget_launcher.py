"""Run by test_forget_kills: children that make and delete sessions until they are killed, and what is left of them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.runtime.compaction import finish_deletions
from ctxreuse.runtime.erase import Erasure, erase_stored
from ctxreuse.store import BlockStore, Ledger, NewTurn, TieredStore
from ctxreuse.testing.store_context import Context
from ctxreuse.usage import Usage
from ctxreuse.why import FILE, RequestInfo, RequestLog
from support.raw_files import found_in_files

CAPACITY, SIZE = 16 << 20, 16
SPACE = ModelSpace("w", "tiny", "t", "float32", (LayerSpec("full", 1, 4, 4),), "{}", 1000, 4096, SIZE)


def words(seed: int) -> list[str]:
    return [f"text {seed} of a person, turn {n}, which nobody else may read" for n in range(4)]


def context(seed: int) -> Context:
    return Context(3, seed=seed, size=SIZE, space=SPACE.digest)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Ledger, TieredStore, RequestLog]]:
    """Open all as a daemon does: deletions that were begun are completed."""
    with Ledger.open(folder) as ledger, BlockStore.open(folder, capacity=CAPACITY) as disk:
        store, requests = TieredStore(1 << 20, disk), RequestLog(folder / FILE).open()
        finish_deletions(ledger, lambda plan: erase_stored(plan, store, requests))
        yield ledger, store, requests
        requests.close()


def make(ledger: Ledger, store: TieredStore, requests: RequestLog, seed: int) -> None:
    """Store a session with all that is kept of one."""
    made = context(seed)
    ids = made.tokens.tobytes()
    turns = [NewTurn("user", text, {}, ids, SPACE.digest) for text in words(seed)]
    ledger.create(f"session {seed}", turns=turns)
    for i in range(len(made)):
        store.put(made.keys[i], made.block(i))
    about = RequestInfo(request=f"request-{seed}", session=f"session {seed}")
    asked: Any = SimpleNamespace(ids=made.tokens, keys=made.keys, max_kl=None, about=about)
    noted = requests.note(asked, Usage(), [], space=SPACE, salt=b"salt", removal=lambda _: None)
    requests.kept(noted, made.tokens, made.keys)


def delete(ledger: Ledger, store: TieredStore, requests: RequestLog, seed: int) -> None:
    """Delete it as the daemon does: written down first, then carried out."""
    plan = Erasure(context(seed).keys[0], (f"request-{seed}",))
    ledger.delete(f"session {seed}", note=msgspec.msgpack.encode(plan))
    finish_deletions(ledger, lambda plan: erase_stored(plan, store, requests))


def work(folder: Path, say: int, seed: int) -> None:
    """Make, delete and compact until killed."""

    def tell(*what: object) -> None:
        os.write(say, json.dumps(what).encode() + b"\n")

    random_ = random.Random(seed)
    with opened(folder) as (ledger, store, requests):
        disk = store.disk
        assert disk is not None
        tell("ready")
        while True:
            mine = [int(one.name.split()[1]) for one in ledger.sessions()]
            choice = random_.random()
            if len(mine) < 3 or choice < 0.4:
                seed += 1
                tell("making", seed)
                make(ledger, store, requests, seed)
                tell("made", seed)
            elif choice < 0.85:
                chosen = random_.choice(mine)
                tell("deleting", chosen)
                delete(ledger, store, requests, chosen)
                tell("deleted", chosen)
            else:
                disk.compact()
                ledger.compact()


def inspect(folder: Path, said: list[list[Any]], before: set[int]) -> set[int]:
    """Compare what the next start finds with what was acknowledged; returns the deleted sessions.

    ``before``: those that were known to be gone.
    """
    of = {kind: {what[1] for what in said if what[0] == kind} for kind in ("making", "made", "deleting", "deleted")}
    with opened(folder) as (ledger, store, _):
        there = {int(one.name.split()[1]): one for one in ledger.sessions()}
        for seed, session in there.items():
            assert [turn.content for turn in ledger.turns(session.head)] == words(seed), "a session that is half there"
        assert not of["deleted"] & there.keys(), "a deletion that was acknowledged is lost"
        assert of["made"] - of["deleting"] <= there.keys(), "a session that nobody deleted is lost"
        gone = of["making"] - there.keys()
        assert ledger.deletions() == {}
        disk = store.disk
        assert disk is not None
        disk.compact()
        ledger.compact()
        ledger.check()
        store.check()
    began = gone & (of["deleting"] | of["deleted"])
    assert before <= began
    search(folder, began - before)
    return began


def search(folder: Path, seeds: set[int]) -> None:
    """Look for what was deleted in all files, a run of ids of each block."""
    texts = [text for seed in seeds for text in words(seed)]
    ids = [context(seed).run(i)[:8].tolist() for seed in seeds for i in range(3)]
    assert (found := found_in_files(folder, texts, ids)) == [], found


def main() -> None:
    folder, rounds, random_ = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    said: list[list[Any]] = []
    gone: set[int] = set()
    for number in range(rounds):
        hear, say = os.pipe()
        child = os.fork()
        if not child:
            os.close(hear)
            try:
                work(folder, say, 100 * (number + 1))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        os.close(say)
        with os.fdopen(hear, "rb") as lines:
            said.append(json.loads(lines.readline()))
            time.sleep(random_.random() * 0.15)
            os.kill(child, signal.SIGKILL)
            rest = lines.read().splitlines(keepends=True)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
        said += [json.loads(line) for line in rest if line.endswith(b"\n")]
        gone = inspect(folder, said, gone)
    search(folder, gone)
    print(json.dumps({"gone": len(gone)}))


if __name__ == "__main__":
    main()
