"""A store whose disk fails: at a write, at a commit, or by the death of its process before or after one.

Each schedule runs in a forked child on a folder in memory: random changes of a ledger and a cache of blocks, where a
layer under LMDB fails calls that the seed names. The child tells of each change after it returned; what it says,
replayed on plain dicts, is what must be there.

Whatever happened: what was acknowledged is there, what was refused has left nothing, a change under way when the
process died is there as a whole or not at all; `check` holds; no block has other bytes than its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lmdb

from ctxreuse.errors import CtxReuseError, SessionError, StoreFullError
from ctxreuse.store import BlockStore, Ledger, NewTurn
from ctxreuse.store.lmdb import env as env_module
from ctxreuse.testing.store import Context

__all__ = ["run"]

_NAMES = ("a", "b", "c", "d")
_SPACE = bytes(range(32))
_CAPACITY = 40 * 4096
Model = dict[str, tuple[str, ...]]


class _DiskError(lmdb.Error):
    """What LMDB raises for a system's error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"mdb_txn_commit: {os.strerror(code)}")
        self.code = code


class Faults:
    """Which call fails, and how: counted over all transactions that write."""

    def __init__(self, chance: Random) -> None:
        self.kind = chance.choice(("put", "commit", "panic", "full", "die before", "die after", "none"))
        self.at = chance.choice((0, 1, 2, 3, 5, 8, 13, 21, 34)) + chance.randrange(3)
        if self.kind in ("put", "full"):
            self.at = chance.randrange(120)
        self.times = chance.choice((1, 1, 2, 6))
        self.code = chance.choice((28, 5))  # ENOSPC, EIO
        self.puts = self.commits = 0
        self.armed = False
        self.struck = 0

    def _now(self, count: int) -> bool:
        return self.armed and self.at <= count < self.at + self.times

    def put(self) -> None:
        """Before a write into a transaction."""
        self.puts += self.armed
        if self.kind in ("put", "full") and self._now(self.puts):
            self.struck += 1
            raise _DiskError(self.code) if self.kind == "put" else lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    def commit(self, real: Callable[[], None], abort: Callable[[], None]) -> None:
        """In place of a commit."""
        self.commits += self.armed
        if self.kind in ("commit", "panic") and self._now(self.commits):
            self.struck += 1
            abort()
            raise _DiskError(self.code) if self.kind == "commit" else lmdb.PanicError("mdb_txn_begin: MDB_PANIC")
        if self.kind == "die before" and self._now(self.commits):
            os.kill(os.getpid(), signal.SIGKILL)
        real()
        if self.kind == "die after" and self._now(self.commits):
            os.kill(os.getpid(), signal.SIGKILL)


class _Txn:
    """A transaction that writes, over a real one."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def put(self, *args: Any, **more: Any) -> Any:
        self._faults.put()
        return self._real.put(*args, **more)

    def delete(self, *args: Any, **more: Any) -> Any:
        self._faults.put()
        return self._real.delete(*args, **more)

    def __enter__(self) -> _Txn:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self._faults.commit(self._real.commit, self._real.abort)
        else:
            self._real.abort()


class _Environment:
    """An LMDB environment whose transactions fail as `Faults` says."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self, *args: Any, write: bool = False, **more: Any) -> Any:
        real = self._real.begin(*args, write=write, **more)
        return _Txn(real, self._faults) if write else real


def _faulty(faults: Faults) -> None:
    """Put the layer under the stores of this process, which is a child of its own."""
    real = lmdb.open

    class _Lmdb:
        def __getattr__(self, name: str) -> Any:
            return getattr(lmdb, name)

        def open(self, *args: Any, **more: Any) -> Any:
            return _Environment(real(*args, **more), faults)

    env_module.lmdb = _Lmdb()  # type: ignore[assignment]


# ---- changes, the same on a ledger and on dicts

Change = tuple[str, str, str, tuple[str, ...]]


def _next(chance: Random) -> Change:
    kind = chance.choice(("create", "append", "append", "append", "fork", "rename", "delete", "back", "gc"))
    contents = tuple(f"{chance.random()}" * chance.choice((1, 1, 200)) for _ in range(chance.randrange(4)))
    return kind, chance.choice(_NAMES), chance.choice(_NAMES), contents


def _apply(model: Model, change: Change) -> None:
    """The change on dicts; SessionError where a ledger raises one."""
    kind, name, other, contents = change
    if kind == "gc":
        return
    if kind == "create":
        if name in model:
            raise SessionError("taken")
        model[name] = contents
        return
    if name not in model:
        raise SessionError("unknown")
    match kind:
        case "append":
            model[name] += contents
        case "fork":
            if other in model:
                raise SessionError("taken")
            model[other] = model[name]
        case "rename":
            if other in model and other != name:
                raise SessionError("taken")
            model[other] = model.pop(name)
        case "delete":
            del model[name]
        case "back":
            model[name] = model[name][: max(0, len(model[name]) - len(contents))]


def _do(ledger: Ledger, change: Change) -> None:
    kind, name, other, contents = change
    new = [NewTurn("user", content, {}, b"\1\0\0\0", _SPACE) for content in contents]
    match kind:
        case "create":
            ledger.create(name, turns=new)
        case "append":
            ledger.append(name, new)
        case "fork":
            ledger.fork(name, other)
        case "rename":
            ledger.rename(name, other)
        case "delete":
            ledger.delete(name)
        case "back":
            turns = list(ledger.turns(ledger.session(name).head))
            keep = max(0, len(turns) - len(contents))
            ledger.set_head(name, turns[keep - 1].id if keep else 0)
        case "gc":
            ledger.gc()


def _held(ledger: Ledger) -> Model:
    return {s.name: tuple(t.content for t in ledger.turns(s.head)) for s in ledger.sessions(limit=100)}


def _blocks_sound(blocks: BlockStore) -> None:
    blocks.check()
    assert blocks.verify() == [], "a block is damaged"
    with blocks.read() as reader:
        for seed in range(3):
            context = Context(6, seed=seed, floats=300)
            for i in range(len(context)):
                if (found := context.get(reader, i)) is not None:
                    assert bytes(found.buffer) == context.block(i).tobytes(), "a block has other bytes"


def _child(folder: Path, seed: int, say: int) -> None:
    chance = Random(seed)
    faults = Faults(chance)
    _faulty(faults)
    ledger = Ledger.open(folder, map_size=1 << 20)
    blocks = BlockStore.open(folder, capacity=_CAPACITY, map_size=1 << 20) if chance.random() < 0.3 else None
    faults.armed = True
    model: Model = {}
    for n in range(chance.choice((10, 25, 40))):
        if blocks is not None and chance.random() < 0.5:
            context = Context(6, seed=chance.randrange(3), floats=300)
            context.fill(blocks)
            if chance.random() < 0.2:
                blocks.drop(context.keys[chance.randrange(6)], "test")
        change = _next(chance)
        expected: Model = dict(model)
        refused = False
        try:
            _apply(expected, change)
        except SessionError:
            refused = True
        struck = faults.struck
        try:
            _do(ledger, change)
        except SessionError:
            assert refused, f"change {n}, {change[:3]}: refused"
            os.write(say, b"-")
        except CtxReuseError as error:
            if faults.struck == struck or not (isinstance(error, StoreFullError) or faults.kind in ("panic", "full")):
                raise
            os.write(say, b"-")
        else:
            assert not refused, f"change {n}, {change[:3]}: not refused"
            model = expected
            os.write(say, b"+")
        assert _held(ledger) == model, f"after change {n}, {change[:3]} ({faults.kind})"
    faults.armed = False
    ledger.check()
    ledger.create("at the end")
    if blocks is not None:
        _blocks_sound(blocks)
        blocks.close()
    ledger.delete("at the end")
    ledger.close()


def _expected(seed: int, said: bytes) -> list[Model]:
    """What must be there after so many answers: the model, and the one with the change that was under way."""
    chance = Random(seed)
    Faults(chance)
    with_blocks = chance.random() < 0.3
    model: Model = {}
    answers = iter(said)
    for _ in range(chance.choice((10, 25, 40))):
        if with_blocks and chance.random() < 0.5:
            chance.randrange(3)
            if chance.random() < 0.2:
                chance.randrange(6)
        change = _next(chance)
        after = dict(model)
        try:
            _apply(after, change)
        except SessionError:
            after = model
        answer = next(answers, None)
        if answer is None:
            return [model, after]
        if answer == ord("+"):
            model = after
    return [model]


def run(seed: int) -> str:
    """Run a schedule and return the kind of its fault; raises AssertionError."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=shm if shm.is_dir() else None))
    hear, say = os.pipe()
    told, tell = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            try:
                _child(folder, seed, say)
                os._exit(0)
            except BaseException as error:
                import traceback

                os.write(tell, f"{error!r}\n{traceback.format_exc()}"[-4000:].encode())
                os._exit(1)
        os.close(say)
        os.close(tell)
        said = b"".join(iter(lambda: os.read(hear, 4096), b""))
        status = os.waitpid(pid, 0)[1]
        kind = Faults(Random(seed)).kind
        problem = os.read(told, 4000).decode(errors="replace")
        assert not problem, problem
        died = os.WIFSIGNALED(status)
        assert died <= kind.startswith("die"), f"ended by signal {os.WTERMSIG(status)}"
        ledger = Ledger.open(folder, map_size=1 << 20)
        try:
            ledger.check()
            held, expected = _held(ledger), _expected(seed, said)
            assert held in expected, f"{kind}: {held} is none of {expected}"
        finally:
            ledger.close()
        with BlockStore.open(folder, capacity=_CAPACITY, map_size=1 << 20) as blocks:
            _blocks_sound(blocks)
        return kind if died or not kind.startswith("die") else "none"
    finally:
        os.close(hear)
        os.close(told)
        shutil.rmtree(folder, ignore_errors=True)
