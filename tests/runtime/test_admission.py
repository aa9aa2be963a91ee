"""Prompts are let in by free memory, in simulated memory and time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.steps.order import INTERACTIVE, RequestCancelledError, RequestTurn
from ctxreuse.testing.clock import FakeClock
from support.waiting import patient, until


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 512, n).astype("<i4")


class Memory:
    """So many tokens fit; contexts in flight take what they hold."""

    def __init__(self, engine: TorchEngine, room: int) -> None:
        self.engine, self.room, self.clock = engine, room, FakeClock()
        self.runtime = Runtime(
            engine, None, RuntimeOptions(available_memory=self.available, clock=self.clock, context_cache_bytes=1 << 30)
        )
        assert self.runtime.admission is not None
        self.admission = self.runtime.admission

    def available(self) -> int:
        prompts = self.runtime.inflight.table.prompts()
        held = sum(prompt.room - prompt.promised for prompt in prompts)
        cached = sum(context.n for context in self.runtime.context_cache._contexts)
        return int((self.room - held - cached) * self.engine.space.token_nbytes / 0.9) + 1


def test_who_does_not_fit_waits_until_another_ends(llama: TorchEngine) -> None:
    memory = Memory(llama, 250)
    runtime = memory.runtime
    first = runtime.prefill(tokens(100, 1))
    second = runtime.prefill(tokens(100, 2))
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(runtime.prefill(tokens(100, 3))))
    thread.start()
    until(lambda: memory.admission.waiting == 1)
    runtime.release(first)  # cached now: evicted for who waits
    thread.join(patient(20))
    assert len(done) == 1
    assert len(runtime.context_cache) == 0
    runtime.release(second)


def test_one_alone_is_let_in_whatever_it_needs(llama: TorchEngine) -> None:
    memory = Memory(llama, 10)
    assert memory.runtime.prefill(tokens(100)).context.n == 100


def test_waiting_ends_with_the_patience_and_when_it_is_cancelled(llama: TorchEngine) -> None:
    memory = Memory(llama, 120)
    runtime, ended = memory.runtime, []
    turn = runtime.steps.turn()
    held = runtime.prefill(tokens(100, 1))

    def run(turn: RequestTurn, seed: int) -> None:
        try:
            ended.append(runtime.prefill(tokens(100, seed), turn=turn).context.n)
        except RequestCancelledError:
            ended.append("cancelled")

    threads = [threading.Thread(target=run, args=(turn, 2)), threading.Thread(target=run, args=(RequestTurn(9), 3))]
    for thread in threads:
        thread.start()
    until(lambda: memory.admission.waiting == 2)
    runtime.steps.cancel(turn)
    runtime.inflight.wake()
    until(lambda: ended == ["cancelled"])
    memory.clock.advance(200)
    runtime.inflight.wake()
    for thread in threads:
        thread.join(patient(20))
    assert ended == ["cancelled", 100]
    runtime.release(held)


@pytest.mark.parametrize("urgent", [True, False])
def test_the_more_urgent_goes_first(llama: TorchEngine, urgent: bool) -> None:
    memory = Memory(llama, 120)
    runtime, order = memory.runtime, []
    held = runtime.prefill(tokens(100, 1))

    def run(name: str, seed: int, priority: int) -> None:
        done = runtime.prefill(tokens(100, seed), turn=runtime.steps.turn(priority=priority))
        order.append(name)
        runtime.release(done)

    threads = []
    for at, (name, priority) in enumerate([("early", 0), ("late", INTERACTIVE if urgent else 0)]):
        threads.append(threading.Thread(target=run, args=(name, 2 + at, priority)))
        threads[-1].start()
        until(lambda at=at: memory.admission.waiting == at + 1)  # type: ignore[misc]
    runtime.release(held)
    for thread in threads:
        thread.join(patient(20))
    assert order == (["late", "early"] if urgent else ["early", "late"])
