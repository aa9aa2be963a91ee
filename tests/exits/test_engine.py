"""Tokens that leave a torch model early pass the contract of exits, and what only that engine does with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.testing.engine.exits import ALWAYS, ExitContract, step_of
from support.early import early_engine, early_model, ramps_of
from support.tiny_models import tiny_model


class TestTorch(ExitContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Any:
        return early_engine()


@pytest.fixture(scope="module")
def engine() -> Any:
    return early_engine()


def ids_of(n: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(3, 250, n).astype("<i4")


def test_forks_and_probes_complete_a_context_first(engine: Any) -> None:
    ids = ids_of(40, 4)
    for call in (
        lambda c: engine.fork(c, 1),
        lambda c: engine.row_errors(c, np.array([3, 11], "<i4")),
    ):
        context = engine.new_context()
        engine.prefill(context, ids[:12])
        step_of(engine, context, ids[12:13], ExitPlan((1,), {1: ALWAYS}))
        call(context)
        assert not context.pending
        context.check()


def test_a_failure_leaves_what_was_there(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(30, 5)
    context, whole = engine.new_context(), engine.new_context()
    engine.prefill(context, ids[:12])
    engine.prefill(whole, ids[:14])
    step_of(engine, context, ids[12:13], ExitPlan((0,), {0: ALWAYS}))
    broken = engine.model.model.layers[4].mlp
    with monkeypatch.context() as patch:
        patch.setattr(broken, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            step_of(engine, context, ids[13:14], ExitPlan())
    context.check()
    assert context.n == 13
    step = step_of(engine, context, ids[13:14], ExitPlan((0, 1)))
    assert len(step.rows) == 2
    expected = engine.prefill(whole, ids[14:15])
    found = engine.prefill(context, ids[14:15])
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["gemma3", "mamba2"])
def test_models_that_tokens_cannot_leave_say_why(name: str) -> None:
    from ctxreuse.engines.torch_hf import TorchEngine

    engine = TorchEngine(tiny_model(name), block_tokens=16)
    assert "recurrent states or sliding windows" in engine.ramps
    with pytest.raises(EngineError, match="recurrent states or sliding windows"):
        step_of(engine, engine.new_context(), ids_of(1), ExitPlan())


def test_without_a_profile_the_reason_names_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    assert "ctxreuse calibrate" in early_engine(exits=False).ramps


def test_a_profile_of_another_shape_is_refused(engine: Any) -> None:
    other = ramps_of(early_model(layers=4), engine.space, (2,))
    with pytest.raises(EngineError, match="no ramps of this model"):
        early_engine(exits=False).use_exits(other.__class__(other.model, other.width, 4, other.ramps))


def test_a_pass_computes_several_contexts_at_once_and_rows_that_left_later(engine: Any) -> None:
    contexts = [engine.new_context() for _ in range(3)]
    for number, context in enumerate(contexts):
        engine.prefill(context, ids_of(12 + number, number))
    assert engine.batches  # found out by trying
    leave, stay = ExitPlan((0, 1), {0: ALWAYS}), ExitPlan((0, 1))
    for plan, last in ((leave, 0), (leave, 0), (stay, 9)):
        rows = rows_through(engine, [(context, ids_of(1), plan) for context in contexts])
        assert rows.counts == [3, last]
        for context in contexts:
            context.check()


class Rows(NamedTuple):
    result: Any
    counts: list[int]


def rows_through(engine: Any, batch: Any) -> Rows:
    """What a step returns, and how many rows the first and the last layer computed in it."""
    counts, hooks = list[int](), []
    for layer in (engine.model.model.layers[0], engine.model.model.layers[-1]):
        seen = lambda _, given, __: counts.append(given[0].shape[1])  # noqa: E731
        hooks.append(layer.register_forward_hook(seen))
    try:
        return Rows(engine.exit_step(batch), counts if len(counts) > 1 else [*counts, 0])
    finally:
        for hook in hooks:
            hook.remove()
