"""Engine processes: what they make is what an engine here makes, and none of their deaths is anybody's loss."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_cloud.workers.audit import WorkerAudit
from ctxreuse_cloud.workers.crew import Workers
from ctxreuse_cloud.workers.pipe import _FRAME, Cancel, Job, Pipe
from running import wait_for

from ctxreuse.block import parse, reseal
from ctxreuse.bus.serve_engine import compute_blocks
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.errors import LinkDownError, ProtocolError

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
def workers(tiny_folder: Path) -> Iterator[Workers]:
    """One process, for all tests here."""
    one = Workers(1, EngineConfig(model=str(tiny_folder), threads=1), LogConfig(), max_waiting=2)
    one.start()
    assert one.settle(90)
    yield one
    one.close()
    assert {standing.state for standing in one.standing()} == {"stopped"}


def test_blocks_are_those_of_an_engine_here(workers: Workers, tiny_engine: Any) -> None:
    space, tokens, sink = tiny_engine.space.digest, tokens_of(64 * 10), Kept()
    assert set(workers.spaces) == {space}
    assert workers.submit(space, SALT, tokens, 2, sink, 0) is not None
    assert sink.over.wait(60)
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
    assert workers.standing()[0].jobs >= 1


def test_rows_and_the_audit(workers: Workers, tiny_engine: Any) -> None:
    space, tokens = tiny_engine.space, tokens_of(64 * 4, 1)
    made = [made.data for made in compute_blocks(tiny_engine, SALT, tokens, 0)]
    views = [parse(data) for data in made]
    audit = WorkerAudit(workers)
    assert audit(space.digest, views)
    assert audit(b"?" * 32, views)  # no process computes there: nothing to compare with
    forged = parse(resealed(views[1]))
    assert not audit(space.digest, [forged])
    answer = workers.rows(space.digest, tokens[:3], np.arange(3, dtype="<i4")).result(30)
    assert answer is not None
    assert answer[0] == 0
    assert np.allclose(answer[1], views[0].array(0, "k")[:, :3], atol=1e-5)


def resealed(view: Any) -> Any:
    """A block with other numbers under right checksums."""
    noise = {
        (plane.layer, plane.role): np.random.default_rng(5)
        .standard_normal(plane.nbytes // 4)
        .astype("<f4")
        .view(np.uint8)
        for plane in view.layout.planes
    }
    return reseal(view, noise)


def test_more_than_may_wait_are_refused_and_the_given_up_make_room(workers: Workers, tiny_engine: Any) -> None:
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
    wait_for(lambda: workers.submit(space, SALT, tokens_of(64), 0, sink, 0) is not None)
    assert sink.over.wait(60)
    assert sink.ends == [""]


def test_a_process_that_dies_is_replaced_and_its_job_made_again(workers: Workers, tiny_engine: Any) -> None:
    space, tokens, sink = tiny_engine.space.digest, tokens_of(64 * 31, 3), Kept()
    before = workers.standing()[0]
    assert workers.submit(space, SALT, tokens, 0, sink, 0) is not None
    os.kill(before.pid, signal.SIGKILL)
    answer = workers.rows(space, tokens[:1], np.zeros(1, "<i4"))
    with pytest.raises(LinkDownError):  # asked of a process that is dead or about to be seen so
        wait_for(lambda: workers.rows(space, tokens[:1], np.zeros(1, "<i4")).result(30) is None, 30)
    assert sink.over.wait(90)
    assert sink.ends == [""]
    assert set(sink.blocks) == set(range(31))
    after = workers.standing()[0]
    assert after.restarts == before.restarts + 1
    assert after.pid != before.pid
    assert answer.exception(30) is None or isinstance(answer.exception(), LinkDownError)


def test_a_model_that_is_not_there_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    broken = Workers(1, EngineConfig(model=str(tmp_path / "nothing")), LogConfig())
    broken.start()
    assert broken.settle(90)
    standing = broken.standing()[0]
    assert (standing.state, standing.restarts) == ("broken", 0)
    assert "nothing" in standing.said
    assert broken.submit(b"?" * 32, SALT, tokens_of(64), 0, Kept(), 0) is None
    broken.close()


def test_the_pipe_takes_nothing_that_is_no_message() -> None:
    for raw in (_FRAME.pack(1 << 20, 0), _FRAME.pack(3, 0) + b"\xc1\xc1\xc1", _FRAME.pack(1, 1 << 40)):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(raw)
            with pytest.raises(ProtocolError):
                Pipe(here).receive()


def test_the_pipe_passes_messages_of_any_size_and_ends_with_its_other_side() -> None:
    here, there = socket.socketpair()
    with here, there:
        left, right = Pipe(here), Pipe(there)
        data = np.random.default_rng(0).integers(0, 255, 3 << 20).astype(np.uint8)
        sending = threading.Thread(
            target=lambda: (left.send(Job(7, SALT, 0, 0), data), left.send(Cancel(7)), left.shut())
        )
        sending.start()
        job = right.receive()
        assert job is not None
        assert job[0] == Job(7, SALT, 0, 0)
        assert np.array_equal(job[1], data)
        assert right.receive() is not None
        assert right.receive() is None
        sending.join()
