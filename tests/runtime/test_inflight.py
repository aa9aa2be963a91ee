"""Prompts that begin alike at the same time: the first one computes the prefix, the others start behind it."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.fetch.fetch import PromptFetch
from ctxreuse.runtime.inflight.prompts import Following, Prompt, PromptTable
from ctxreuse.runtime.request import Request
from ctxreuse.runtime.steps.order import BACKGROUND, INTERACTIVE, RequestCancelledError
from ctxreuse.store import open_store
from support.examples import examples
from support.letters import Letters
from support.waiting import patient, until

BLOCK = 16
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, 512, n).astype("<i4")


def prompts(count: int, shared: int = 200, own: int = 30) -> list[Any]:
    return [np.concatenate([tokens(shared), tokens(own + n, 1 + n)]) for n in range(count)]


class Counted:
    """An engine that counts the tokens it computes; ``before`` runs before each pass."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self.computed, self.fails = engine, 0, False
        self.before: Callable[[int], None] = lambda computed: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, batch: Any, *, limit: int | None = None, rows: Any = ()) -> Any:
        self.before(self.computed)
        if self.fails:
            self.computed, self.fails = self.computed + 1, False
            return [EngineError("it broke") for _ in batch]
        before = sum(context.n for context, _ in batch)
        found = self._engine.step(batch, limit=limit, rows=rows)
        self.computed += sum(context.n for context, _ in batch) - before
        return found


def together(runtime: Runtime, wanted: list[Any], release: bool = True) -> list[Any]:
    """Prefill all at once; the first of them comes first."""
    found: list[Any] = [None] * len(wanted)

    def run(i: int) -> None:
        try:
            found[i] = runtime.prefill(wanted[i])
            if release:
                runtime.release(found[i])
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(wanted))]
    with runtime.steps.exclusive():
        threads[0].start()
        until(lambda: len(runtime.steps._waiting) == 1)
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(runtime.inflight.table) == len(wanted))
    for thread in threads:
        thread.join(patient(60))
    return found


@both
def test_a_shared_prefix_is_computed_once(engine: TorchEngine) -> None:
    counted = Counted(engine)
    runtime = Runtime(counted, None, RuntimeOptions(context_cache_bytes=0))  # type: ignore[arg-type]
    wanted = prompts(4)
    found = together(runtime, wanted)
    at = 200 // BLOCK * BLOCK
    assert counted.computed == sum(map(len, wanted)) - 3 * at
    assert [one.usage.tokens.by_source for one in found] == [{}] + 3 * [{"device": at}]
    assert (runtime.inflight.followers, runtime.inflight.shared_tokens) == (3, 3 * at)
    for one, ids in zip(found, wanted):
        assert one.usage.tokens.computed == len(ids) - one.usage.cached_tokens
        np.testing.assert_allclose(one.logits, engine.prefill(engine.new_context(), ids), atol=1e-4)
    assert len(runtime.inflight.table) == 0


def test_copied_blocks_are_not_read_again_from_a_store_that_has_them_by_then(
    llama: TorchEngine, tmp_path: Path
) -> None:
    with open_store(path=tmp_path) as store:
        runtime = Runtime(llama, store, RuntimeOptions(context_cache_bytes=0))
        start = runtime._start_fetch

        def when_stored(request: Request, shared: int) -> PromptFetch | None:
            until(lambda: store.match(request.keys).tokens >= shared)
            return start(request, shared)

        runtime._start_fetch = when_stored  # type: ignore[method-assign]
        found = together(runtime, prompts(2))
        assert found[1].usage.tokens.by_source == {"device": 200 // BLOCK * BLOCK}
        runtime.close()


def test_the_logits_are_those_of_own_computing_to_the_last_bit_where_the_cuts_are_equal(llama: TorchEngine) -> None:
    chunk = llama._model.chunk
    runtime = Runtime(llama, None, RuntimeOptions(context_cache_bytes=0))
    wanted = [np.concatenate([tokens(2 * chunk), tokens(chunk, n)]) for n in (1, 2)]
    found = together(runtime, wanted)
    assert found[1].usage.cached_tokens == 2 * chunk
    for one, ids in zip(found, wanted):
        assert np.array_equal(one.logits, llama.prefill(llama.new_context(), ids))


def test_each_follows_who_shares_most(llama: TorchEngine) -> None:
    """The third prompt continues the second, which itself starts behind the first."""
    counted = Counted(llama)
    runtime = Runtime(counted, None, RuntimeOptions(context_cache_bytes=0))  # type: ignore[arg-type]
    first, second = prompts(2, own=120)
    found = together(runtime, [first, second, np.concatenate([second, tokens(20, 9)])])
    assert [one.usage.cached_tokens // BLOCK for one in found] == [0, 200 // BLOCK, len(second) // BLOCK]


def test_an_answer_shares_its_prompt_while_it_is_decoded(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None, RuntimeOptions(text=Letters(), context_cache_bytes=0))
    first, second = prompts(2)
    answer = runtime.complete(first, SamplingParams(max_tokens=8, ignore_eos=True))
    next(answer)
    done = runtime.prefill(second)
    assert done.usage.tokens.by_source == {"device": 192}
    rest = answer.drain()
    alone = Runtime(llama, None, RuntimeOptions(text=Letters())).complete(
        first, SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert rest == alone.drain()


def test_an_answer_that_is_dropped_shares_nothing_and_blocks_none(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None, RuntimeOptions(text=Letters(), context_cache_bytes=0))
    first, second = prompts(2)
    answer = runtime.complete(first, SamplingParams(max_tokens=8, ignore_eos=True))
    next(answer)
    del answer
    gc.collect()
    assert len(runtime.inflight.table) == 0
    assert runtime.prefill(second).usage.cached_tokens == 0


@both
@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_when_the_leader_ends_a_follower_leads(engine: TorchEngine, how: str) -> None:
    counted, turns = Counted(engine), []
    runtime = Runtime(counted, None)  # type: ignore[arg-type]
    make = runtime.turn

    def noted(request: Any) -> Any:
        turns.append(make(request))
        return turns[-1]

    def end(computed: int) -> None:
        if computed == 64 and how == "cancelled":
            runtime.steps.cancel(turns[0])
        elif computed == 64:
            counted.fails = True

    runtime.turn, counted.before = noted, end  # type: ignore[method-assign]
    wanted = prompts(4)
    found = together(runtime, wanted, release=False)  # a released one would be found in the cache
    kind = RequestCancelledError if how == "cancelled" else EngineError
    assert isinstance(found[0], kind)
    at = 200 // BLOCK * BLOCK
    sources = sorted(one.usage.cached_tokens for one in found[1:])
    # One of the others leads, from where a cancelled one had come. States are there for those that came in time.
    assert engine.space.needs_state or sources == [128 if how == "cancelled" else 0, at, at]
    for one, ids in zip(found[1:], wanted[1:]):
        np.testing.assert_allclose(one.logits, engine.prefill(engine.new_context(), ids), atol=1e-4)


def test_a_follower_that_is_cancelled_leaves_at_once(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None, RuntimeOptions(text=Letters()))
    first, second = prompts(2)
    ended = threading.Event()
    answer = runtime.complete(second, SamplingParams(max_tokens=8, ignore_eos=True))

    def follow() -> None:
        assert answer.drain() == ""
        ended.set()

    threads = [threading.Thread(target=runtime.warm, args=(first,)), threading.Thread(target=follow)]
    with runtime.steps.exclusive():
        threads[0].start()
        until(lambda: len(runtime.steps._waiting) == 1)
        threads[1].start()
        until(lambda: any(prompt.wanted for prompt in runtime.inflight.table._prompts.values()))
        answer.close()
        assert ended.wait(patient(10))
        assert answer.finish == "cancelled"
    for thread in threads:
        thread.join(patient(30))
    runtime.inflight.check()


def test_tenants_do_not_share(llama: TorchEngine) -> None:
    first, second = (Runtime(llama, None, RuntimeOptions(tenant=name)) for name in "ab")
    ids = tokens(100)
    table: PromptTable[Prompt] = PromptTable()
    one, two, three = (Prompt(runtime.keys(ids), 5, None) for runtime in (first, second, second))
    for prompt in (one, two, three):
        table.add(prompt)
    assert table.follow(two, 0) is None
    assert table.follow(three, 0) == Following(two, 5)


def test_who_is_in_a_hurry_pulls_its_leader(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None)
    first, second = (runtime.request(ids) for ids in prompts(2))
    slow, fast = runtime.steps.turn(priority=BACKGROUND), runtime.steps.turn(priority=INTERACTIVE)
    threads = [
        threading.Thread(target=lambda: runtime.release(runtime.prefill(first, turn=slow))),
        threading.Thread(target=lambda: runtime.release(runtime.prefill(second, turn=fast))),
    ]
    with runtime.steps.exclusive():
        threads[0].start()
        until(lambda: len(runtime.steps._waiting) == 1)
        threads[1].start()
        until(lambda: slow.priority == INTERACTIVE)
    for thread in threads:
        thread.join(patient(30))


@examples("light")
@given(st.integers(0, 1 << 32))
def test_whatever_happens_every_prompt_ends(seed: int) -> None:
    """A simulation: prompts of a few prefixes come, compute block by block, fail and are cancelled. None waits for a
    later one, so the earliest of all always goes on, and all end."""
    rng, table = random.Random(seed), PromptTable[Prompt]()
    waiting: dict[int, Following[Prompt]] = {}
    running: dict[int, Prompt] = {}
    held: dict[int, int] = {}
    came = 0
    while came < 12 or running:
        table.check()
        if came < 12 and (not running or rng.random() < 0.3):
            came += 1
            shared, length = rng.randrange(6), rng.randrange(1, 10)
            keys = [bytes([0, i]) if i < shared else bytes([came, i]) for i in range(length)]
            prompt = Prompt(keys, rng.choice((length, length - 1)), rng.choice((None, None, 0.1)))
            table.add(prompt)
            running[prompt.number], held[prompt.number] = prompt, 0
            continue
        prompt = running[rng.choice(sorted(running))]
        number, following = prompt.number, waiting.get(prompt.number)
        if rng.random() < 0.1:  # it fails or is cancelled
            if following is not None:
                following.leader.wanted.pop(number)
                del waiting[number]
            table.end(prompt)
            del running[number]
        elif following is not None:
            if following.settled:
                following.leader.wanted.pop(number)
                del waiting[number]
                if following.ready:
                    held[number] = prompt.done = following.blocks
        elif not held[number] and (following := table.follow(prompt, held[number])) is not None:
            waiting[number] = following
        else:
            held[number] += 1
            prompt.done = min(held[number], len(prompt.keys))
            if held[number] > len(prompt.keys):
                table.end(prompt)
                del running[number]
        if running:
            first = min(running)
            assert first not in waiting or waiting[first].settled
    assert len(table) == 0
