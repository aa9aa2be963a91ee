"""kill -9 at any moment of a load, a step or an export: nothing durable is lost, and the next answer is right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.process.engine import ChildEngine, EngineStart
from ctxreuse.engines.process.pipe import FramePipe
from ctxreuse.engines.process.wire import Call, LayerArrived
from ctxreuse.errors import EngineDiedError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import Store, open_store
from support.tiny_gguf import write_tiny_gguf
from support.waiting import until

OPEN = "ctxreuse.engines.registry:open_engine"
#: The tokens of a prompt that all share and its own ones, which are exported in two calls, and of an answer.
PREFIX, OWN, TOKENS = 96, 140, 8
#: What of a request a kill is aimed at, and how many messages of it there may be.
AIMS = {"load": 4, "step": TOKENS + 1, "export": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> Iterator[ChildEngine]:
    """A tiny GGUF on llama.cpp, which starts in a fraction of a second."""
    file = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    engine = EngineStart(OPEN, {"model": str(file), "block_tokens": 16, "chunk": 256, "threads": 1}).opened()
    yield engine
    engine.close()


def kill(pid: int) -> None:
    assert pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def prompt_of(seed: int, own: int) -> Any:
    shared = np.random.default_rng(0).integers(0, 250, PREFIX)
    return np.concatenate([shared, np.random.default_rng(seed).integers(0, 250, own)]).astype("<i4")


def answer(runtime: Runtime, ids: Any) -> list[int]:
    """A greedy answer, through load, steps and export."""
    done = runtime.prefill(ids)
    found, logits = [], done.logits
    for _ in range(TOKENS):
        found.append(int(logits.argmax()))
        logits, _ = runtime.steps.advance(done.context, np.array(found[-1:], "<i4"))
    runtime.release(done)
    return found


class Killer:
    """Kills the engine's process at a message to it."""

    def __init__(self, engine: ChildEngine, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
        self._engine, self._rng = engine, rng
        self.aim, self.left, self.hit = "", 0, False
        send = FramePipe.send

        def sent(pipe: Any, message: Any, payload: Any = b"") -> None:
            now, pid = self.aim == self._kind(message) != "" and not self.hit, engine.pid
            self.left -= now
            self.hit = self.hit or (now and self.left == 0)
            if now and self.hit and rng.random() < 0.3:
                kill(pid)
            send(pipe, message, payload)
            if now and self.hit:
                time.sleep(rng.random() * 0.003)  # somewhere inside of it
                kill(pid)

        patch.setattr(FramePipe, "send", sent)

    def _kind(self, message: Any) -> str:
        if isinstance(message, LayerArrived):
            return "load"
        verb = message.verb if isinstance(message, Call) else ""
        return {"load": "load", "wait": "load", "step": "step", "export": "export"}.get(verb, "")

    def arm(self, aim: str) -> None:
        self.aim, self.left, self.hit = aim, self._rng.randint(1, AIMS[aim]), False


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_kills_lose_nothing(rounds: int, engine: ChildEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, plain = random.Random(17), Runtime(engine)
    killed: Counter[str] = Counter()
    failed: list[str] = []
    before = engine.restarts
    with open_store(tmp_path / "store", capacity=64 << 20) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        answer(runtime, prompt_of(0, 40))  # the prefix is stored
        store.flush()
        killer = Killer(engine, rng, monkeypatch)
        kept = runtime.keys(prompt_of(0, 0))
        for number in range(1, rounds + 1):
            ids, aim = prompt_of(number, OWN), rng.choice(list(AIMS))
            killer.arm(aim)
            found = []
            try:
                found.append(answer(runtime, ids))
            except EngineDiedError as error:
                failed.append(str(error))
            killer.aim = ""
            killed[aim] += killer.hit
            check(store, runtime, kept)
            found.append(answer(runtime, ids))
            assert runtime.prefill(ids).usage.tokens.by_source, "the next request reuses what is stored"
            expected = answer(plain, ids)
            assert found == [expected] * len(found), f"round {number}"
    print(
        f"{rounds} rounds: killed in {dict(killed)}, {engine.restarts - before} restarts, {len(failed)} answers failed"
    )
    assert all("killed by SIGKILL" in error for error in failed)
    until(lambda: engine.restarts - before >= sum(killed.values()))
    assert engine.restarts - before == sum(killed.values()) >= rounds // 2
    assert len(killed) == len(AIMS)
    assert len(failed) <= killed["step"]  # what was not begun is tried again, what was not stored is computed again


def check(store: Store, runtime: Runtime, kept: list[bytes]) -> None:
    """What was stored is there, and sound."""
    assert store.match(kept).blocks == len(kept)
    with store.read() as reader:
        for number, key in enumerate(kept):
            size = runtime.space.block_tokens
            view = reader.block(key, prompt_of(0, 0)[number * size : (number + 1) * size], runtime.space.digest)
            assert view is not None
            view.verify()
