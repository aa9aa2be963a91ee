"""Engine processes: what they make is what an engine here makes, and none of their deaths is anybody's loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_cloud.workers.audit import WorkerAudit
from ctxreuse_cloud.workers.pool import WorkerPool

from ctxreuse.block.format import parse
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.errors import EngineError, LinkDownError
from ctxreuse.peer.serve.audit import StoreAudit
from ctxreuse.peer.serve.engine import compute_blocks
from ctxreuse.peer.serve.prefill import DISPLACED
from ctxreuse.runtime.fetch.audit import SPAN_TOKENS
from ctxreuse.store import TieredStore, open_store
from support.lies import forged, lies
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

SALT = b"s" * 16


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.states: list[Any] = []
        self.ends: list[str] = []
        self.over = threading.Event()

    def block(self, index: int, data: Any) -> None:
        assert index not in self.blocks
        self.blocks[index] = data

    def state(self, data: Any) -> None:
        self.states.append(data)

    def end(self, reason: str = "") -> None:
        self.ends.append(reason)
        self.over.set()


def tokens_of(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 250, n).astype("<i4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the node's store."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[TieredStore]:
    """The node's store, which the process reads."""
    with open_store(folder, capacity=64 << 20) as one:
        yield one


@pytest.fixture(scope="module")
def workers(tiny_folder: Path, folder: Path, store: TieredStore) -> Iterator[WorkerPool]:
    """One process, for all tests here."""
    config = EngineConfig(model=str(tiny_folder), threads=1)
    one = WorkerPool(1, config, LogConfig(), store=str(folder), max_waiting=4)
    one.start()
    assert one.settle(90)
    yield one
    one.close()
    assert {status.state for status in one.status()} == {"stopped"}


def test_blocks_are_those_of_an_engine_here(workers: WorkerPool, tiny_engine: Any) -> None:
    space, tokens, sink = tiny_engine.space.digest, tokens_of(64 * 10), Kept()
    assert set(workers.spaces) == {space}
    assert workers.submit(space, SALT, tokens, 2, sink, 0) is not None
    assert sink.over.wait(patient(60))
    assert sink.ends == [""]
    expected = {index: parse(data) for index, _, data in compute_blocks(tiny_engine, SALT, tokens, 2)}
    assert set(sink.blocks) == set(expected) == set(range(2, 10))
    for index, data in sink.blocks.items():
        view = parse(data)
        view.verify()
        assert (view.header.key, view.header.parent) == (expected[index].header.key, expected[index].header.parent)
        for layer in range(2):
            for role in ("k", "v"):
                assert np.allclose(view.array(layer, role), expected[index].array(layer, role), atol=1e-5)
    assert workers.status()[0].jobs >= 1


def test_audits(workers: WorkerPool, tiny_engine: Any, store: TieredStore) -> None:
    space, audit = tiny_engine.space.digest, StoreAudit(store, WorkerAudit(workers), reach=SPAN_TOKENS)
    honest = [made.data for made in compute_blocks(tiny_engine, SALT, tokens_of(64 * 4, 1), 0)]
    views = given(store, honest)
    assert audit(space, views) is True
    assert audit(space, views[2:]) is True  # on top of what is stored before
    assert audit(b"?" * 32, views) is None  # no process computes there: nothing to compare with
    with pytest.raises(LookupError):
        audit(space, [parse(data) for data in made_of(tiny_engine, 2)[1:]])  # on top of nothing
    layers = len(tiny_engine.space.layers)
    for seed, change in enumerate(lies(layers, 3, 64, 3).values(), 10):
        told = made_of(tiny_engine, seed)
        told[1:] = [forged(data, change, number) for number, data in enumerate(told[1:])]
        assert audit(space, given(store, told)[1:]) is False


def made_of(engine: Any, seed: int) -> list[Any]:
    return [made.data for made in compute_blocks(engine, SALT, tokens_of(64 * 4, seed), 0)]


def given(store: TieredStore, blocks: list[Any]) -> list[Any]:
    """The blocks' views, stored."""
    views = [parse(data) for data in blocks]
    assert all(store.put(view.header.key, data) for view, data in zip(views, blocks))
    return views


def test_more_than_may_wait_are_refused_and_the_given_up_make_room(workers: WorkerPool, tiny_engine: Any) -> None:
    space, tokens = tiny_engine.space.digest, tokens_of(64 * 30, 2)
    sinks = [Kept() for _ in range(8)]
    cancels = [workers.submit(space, SALT, tokens, 0, sink, 0) for sink in sinks]
    taken = [cancel for cancel in cancels if cancel is not None]
    assert 2 <= len(taken) < 8
    for cancel in taken:
        cancel()
        cancel()
    assert workers.submit(b"?" * 32, SALT, tokens, 0, Kept(), 0) is None
    sink = Kept()
    until(lambda: workers.submit(space, SALT, tokens_of(64), 0, sink, 0) is not None)
    assert sink.over.wait(patient(60))
    assert sink.ends == [""]


def test_a_tenant_is_not_kept_waiting_by_another_that_floods(workers: WorkerPool, tiny_engine: Any) -> None:
    space, other = tiny_engine.space.digest, b"o" * 16
    ended: list[Kept] = []

    class Listed(Kept):
        def end(self, reason: str = "") -> None:
            ended.append(self)
            super().end(reason)

    flood, mine = [Listed() for _ in range(5)], [Listed() for _ in range(3)]
    for n, sink in enumerate(flood):  # one runs, four wait: as many as may
        assert workers.submit(space, SALT, tokens_of(64 * 31, 10 + n), 0, sink, 0) is not None
        until(lambda: workers.status()[0].state == "busy")
    assert workers.submit(space, SALT, tokens_of(64), 0, Kept(), 0) is None
    for n, sink in enumerate(mine):
        assert workers.submit(space, other, tokens_of(64 * 4, 20 + n), 0, sink, 0) is not None
    until(lambda: len(ended) == 8)
    assert [sink.ends for sink in mine] == [[""]] * 3
    # Those of the flood that had to leave are its last ones; the others are made, in their order.
    ends = [sink.ends for sink in flood]
    left = ends.count([DISPLACED])
    assert 0 < left < 3
    assert ends == [[""]] * (5 - left) + [[DISPLACED]] * left
    made = [sink for sink in ended if sink.ends == [""]]
    assert all(made.index(sink) <= 3 for sink in mine)  # beside the one that ran, and before those that waited


def test_a_process_that_dies_is_replaced_and_its_job_made_again(workers: WorkerPool, tiny_engine: Any) -> None:
    space, tokens, sink = tiny_engine.space.digest, tokens_of(64 * 31, 3), Kept()
    before = workers.status()[0]
    assert workers.submit(space, SALT, tokens, 0, sink, 0) is not None
    os.kill(before.pid, signal.SIGKILL)
    answer = workers.audit(space, [bytes(32)], 0, b"")
    # Asked of a process that is dead or about to be seen so.
    until(lambda: isinstance(workers.audit(space, [bytes(32)], 0, b"").exception(patient(30)), LinkDownError), 30)
    assert sink.over.wait(patient(90))
    assert sink.ends == [""]
    assert set(sink.blocks) == set(range(31))
    after = workers.status()[0]
    assert after.restarts == before.restarts + 1
    assert after.pid != before.pid
    assert isinstance(answer.exception(30), LinkDownError | EngineError)


def test_a_model_that_is_not_there_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    broken = WorkerPool(1, EngineConfig(model=str(tmp_path / "nothing")), LogConfig())
    broken.start()
    assert broken.settle(90)
    status = broken.status()[0]
    assert (status.state, status.restarts) == ("broken", 0)
    assert "nothing" in status.error
    assert broken.submit(b"?" * 32, SALT, tokens_of(64), 0, Kept(), 0) is None
    broken.close()
