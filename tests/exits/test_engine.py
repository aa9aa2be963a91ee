"""Tokens that leave a torch model early: what is skipped is computed later, to what a full run gives."""

from __future__ import annotations

from typing import Any, NamedTuple

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


def step_of(engine: Any, context: Any, ids: Any, plan: ExitPlan) -> Any:
    (found,) = engine.exit_step([(context, ids, plan)])
    if isinstance(found, Exception):
        raise found
    return found


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
        step = step_of(engine, early, ids[at : at + 1], ExitPlan((0, 1), least))
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
        step = step_of(engine, context, ids[-1:], ExitPlan((ramp,), {ramp: ALWAYS}))
        found[ramp] = step.token
        engine.crop(context, len(ids) - 1)
    return found


def test_blocks_are_whole_before_they_are_exported(engine: Any) -> None:
    ids = ids_of(33, 2)
    early, whole = engine.new_context(), engine.new_context()
    engine.prefill(early, ids[:20])
    engine.prefill(whole, ids)
    for at in range(20, 33):
        assert step_of(engine, early, ids[at : at + 1], ExitPlan((0,), {0: ALWAYS})).left == 0
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


def test_it_is_an_exit_engine(engine: Any) -> None:
    assert isinstance(engine, ExitEngine)
    saved = [ramp.saved for ramp in engine.ramps]
    assert saved == sorted(saved, reverse=True)
    assert all(0 < ramp.cost < 1 for ramp in engine.ramps)


@pytest.mark.parametrize("seed", range(2))
def test_several_contexts_step_together_and_leave_together(engine: Any, seed: int) -> None:
    rng, count = np.random.default_rng(seed), 3
    texts = [ids_of(60, seed * 10 + number) for number in range(count)]
    early, whole = ([engine.new_context() for _ in texts] for _ in range(2))
    for number, ids in enumerate(texts):
        engine.prefill(early[number], ids[: 12 + number])
        engine.prefill(whole[number], ids[: 12 + number])
    assert engine.batches  # found out by trying
    due, left = 0, 0
    for at in range(12, 40):
        least = [{ramp: ALWAYS for ramp in (0, 1) if rng.random() < 0.7} for _ in texts]
        goes = next((ramp for ramp in (0, 1) if all(ramp in one for one in least)), -1)
        plans = [ExitPlan((0, 1), one) for one in least]
        parts = [ids[at + number : at + number + 1] for number, ids in enumerate(texts)]
        rows = rows_through(engine, list(zip(early, parts, plans)))
        steps = rows.result
        assert rows.counts[0] == count, "the first layer computes all of them at once"
        assert [step.left for step in steps] == [goes] * count, "the first ramp at which all may leave"
        assert rows.counts[-1] == (0 if goes >= 0 else count * (1 + due)), "rows that had left go through the last"
        due, left = (due + 1, left + 1) if goes >= 0 else (0, left)
        for number, step in enumerate(steps):
            early[number].check()
            expected = engine.prefill(whole[number], parts[number])
            if step.left < 0:
                assert np.abs(step.logits - expected).max() <= 1e-4 * np.abs(expected).max()
    assert left > 5
    for one, other in zip(early, whole):
        engine.complete_rows(one)
        for mine, theirs in zip(rows_of(one), rows_of(other)):
            assert float((mine - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


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


def test_an_error_of_one_harms_no_other(engine: Any) -> None:
    ids = ids_of(20, 6)
    good, other = engine.new_context(), engine.new_context()
    engine.prefill(good, ids[:12])
    engine.prefill(other, ids[:12])
    wrong = np.array([engine.space.vocab_size], "<i4")
    plan = ExitPlan((0,), {0: ALWAYS})
    found = engine.exit_step([(good, ids[12:13], plan), (other, wrong, plan), (other, ids[12:13], plan)])
    assert [getattr(step, "left", None) for step in found] == [0, None, 0]
    assert isinstance(found[1], EngineError)
