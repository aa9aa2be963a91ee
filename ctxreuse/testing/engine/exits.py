"""ExitContract: what any engine must do whose tokens can leave early.

::

    class TestMine(ExitContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

Its model has two ramps, and K and V of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import parse
from ctxreuse.dtypes import VALUES
from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.engines.exits import ExitEngine, ExitStep
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.testing.sealed import random_tokens

__all__ = ["ALWAYS", "ExitContract", "step_of"]

#: With this score a token leaves whatever a ramp says.
ALWAYS = -1e9
_RAMPS = (0, 1)


class _Exits(Engine, ExitEngine, Protocol):
    """An engine with exits."""


class ExitContract:
    """Inherit, and give a fixture ``engine``."""

    #: Largest |difference| of what is completed and what a full run computes, as a share of the largest number.
    tolerance = 1e-4

    def test_it_is_an_exit_engine(self, engine: _Exits) -> None:
        assert isinstance(engine, ExitEngine)
        assert len(engine.ramps) == len(_RAMPS)
        saved = [ramp.saved for ramp in engine.ramps if not isinstance(ramp, str)]
        assert saved == sorted(saved, reverse=True)
        assert all(0 < ramp.cost < 1 for ramp in engine.ramps if not isinstance(ramp, str))

    def test_skipped_layers_are_computed_as_a_full_run_does(self, engine: _Exits) -> None:
        for seed in range(3):
            rng, ids = np.random.default_rng(seed), random_tokens(engine, 90, seed)
            early, whole = _begun(engine, ids[:20]), _begun(engine, ids[:20])
            due = 0
            for at in range(20, 90):
                least = {int(rng.integers(2)): ALWAYS} if rng.random() < 0.7 else {}
                step = step_of(engine, early, ids[at : at + 1], ExitPlan(_RAMPS, least))
                expected = engine.prefill(whole, ids[at : at + 1])
                if step.left >= 0:
                    assert (step.logits, step.rows, step.left) == (None, (), *least)
                    due += 1
                    continue
                assert [row.left >= 0 for row in step.rows] == [True] * due + [False]
                assert all(set(row.right) == {0, 1} for row in step.rows), "all ramps are computed, also after one left"
                due = 0
                assert step.logits is not None
                self._check(step.logits, expected)
                assert step.rows[-1].right == {
                    ramp: said == step.logits.argmax() for ramp, said in _said_by(engine, ids[: at + 1]).items()
                }
            assert len(engine.complete_rows(early)) == due
            assert engine.complete_rows(early) == ()
            assert np.array_equal(early.tokens, ids)
            self._check_blocks(engine, early, whole)

    def test_blocks_are_whole_before_they_are_exported(self, engine: _Exits) -> None:
        ids = random_tokens(engine, 33, 2)
        early, whole = _begun(engine, ids[:20]), _begun(engine, ids)
        for at in range(20, 33):
            assert step_of(engine, early, ids[at : at + 1], ExitPlan((0,), {0: ALWAYS})).left == 0
        self._check_blocks(engine, early, whole)
        assert len(engine.complete_rows(early)) == 13
        assert early.levels == whole.levels, "what is completed is exact"
        more = random_tokens(engine, 1, 3)
        self._check(engine.prefill(early, more), engine.prefill(whole, more))

    def test_other_calls_complete_a_context_first(self, engine: _Exits) -> None:
        ids = random_tokens(engine, 40, 4)
        calls: Sequence[Callable[[Context], object]] = (
            lambda context: engine.step([(context, ids[:3])]),
            lambda context: engine.prefill(context, ids[:3]),
            lambda context: engine.crop(context, 13),
        )
        for call in calls:
            context, whole = _begun(engine, ids[:12]), _begun(engine, ids[:13])
            step_of(engine, context, ids[12:13], ExitPlan((1,), {1: ALWAYS}))
            call(context)
            call(whole)
            assert [row.left for row in engine.complete_rows(context)] == [1]
            self._check_blocks(engine, context, whole)
        context = _begun(engine, ids[:12])
        step_of(engine, context, ids[12:13], ExitPlan((1,), {1: ALWAYS}))
        engine.crop(context, 5)
        assert context.n == 5
        self._check(engine.prefill(context, ids[5:9]), engine.prefill(engine.new_context(), ids[:9]))

    def test_several_contexts_leave_together(self, engine: _Exits) -> None:
        for seed in range(2):
            rng = np.random.default_rng(seed)
            texts = [random_tokens(engine, 60, seed * 10 + number) for number in range(3)]
            early, whole = ([_begun(engine, ids[: 12 + at]) for at, ids in enumerate(texts)] for _ in range(2))
            left = 0
            for at in range(12, 40):
                least = [{ramp: ALWAYS for ramp in _RAMPS if rng.random() < 0.7} for _ in texts]
                goes = next((ramp for ramp in _RAMPS if all(ramp in one for one in least)), -1)
                parts = [ids[at + number : at + number + 1] for number, ids in enumerate(texts)]
                plans = [ExitPlan(_RAMPS, one) for one in least]
                for step, context, part in zip(engine.exit_step(list(zip(early, parts, plans))), whole, parts):
                    assert isinstance(step, ExitStep)
                    assert step.left == (goes if engine.batches else step.left), "the first ramp at which all may leave"
                    left += step.left >= 0
                    expected = engine.prefill(context, part)
                    if step.logits is not None:
                        self._check(step.logits, expected)
            assert left > 15
            for one, other in zip(early, whole):
                engine.complete_rows(one)
                self._check_blocks(engine, one, other)

    def test_an_error_of_one_harms_no_other(self, engine: _Exits) -> None:
        ids = random_tokens(engine, 20, 6)
        good, other = _begun(engine, ids[:12]), _begun(engine, ids[:12])
        wrong, plan = np.array([engine.space.vocab_size], "<i4"), ExitPlan((0,), {0: ALWAYS})
        found = engine.exit_step([(good, ids[12:13], plan), (other, wrong, plan), (other, ids[12:13], plan)])
        assert [getattr(step, "left", None) for step in found] == [0, None, 0]
        assert isinstance(found[1], EngineError)

    def test_several_tokens_run_through_the_whole_model(self, engine: _Exits) -> None:
        ids = random_tokens(engine, 20, 7)
        context = _begun(engine, ids[:12])
        step_of(engine, context, ids[12:13], ExitPlan((0,), {0: ALWAYS}))
        step = step_of(engine, context, ids[13:16], ExitPlan((0,), {0: ALWAYS}))
        assert (step.left, [row.left for row in step.rows]) == (-1, [0, -1])
        assert step.logits is not None
        self._check(step.logits, engine.prefill(engine.new_context(), ids[:16]))

    def _check(self, found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        assert np.abs(found - expected).max() <= self.tolerance * np.abs(expected).max()

    def _check_blocks(self, engine: _Exits, one: Context, other: Context) -> None:
        for found, expected in zip(_planes(engine, one), _planes(engine, other), strict=True):
            self._check(found, expected)


def step_of(engine: _Exits, context: Context, ids: Tokens, plan: ExitPlan) -> ExitStep:
    """One step of one context; raises what it failed with."""
    (found,) = engine.exit_step([(context, ids, plan)])
    if isinstance(found, CtxReuseError):
        raise found
    return found


def _begun(engine: _Exits, ids: Tokens) -> Context:
    context = engine.new_context()
    engine.prefill(context, ids)
    return context


def _said_by(engine: _Exits, ids: Tokens) -> dict[int, int]:
    """What ramps say after the last of these tokens, in a context of its own."""
    context, found = _begun(engine, ids[:-1]), {}
    for ramp in _RAMPS:
        found[ramp] = step_of(engine, context, ids[-1:], ExitPlan((ramp,), {ramp: ALWAYS})).token
        engine.crop(context, len(ids) - 1)
    return found


def _planes(engine: _Exits, context: Context) -> list[Logits]:
    """K and V of all tokens of a context, as its blocks have them."""
    size = engine.space.block_tokens
    keys = [bytes([at + 1]) * 32 for at in range(-(-context.n // size))]
    found = []
    for data in engine.export(context, keys, ROOT, 0, last_partial=context.n % size > 0):
        view = parse(data)
        for plane in view.layout.planes:
            if plane.role in "kv":
                values = np.frombuffer(view.plane(plane.layer, plane.role), VALUES[engine.space.dtype])
                found.append(values.astype(np.float32))
    return found
