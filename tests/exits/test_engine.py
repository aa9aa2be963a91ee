"""Tokens that leave a torch model early: what is skipped is computed later, to what a full run gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.exits import ExitEngine
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.identity.keys import ROOT
from support.early import early_engine, early_model, ramps_of
from support.tiny_models import tiny_model

ALWAYS = -1e9


@pytest.fixture(scope="module")
def engine() -> Any:
    return early_engine()


def ids_of(n: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(3, 250, n).astype("<i4")


def rows_of(context: Any) -> list[Any]:
    return [tensor.clone() for _, layer in context.arena_layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("seed", range(3))
def test_skipped_layers_are_computed_as_a_full_run_does(engine: Any, seed: int) -> None:
    rng, ids = np.random.default_rng(seed), ids_of(90)
    early, whole = engine.new_context(), engine.new_context()
    engine.prefill(early, ids[:20])
    engine.prefill(whole, ids[:20])
    due = 0
    for at in range(20, 90):
        least = {int(rng.integers(2)): ALWAYS} if rng.random() < 0.7 else {}
        step = engine.exit_step(early, ids[at : at + 1], ExitPlan((0, 1), least))
        early.check()
        expected = engine.prefill(whole, ids[at : at + 1])
        if step.left >= 0:
            assert step.logits is None
            assert not step.rows
            due += 1
            continue
        assert [row.left >= 0 for row in step.rows] == [True] * due + [False]
        assert all(set(row.right) == {0, 1} for row in step.rows), "all ramps are computed, also after a token left"
        due = 0
        assert np.abs(step.logits - expected).max() <= 1e-4 * np.abs(expected).max()
        assert step.rows[-1].right == {
            ramp: said == int(expected.argmax()) for ramp, said in said_by(engine, ids[: at + 1]).items()
        }
    assert len(engine.complete_rows(early)) == due
    assert engine.complete_rows(early) == ()
    for one, other in zip(rows_of(early), rows_of(whole)):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


def said_by(engine: Any, ids: Any) -> dict[int, int]:
    """What ramps say after the last of these tokens, in a context of its own."""
    context = engine.new_context()
    engine.prefill(context, ids[:-1])
    found = {}
    for ramp in (0, 1):
        step = engine.exit_step(context, ids[-1:], ExitPlan((ramp,), {ramp: ALWAYS}))
        found[ramp] = step.token
        engine.crop(context, len(ids) - 1)
    return found


def test_blocks_are_whole_before_they_are_exported(engine: Any) -> None:
    ids = ids_of(33, 2)
    early, whole = engine.new_context(), engine.new_context()
    engine.prefill(early, ids[:20])
    engine.prefill(whole, ids)
    for at in range(20, 33):
        assert engine.exit_step(early, ids[at : at + 1], ExitPlan((0,), {0: ALWAYS})).left == 0
    assert len(early.pending) == 13
    keys = [bytes([n]) * 32 for n in range(2)]
    (one, two), (expected, also) = (list(engine.export(of, keys, ROOT, 0)) for of in (early, whole))
    assert not early.pending
    assert len(one) == len(expected)
    assert early.levels == whole.levels, "what is completed is exact"
    assert len(engine.complete_rows(early)) == 13
    last = engine.prefill(early, ids_of(1, 3)), engine.prefill(whole, ids_of(1, 3))
    assert np.abs(last[0] - last[1]).max() <= 1e-4 * np.abs(last[1]).max()
    assert len(two) == len(also)


def test_other_calls_complete_a_context_first(engine: Any) -> None:
    ids = ids_of(40, 4)
    for call in (
        lambda c: engine.step([(c, ids[:3])]),
        lambda c: engine.fork(c, 1),
        lambda c: engine.crop(c, 10),
        lambda c: engine.row_errors(c, np.array([3, 11], "<i4")),
    ):
        context = engine.new_context()
        engine.prefill(context, ids[:12])
        engine.exit_step(context, ids[12:13], ExitPlan((1,), {1: ALWAYS}))
        call(context)
        assert not context.pending
        context.check()


def test_a_failure_leaves_what_was_there(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(30, 5)
    context, whole = engine.new_context(), engine.new_context()
    engine.prefill(context, ids[:12])
    engine.prefill(whole, ids[:14])
    engine.exit_step(context, ids[12:13], ExitPlan((0,), {0: ALWAYS}))
    broken = engine.model.model.layers[4].mlp
    with monkeypatch.context() as patch:
        patch.setattr(broken, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            engine.exit_step(context, ids[13:14], ExitPlan())
    context.check()
    assert context.n == 13
    step = engine.exit_step(context, ids[13:14], ExitPlan((0, 1)))
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
        engine.exit_step(engine.new_context(), ids_of(1), ExitPlan())


def test_without_a_profile_the_reason_names_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    assert "ctxreuse calibrate" in early_engine(exits=False).ramps


def test_a_profile_of_another_shape_is_refused(engine: Any) -> None:
    other = ramps_of(early_model(layers=4), engine.space, (2,))
    with pytest.raises(EngineError, match="no ramps of this model"):
        early_engine(exits=False).use_exits(other.__class__(other.model, other.width, 4, other.ramps))


def test_it_is_an_exit_engine(engine: Any) -> None:
    assert isinstance(engine, ExitEngine)
    saved = [ramp.saved for ramp in engine.ramps]
    assert saved == sorted(saved, reverse=True)
    assert all(0 < ramp.cost < 1 for ramp in engine.ramps)
