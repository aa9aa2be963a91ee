"""Contexts between requests: who is the same session, what idle time is used for, and that learning outlives it all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.pauses import Estimator, Pause, PauseKind
from ctxreuse.pauses.kinds import CLOSED, END_OF_TURN, TOOL_CALL
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.paused import PausedContexts
from ctxreuse.store import TieredStore, open_store
from ctxreuse.testing.clock import FakeClock
from support.tiny_models import engine_of


class Scene:
    def __init__(self, engine: TorchEngine, store: TieredStore) -> None:
        self.clock = FakeClock()
        self.store = store
        self.runtime = Runtime(engine, store, RuntimeOptions(clock=self.clock, context_cache_bytes=1 << 20))
        self.paused, self.keys = self.runtime.paused, self.runtime.keys

    def ids(self, session: int, n: int) -> Any:
        return np.random.default_rng(session).integers(3, 250, n).astype("<i4")

    def begin(self, ids: Any, was: PauseKind | None = None) -> None:
        self.paused.on_request(ids, self.keys(ids), was)

    def pause(self, ids: Any, kind: PauseKind, **more: Any) -> None:
        self.paused.on_pause(ids, self.keys(ids), kind, **more)

    def request(
        self, session: int, n: int, kind: PauseKind, seconds: float = 1.0, was: PauseKind | None = None
    ) -> None:
        ids = self.ids(session, n)
        self.begin(ids, was)
        done = self.runtime.prefill(ids)
        self.clock.advance(seconds)
        nbytes = done.context.nbytes
        self.runtime.release(done)
        self.pause(ids, kind, nbytes=nbytes)
        self.runtime.store.flush()  # type: ignore[union-attr]
        self.paused.check()

    def learn(self) -> None:
        """Tools take three seconds here, people an hour; nothing is computed for it."""
        pauses = ((PauseKind(TOOL_CALL), 3.0), (PauseKind(END_OF_TURN), 3600.0))
        for session in range(100, 112):
            for turn in range(6):
                kind, pause = pauses[turn % 2]
                ids = self.ids(session, 64 + 16 * turn)
                self.begin(ids)
                self.clock.advance(1.0)
                self.pause(ids, kind)
                self.clock.advance(pause)
            self.begin(self.ids(session, 160))
            self.pause(self.ids(session, 160), PauseKind(CLOSED))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    store = open_store(tmp_path / "store", capacity=8 << 20, host_bytes=1 << 20)
    # An engine of its own: arenas that others gave back may be larger than a context needs, and so fill its memory.
    made = Scene(engine_of("llama"), store)
    yield made
    made.runtime.close()
    store.close()


def test_a_context_that_goes_on_is_the_same_session(scene: Scene) -> None:
    scene.request(1, 64, PauseKind(TOOL_CALL))
    scene.request(1, 96, PauseKind(TOOL_CALL))
    scene.request(2, 64, PauseKind(TOOL_CALL))
    assert len(scene.paused) == 2
    rewritten = scene.ids(1, 96).copy()
    rewritten[-8:] = 7
    scene.begin(np.concatenate([rewritten, scene.ids(3, 32)]))
    assert len(scene.paused) == 2
    scene.begin(np.concatenate([scene.ids(1, 16), scene.ids(4, 300)]))  # shares a beginning, no more
    assert len(scene.paused) == 3
    scene.begin(scene.ids(5, 3))  # shorter than a block: nothing could be kept
    assert len(scene.paused) == 3
    scene.paused.check()


def test_memory_is_let_go_of_when_the_return_is_far_off_and_not_when_it_is_near(scene: Scene) -> None:
    scene.learn()
    scene.runtime.context_cache.clear()
    scene.request(1, 128, PauseKind(TOOL_CALL))
    scene.request(2, 128, PauseKind(END_OF_TURN))
    scene.request(3, 128, PauseKind(CLOSED))
    held = scene.runtime.context_cache.nbytes
    done = scene.paused.work()
    assert 0 < done.demoted < held
    assert scene.runtime.context_cache.cached_bytes(scene.ids(1, 128))
    assert not scene.runtime.context_cache.cached_bytes(scene.ids(3, 128))
    # What left memory is on the disk: the next turn finds all of it.
    again = scene.runtime.prefill(scene.ids(3, 144))
    assert again.usage.cached_tokens == 128
    scene.runtime.release(again)


def test_a_nearly_full_memory_lets_go_of_the_least_worth_first(scene: Scene) -> None:
    scene.learn()
    scene.runtime.context_cache.clear()
    scene.request(1, 128, PauseKind(END_OF_TURN))
    scene.request(2, 128, PauseKind(TOOL_CALL))
    scene.runtime.context_cache.capacity = scene.runtime.context_cache.nbytes
    scene.paused.work()
    assert not scene.runtime.context_cache.cached_bytes(scene.ids(1, 128))


def test_what_is_about_to_return_is_read_ahead_once(scene: Scene) -> None:
    scene.learn()
    scene.request(1, 128, PauseKind(TOOL_CALL))
    scene.runtime.context_cache.clear()
    before = scene.store.stats().hits
    done = scene.paused.work()
    assert done.prefetched > 8 * 16 * 100  # eight blocks
    assert scene.paused.work().prefetched == 0
    assert scene.store.stats().hits == before, "reading ahead is no use"
    scene.begin(scene.ids(1, 144))
    assert scene.paused.returned_ahead == 1


def test_who_was_never_told_of_is_not_read_ahead_and_a_busy_daemon_reads_nothing(scene: Scene) -> None:
    scene.learn()
    scene.request(1, 128, PauseKind(TOOL_CALL))
    scene.request(2, 128, PauseKind(CLOSED))
    scene.runtime.context_cache.clear()
    assert scene.paused.work(busy=lambda: True).prefetched == 0
    assert scene.paused.work().prefetched > 0
    scene.begin(scene.ids(2, 144))
    assert scene.paused.returned_ahead == 0, "nobody had said that it is over"
    scene.begin(scene.ids(1, 144))
    assert scene.paused.returned_ahead == 1


def test_an_expected_return_is_prepared_shortly_before(scene: Scene) -> None:
    scene.learn()
    scene.request(1, 128, PauseKind(END_OF_TURN))
    scene.pause(scene.ids(1, 128), PauseKind(END_OF_TURN), expect=600.0)
    scene.runtime.context_cache.clear()
    scene.clock.advance(60.0)
    assert scene.paused.work().prefetched == 0
    scene.clock.advance(500.0)
    assert scene.paused.work().prefetched > 0


def test_the_role_of_the_next_message_corrects_what_was_inferred(scene: Scene) -> None:
    for session in range(20):
        scene.begin(scene.ids(session, 64))
        scene.pause(scene.ids(session, 64), PauseKind(END_OF_TURN))
        scene.clock.advance(2.0)
        scene.begin(scene.ids(session, 80), PauseKind(TOOL_CALL))
        scene.pause(scene.ids(session, 80), PauseKind(CLOSED))
    estimator = Estimator()
    assert estimator.load(scene.paused.dump())
    assert estimator.survival(Pause("tool"), 0.0, 10.0) < 0.5
    assert estimator.survival(Pause("tool"), 0.0, 10.0) < estimator.survival(Pause("end_of_turn"), 0.0, 10.0)


def test_hints_need_a_known_context_and_decay(scene: Scene) -> None:
    assert not scene.paused.hint(scene.keys(scene.ids(1, 128)), "pin")
    scene.request(1, 128, PauseKind(END_OF_TURN))
    before = scene.paused.state(scene.keys(scene.ids(1, 128)))
    assert scene.paused.hint(scene.keys(scene.ids(1, 128)), "pin", until=60.0)
    pinned = scene.paused.state(scene.keys(scene.ids(1, 128)))
    scene.clock.advance(3600.0)
    later = scene.paused.state(scene.keys(scene.ids(1, 128)))
    assert before is not None
    assert pinned is not None
    assert later is not None
    assert pinned.worth > 10 * before.worth
    assert later.worth < before.worth


def test_what_was_learnt_outlives_the_process_and_hostile_files_do_not_matter(scene: Scene, tmp_path: Path) -> None:
    scene.learn()
    file = tmp_path / "pauses.bin"
    scene.paused.save(file)
    other = PausedContexts(scene.runtime.context_cache, None, scene.clock)
    assert other.recall(file)
    assert other.dump() == scene.paused.dump()
    for raw in (b"", b"\x00" * 100, file.read_bytes()[:-3], bytes(1 << 17)):
        file.write_bytes(raw)
        assert not other.recall(file)
    assert not other.recall(tmp_path / "absent")
    assert other.dump() == scene.paused.dump()
