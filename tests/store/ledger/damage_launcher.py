"""Damage a ledger at random, and try in a process of its own what opens one: ``FOLDER COUNT SEED``.

Prints as JSON how often each attempt ended how: ``right``, ``error``, or with what must not be: a signal, another
exception, or other content without an error.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxreuse_agents import Memory
from typer.testing import CliRunner

from ctxreuse import doctor
from ctxreuse.cli.app import app
from ctxreuse.errors import CtxReuseError
from ctxreuse.store import Ledger, NewTurn, verify
from ctxreuse.store.ledger.rescue import rescue

SPACE = bytes(range(32))
PAGE = 4096


def build(folder: Path, rng: random.Random) -> None:
    """Some hundred kB: short and long texts, forks, tokens, and pages that were freed."""
    with Ledger.open(folder) as ledger:
        names: list[str] = []
        for i in range(30):
            if names and rng.random() < 0.3:
                names.append(ledger.fork(rng.choice(names), f"session {i}").name)
            else:
                names.append(ledger.create(f"session {i}").name)
            turns = []
            for _ in range(rng.randrange(1, 8)):
                text = "".join(rng.choices("abcdefghij \n", k=rng.choice((5, 200, 1000, 3000, 12000))))
                ids = b"".join(rng.randrange(50_000).to_bytes(4, "little") for _ in range(rng.choice((1, 40, 900))))
                turns.append(NewTurn("user", text, {"i": i}, ids, SPACE))
            ledger.append(names[-1], turns)
            if rng.random() < 0.15:
                ledger.delete(names.pop(rng.randrange(len(names))))
        ledger.gc()
        for name in names[::3]:
            ledger.append(name, [NewTurn("assistant", "again")])


def content(ledger: Ledger) -> dict[str, Any]:
    return {
        s.id: [s.name, s.head, s.origin, s.forked_at, [[t.id, t.role, t.content, t.meta] for t in ledger.turns(s.head)]]
        for s in ledger.sessions()
    }


def damage(file: Path, rng: random.Random) -> str:
    """Flip a bit, wreck the head of a page, zero a page, or cut the end."""
    size, kind = file.stat().st_size, rng.choice(("flip", "head", "zero", "cut"))
    with open(file, "r+b") as data:
        if kind == "cut":
            data.truncate(size - rng.randrange(1, size))
            return kind
        at = rng.randrange(size) if kind == "flip" else rng.randrange(size // PAGE) * PAGE
        data.seek(at)
        old = data.read(1)[0]
        data.seek(at)
        data.write({"flip": bytes([old ^ 1 << rng.randrange(8)]), "head": rng.randbytes(16), "zero": bytes(PAGE)}[kind])
    return kind


Known = dict[str, Any]


def try_open(folder: Path, known: Known) -> str:
    with Memory.open(folder) as memory:
        return "right" if content(memory.ledger) == known else "other content"


def try_verify(folder: Path, known: Known) -> str:
    return "right" if verify(folder).clean else "error"


def try_doctor(folder: Path, known: Known) -> str:
    return "error" if any(found.status == "broken" for found in doctor._health(folder)) else "right"


def try_ls(folder: Path, known: Known) -> str:
    done = CliRunner().invoke(app, ["store", "ls", "--path", str(folder), "--json", "-n", "1000"])
    if done.exception is not None:
        raise done.exception
    listed = {
        row["session"]["id"]: (row["session"]["name"], row["turns"]) for row in json.loads(done.stdout)["sessions"]
    }
    return "right" if listed == {id: (one[0], len(one[4])) for id, one in known.items()} else "other content"


def try_rescue(folder: Path, known: Known) -> str:
    """What is saved is right, and what is not is named."""
    found = rescue(folder, folder.with_name("rescued"))
    with Ledger.open(folder.with_name("rescued")) as ledger:
        ledger.check()
        texts = {text[2] for one in known.values() for text in one[4]}
        for session in ledger.sessions():
            for turn in ledger.turns(session.head):
                if turn.content not in texts and "lost" not in turn.meta:
                    return "other content"
        whole = content(ledger) == known
    return "right" if whole else "error" if found.lost else "lost without a word"


ATTEMPTS: dict[str, Callable[[Path, Known], str]] = {
    "open": try_open,
    "verify": try_verify,
    "doctor": try_doctor,
    "ls": try_ls,
    "rescue": try_rescue,
}


def attempt(name: str, folder: Path, known: Known) -> str:
    """Try it in a child; returns how it ended."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            ended = ATTEMPTS[name](folder, known)
        except CtxReuseError:
            ended = "error"
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"
        os.write(theirs, ended.encode()[:1000])
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        ended = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ended


def main(folder: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    build(folder / "whole", rng)
    with Ledger.open(folder / "whole", readonly=True) as ledger:
        known = content(ledger)
    ended: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in ATTEMPTS}
    odd: list[str] = []
    for n in range(count):
        shutil.copytree(folder / "whole", folder / "damaged")
        kind = damage(folder / "damaged" / "ledger" / "data.mdb", rng)
        for name in ATTEMPTS:
            shutil.copytree(folder / "damaged", folder / "copy")
            how = attempt(name, folder / "copy", known)
            ended[name][how] += 1
            if how not in ("right", "error"):
                odd.append(f"damage {n} of seed {seed} ({kind}), {name}: {how}")
            for used in ("copy", "rescued"):
                shutil.rmtree(folder / used, ignore_errors=True)
        shutil.rmtree(folder / "damaged")
    print(json.dumps({"ended": ended, "odd": odd}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
