"""Requests share the passes of one engine: who is in the next one, what each gets, what happens when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.base import Engine
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError, TokenRangeError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.steps.order import RequestCancelledError, RequestTurn
from ctxreuse.runtime.steps.passes import MOST, PATIENT, PassPlanner, Waiting
from ctxreuse.runtime.steps.scheduler import StepScheduler
from ctxreuse.runtime.steps.slices import FIRST_SLICE, UNSEEN
from support.fetch_scene import tokens
from support.letters import Letters
from support.waiting import patient, until


class Recorded:
    """An engine that notes how many tokens each context gets in each pass. ``batch``: whether it packs."""

    def __init__(self, engine: Engine, batch: bool = True) -> None:
        self._engine, self.batches = engine, batch
        self.passes: list[list[int]] = []
        self.before: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, batch: Any, *, limit: int | None = None, rows: Any = ()) -> Any:
        self.before()
        at = [context.n for context, _ in batch]
        found = self._engine.step(batch, limit=limit, rows=rows)
        self.passes.append([context.n - n for (context, _), n in zip(batch, at)])
        return found


def waiting(engine: Engine, *needs: tuple[int, int]) -> list[Waiting]:
    return [Waiting(engine.new_context(), tokens(count), RequestTurn(arrived)) for count, arrived in needs]


def test_all_who_decode_go_with_a_slice_of_the_first_prefill(llama: TorchEngine) -> None:
    planner, now = PassPlanner(), 0.0
    all_of_them = waiting(llama, (300, 5), (1, 6), (200, 4), (1, 2))
    for _ in range(3):  # how long such a pass takes is found out first
        chosen, _ = planner.plan(all_of_them, now, batches=True)
        assert chosen == [all_of_them[1], all_of_them[3]]
        planner.done(chosen, 0.01, now)
    chosen, limit = planner.plan(all_of_them, now, batches=True)
    assert chosen == [all_of_them[1], all_of_them[3], all_of_them[2]]
    assert limit == FIRST_SLICE
    short = waiting(llama, (1, 1), (40, 2))
    assert PassPlanner().plan(short, now, batches=True) == (short, FIRST_SLICE), "a question need not wait for that"
    assert planner.plan(all_of_them[:1], now + 1, batches=True) == (all_of_them[:1], PATIENT)
    assert planner.plan(all_of_them[:1], now + 31, batches=True) == (all_of_them[:1], None)
    assert planner.plan(all_of_them, now, batches=False) == ([all_of_them[2]], FIRST_SLICE)
    assert planner.plan(all_of_them[1:], now, batches=False) == ([all_of_them[1]], FIRST_SLICE)
    many = waiting(llama, *[(1, i) for i in range(2 * MOST)], (9, 0))
    chosen, _ = planner.plan(many, now, batches=True)
    assert chosen == [*many[: MOST - 1], many[-1]]


def test_a_brief_prompt_of_a_tenant_that_had_less_is_not_cut_into_slices_for_one_that_floods(
    llama: TorchEngine,
) -> None:
    def of(tenant: str, count: int, arrived: int) -> Waiting:
        return Waiting(llama.new_context(), tokens(count), RequestTurn(arrived, tenant=tenant))

    planner = PassPlanner()
    flood = [of("flood", 1, 1), of("flood", 1, 2)]
    for _ in range(3):
        planner.done(planner.plan(flood, 0.0, batches=True)[0], 0.01, 0.0)
    quiet, long, more = of("quiet", 200, 3), of("quiet", 300, 4), of("flood", 200, 5)
    assert planner.plan([*flood, quiet], 0.0, batches=True)[1] == FIRST_SLICE, "neither had more than the other"
    planner._order.charge(flood[0].turn, 400, 0)
    assert planner.plan([*flood, more, quiet], 0.0, batches=True) == ([*flood, quiet], PATIENT)
    assert planner.plan([*flood, long], 0.0, batches=True)[1] == FIRST_SLICE, "others would wait for long"
    assert planner.plan([*flood, more], 0.0, batches=True)[1] == FIRST_SLICE, "its own answers"
    assert planner.plan([*flood, of("quiet", 1, 6), quiet], 0.0, batches=True)[1] == FIRST_SLICE, "its own answers"
    planner._order.charge(quiet.turn, 3000, 0)
    assert planner.plan([*flood, quiet], 0.0, batches=True)[1] == FIRST_SLICE, "it had more"


def test_slices_are_as_long_as_the_engine_computes_them_fast(llama: TorchEngine) -> None:
    planner = PassPlanner(least_slice=100)
    decoding, prefill = waiting(llama, (1, 1)), waiting(llama, (300, 2))
    for _ in range(3):
        planner.done(planner.plan(decoding, 0.0, batches=True)[0], 0.01, 0.0)
    for seconds in (0.5, 5.0, 50.0):  # however long the others wait for it
        chosen, limit = planner.plan([*decoding, *prefill], 0.0, batches=True)
        assert (chosen, limit) == ([*decoding, *prefill], 100)
        planner.done(chosen, seconds, 0.0)
    engine = Recorded(llama)
    assert StepScheduler(engine)._planner.plan([*decoding, *prefill], 0.0, batches=True)[1] == FIRST_SLICE  # type: ignore[arg-type]
    engine.least_slice = 100  # type: ignore[attr-defined]
    assert StepScheduler(engine)._planner.plan([*decoding, *prefill], 0.0, batches=True)[1] == 100  # type: ignore[arg-type]


def test_no_pass_waits_for_an_answer_that_has_ended(llama: TorchEngine) -> None:
    engine = Recorded(llama)
    steps = StepScheduler(engine)  # type: ignore[arg-type]
    turns = [steps.turn(), steps.turn()]
    contexts = [llama.new_context(), llama.new_context()]
    for context in contexts:
        llama.prefill(context, tokens(20))
    threads = [threading.Thread(target=steps.step, args=(*one,)) for one in zip(contexts, [tokens(1)] * 2, turns)]
    with held(engine, 2, steps):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert engine.passes == [[1, 1]]
    assert set(steps._expected.values()) == set(turns), "both may want another token at once"
    steps.end(turns[0])
    assert set(steps._expected.values()) == {turns[1]}


def test_a_pass_waits_for_the_rest_of_a_prompt_but_not_for_what_has_ended(llama: TorchEngine) -> None:
    (one, decoding), logits = waiting(llama, (300, 1), (1, 2)), np.zeros(4, "<f4")
    one.settle(None, 0.1)
    decoding.settle(logits, 0.1)
    assert one.returns
    assert decoding.returns
    for done, result in ((one, logits), (one, EngineError("it is broken")), (decoding, EngineError("it is broken"))):
        done.logits = None
        done.settle(result, 0.1)
        assert not done.returns


def test_a_prefill_stays_in_slices_while_an_answer_samples(llama: TorchEngine) -> None:
    planner = PassPlanner()
    decoding, prefill = waiting(llama, (1, 1)), waiting(llama, (300, 2))
    planner.done(decoding, 0.01, 5.0)
    assert planner.plan(prefill, 5.1, batches=True)[1] == FIRST_SLICE
    assert planner.plan(prefill, 6.0, batches=True)[1] == PATIENT, "others may come"
    assert planner.plan(prefill, 36.0, batches=True)[1] is None
    two = waiting(llama, (1, 1), (1, 2))
    planner.done(two, 0.01, 37.0)
    planner.end(two[0].turn)
    assert planner.plan(prefill, 37.1, batches=True)[1] == FIRST_SLICE
    planner.end(two[1].turn)
    assert planner.plan(prefill, 37.1, batches=True)[1] == PATIENT


def test_the_end_of_a_prompt_is_not_cut_off_for_a_few_tokens(llama: TorchEngine) -> None:
    planner, (alone,) = PassPlanner(), waiting(llama, (512, 1))
    alone.start = alone.context.n - 512  # so many were computed
    planner.done([alone], 0.25, 0.0)
    decoding = waiting(llama, (1, 1))
    for _ in range(3):
        planner.plan(decoding, 5.0, batches=True)
        planner.done(decoding, 0.01, 5.0)
    both = waiting(llama, (1, 1), (400, 2))
    _, limit = planner.plan(both, 5.1, batches=True)
    assert limit == int(0.5 * 2048 * (0.85 * UNSEEN - 0.01))
    for left, taken in ((int(limit / 0.85), int(limit / 0.85)), (int(limit / 0.85) + 2, limit), (limit - 40, limit)):
        one = waiting(llama, (1, 1), (left, 2))
        assert planner.plan(one, 5.1, batches=True) == (one, taken)


def test_a_prefill_takes_more_at_a_time_where_others_wait_no_longer_for_that(llama: TorchEngine) -> None:
    planner = PassPlanner()
    one, two = waiting(llama, (600, 1), (500, 2))
    for seconds, limit in ((0.1, 512), (0.2, 256), (0.39, 131), (3.0, PATIENT)):
        one.start = one.context.n - PATIENT  # so many were computed
        planner.done([one], seconds, 0.0)
        assert planner.plan([one, two], 1.0, batches=True) == ([one], limit)
    one.start = one.context.n - PATIENT + 1
    planner.done([one], 0.001, 0.0)
    assert planner.plan([one, two], 1.0, batches=True) == ([one], PATIENT), "the end of a prompt says little"


def test_prefills_take_turns_with_short_ones_that_come_meanwhile(llama: TorchEngine) -> None:
    planner = PassPlanner()
    one, two = waiting(llama, (600, 1), (500, 2))
    assert planner.plan([one], 0.0, batches=True) == ([one], None), "nobody else is there"
    assert planner.plan([one, two], 1.0, batches=True) == ([one], PATIENT)
    (short,) = waiting(llama, (40, 3))
    assert planner.plan([one, two, short], 2.0, batches=True) == ([short], PATIENT)
    more = waiting(llama, (50, 4), (60, 5), (30, 6))
    assert planner.plan([one, short, *more], 2.0, batches=True) == ([short, more[0]], PATIENT), "whole ones, in order"
    assert planner.plan([one, short, *more], 2.0, batches=False) == ([short], PATIENT)
    assert planner.plan([one, *waiting(llama, (900, 7))], 2.0, batches=True) == ([one], PATIENT), "long ones go alone"


def test_a_prompt_right_behind_an_answer_has_the_passes_of_any_other(llama: TorchEngine) -> None:
    """Else it would have other bits than the same prompt later, on engines that round by the length of a pass."""
    engine = Recorded(llama)
    # No time passes between the answers.
    runtime = Runtime(engine, None, RuntimeOptions(text=Letters(), clock=lambda: 0.0, context_cache_bytes=0))  # type: ignore[arg-type]
    passes = []
    for seed in range(2):
        engine.passes.clear()
        runtime.complete(tokens(300, seed=seed), SamplingParams(max_tokens=4, ignore_eos=True)).drain()
        passes.append(list(engine.passes))
    assert passes[0] == passes[1]
    assert passes[0][-3:] == [[1]] * 3


@contextmanager
def held(engine: Recorded, expected: int, steps: StepScheduler) -> Iterator[None]:
    """Inside, threads come and wait; at the end all ``expected`` of them do, and the engine goes on."""
    with steps.exclusive():
        yield
        until(lambda: len(steps._waiting) == expected)


@pytest.mark.parametrize("batch", [True, False])
def test_each_gets_what_it_would_get_alone(llama: TorchEngine, batch: bool) -> None:
    engine = Recorded(llama, batch)
    steps = StepScheduler(engine)  # type: ignore[arg-type]
    prompts = [tokens(n, seed=n) for n in (130, 7, 300, 1, 64)]
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        context = llama.new_context()
        logits, _ = steps.advance(context, prompts[i], RequestTurn(i))
        more = [logits]
        for token in prompts[i][:5]:
            more.append(steps.advance(context, np.array([token], "<i4"))[0])
        found[i] = context.tokens, more

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    with held(engine, len(threads), steps):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(patient(60))
    for i, prompt in enumerate(prompts):
        ids, logits = found[i]
        context = llama.new_context()
        expected = [llama.prefill(context, prompt)]
        expected += [llama.prefill(context, np.array([token], "<i4")) for token in prompt[:5]]
        assert np.array_equal(ids, np.concatenate([prompt, prompt[:5]]))
        for a, b in zip(logits, expected):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(np.abs(b).max()))
    assert steps.stats().contexts == sum(map(len, engine.passes))
    if batch:
        assert max(map(len, engine.passes)) >= 2
        mixed = [one for one in engine.passes if len(one) > 1 and 1 in one]
        assert mixed
        assert any(1 < count < 300 for one in mixed for count in one)
    else:
        assert {len(one) for one in engine.passes} == {1}


def test_who_asks_what_cannot_be_computed_fails_alone(llama: TorchEngine) -> None:
    engine = Recorded(llama)
    steps = StepScheduler(engine)  # type: ignore[arg-type]
    prompts = [tokens(40), np.array([llama.space.vocab_size], "<i4"), np.array([3], "<i4")]
    ended: dict[int, Any] = {}

    def run(i: int) -> None:
        try:
            ended[i], _ = steps.advance(llama.new_context(), prompts[i], RequestTurn(i))
        except Exception as error:
            ended[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    with held(engine, 3, steps):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert isinstance(ended[1], TokenRangeError)
    assert sorted(engine.passes[0])[:2] == [0, 1]
    for i in (0, 2):
        np.testing.assert_allclose(ended[i], llama.prefill(llama.new_context(), prompts[i]), atol=1e-4)


def test_an_interrupt_of_one_thread_leaves_the_others_their_answers(llama: TorchEngine) -> None:
    engine = Recorded(llama)
    steps = StepScheduler(engine)  # type: ignore[arg-type]
    ended: list[Any] = []
    interrupts = iter([KeyboardInterrupt()])

    def interrupt() -> None:
        for one in interrupts:
            raise one

    def run() -> None:
        try:
            ended.append(steps.advance(llama.new_context(), tokens(20))[0])
        except KeyboardInterrupt as error:
            ended.append(error)

    engine.before = interrupt
    threads = [threading.Thread(target=run) for _ in range(3)]
    with held(engine, 3, steps):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert sorted(type(one).__name__ for one in ended) == ["KeyboardInterrupt", "ndarray", "ndarray"]


def test_a_prefill_that_is_cancelled_ends_before_its_next_pass(llama: TorchEngine) -> None:
    engine = Recorded(llama)
    steps = StepScheduler(engine)  # type: ignore[arg-type]
    turn, context = steps.turn(), llama.new_context()
    engine.before = lambda: steps.cancel(turn)
    with pytest.raises(RequestCancelledError):
        steps.advance(context, tokens(3 * llama._model.chunk), turn)
    assert context.n == sum(engine.passes[0]) < 3 * llama._model.chunk
    assert len(engine.passes) == 1
    steps.advance(context, tokens(3))


def test_who_waits_for_a_pass_is_cancelled_at_once(llama: TorchEngine) -> None:
    steps, ended = StepScheduler(llama), threading.Event()
    turn = steps.turn()

    def run() -> None:
        with pytest.raises(RequestCancelledError):
            steps.advance(llama.new_context(), tokens(5), turn)
        ended.set()

    thread = threading.Thread(target=run)
    with steps.exclusive():
        thread.start()
        until(lambda: steps._waiting)
        steps.cancel(turn)
        assert ended.wait(patient(10))
    thread.join()


def test_answers_side_by_side_are_those_of_one_after_the_other(llama: TorchEngine) -> None:
    prompts = [tokens(90 + 30 * i, seed=i) for i in range(4)]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    alone = Runtime(llama, None, RuntimeOptions(text=Letters()))
    expected = [alone.complete(prompt, greedy).drain() for prompt in prompts]
    runtime = Runtime(llama, None, RuntimeOptions(text=Letters()))
    found: dict[int, str] = {}

    def run(i: int) -> None:
        found[i] = runtime.complete(prompts[i], greedy).drain()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert [found[i] for i in range(4)] == expected
    stats = runtime.steps.stats()
    assert stats.passes < stats.contexts  # some passes were shared
