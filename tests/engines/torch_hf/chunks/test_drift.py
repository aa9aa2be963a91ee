"""Drift correction: the common error of rows relocated together is estimated from recomputed ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import parse
from ctxreuse.engines.chunks import BlockRows
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer
from ctxreuse.engines.torch_hf.chunks.drift import DriftCorrection, _by_torch
from ctxreuse.errors import EngineError
from ctxreuse.kernels.drift import DriftFit, correct_drift
from ctxreuse.reuse.inplace import AttachedRun
from ctxreuse.rope import Rotary
from ctxreuse.testing.engine import random_tokens, seal
from ctxreuse.testing.engine.chunk_contexts import relocations_of
from support.examples import examples

LEVEL = "approx~kl-0.05"
HEADS, DIM = 2, 8
ROTARIES = [
    Rotary("none"),
    Rotary("half", (1.0, 0.1, 0.01, 0.001)),
    Rotary("pairs", (1.0, 0.1, 0.01, 0.001)),
    Rotary("half", (1.0, 0.05), scale=1.5),  # half of the dims are turned
]


def layer_of(k, v):
    """A layer that holds these."""
    layer = ArenaLayer()
    layer.bind(k, v)
    layer.resize(k.shape[2])
    return layer


def shifted(rotary: Rotary, n: int, noise: float, seed: int):
    """K and V as they should be, and as stored: all rows off by one vector before K is rotated."""
    rng = np.random.default_rng(seed)
    right = [rng.standard_normal((HEADS, n, DIM)).astype(np.float32) for _ in range(2)]
    off = [rng.standard_normal((HEADS, 1, DIM)).astype(np.float32) for _ in range(2)]
    stored = [r - o + noise * rng.standard_normal(r.shape).astype(np.float32) for r, o in zip(right, off)]
    where = np.arange(n)
    k = [rotary.rotate(rows, where) for rows in (right[0], stored[0])]
    return [torch.from_numpy(rows)[None] for rows in (k[0], right[1])], [
        torch.from_numpy(rows.copy())[None] for rows in (k[1], stored[1])
    ]


@examples("normal")
@given(
    rotary=st.sampled_from(ROTARIES),
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True).map(sorted),
    cut=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_what_is_common_is_set_right_as_far_as_it_was_seen(rotary, rows, cut, seed):
    spans, n = [(5, 40), (40, 90)], 100
    right, stored = shifted(rotary, n, 0.0, seed)
    before = [plane.clone() for plane in stored]
    layer = layer_of(*stored)
    drift = DriftCorrection(spans, np.array(rows), {layer: rotary})
    for part in (rows[:cut], rows[cut:]):
        if not part:
            continue
        at = torch.tensor(part)
        drift.begin(at)
        fresh = [plane[:, :, at] for plane in right]
        drift.correct(layer, *fresh)
        for plane, new in zip(stored, fresh):
            plane.index_copy_(2, at, new)
    for plane, was, wanted in zip(stored, before, right):
        off, left = ((x[0] - wanted[0]).norm(dim=(0, 2)) for x in (was, plane))
        for row in range(n):
            run = next((span for span in spans if span[0] <= row < span[1]), None)
            if row in rows:
                assert left[row] == 0
            elif run is None:
                assert left[row] == off[row]
            else:
                known = [r for r in rows if run[0] + 8 <= r < run[1]]
                # What each forward tells is of the rows up to its last one, or to the run's end.
                shares = [len(set(known) & set(part)) for part in (rows[:cut], rows[cut:])]
                possible = [off[row] * 4 / (4 + count) for count in {0, *shares}]
                assert min(abs(left[row] - one) for one in possible) <= 1e-4 * off[row]
                if known and row > known[-1]:
                    assert left[row] < 0.9 * off[row]


def test_rows_that_are_off_by_far_more_than_others_tell_nothing():
    right, stored = shifted(ROTARIES[1], 60, 0.05, 1)
    for plane in stored:
        plane[0, :, 20] += 50
    rows = np.array([12, 20, 30, 40, 50])
    layer = layer_of(*stored)
    drift = DriftCorrection([(0, 60)], rows, {layer: ROTARIES[1]})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, *(plane[:, :, rows] for plane in right))
    left = (stored[1] - right[1])[0, :, 55]
    assert float(left.abs().max()) < 3


def placed(engine, rows, drift):
    ids = random_tokens(engine, 64)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 16, seed=1))
    engine.chunks.insert_rows(context, ids, list(relocations_of(blocks, 0, 64, 16)), LEVEL)
    logits = engine.chunks.recompute_rows(
        context, np.array(rows, np.int32), random_tokens(engine, 16, seed=2), drift=drift
    )
    return context, logits


def planes(engine, context):
    keys = [bytes([number]) * 32 for number in range(context.n // 16)]
    views = [parse(block) for block in engine.export(context, keys, bytes(32), 0)]
    return {
        (layer, role): np.concatenate([view.array(layer, role) for view in views], axis=1)
        for layer in range(len(engine.space.layers))
        for role in ("k", "v")
    }


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_rows_that_are_left_are_changed_and_no_others(name, engine_of):
    engine, rows = engine_of(name, full_kv_for_windows=True), [30, 41, 52, 66]
    (plain, one), (set_right, other) = placed(engine, rows, ()), placed(engine, rows, [(16, 64)])
    assert (plain.relocated, plain.levels) == (set_right.relocated, set_right.levels)
    assert not np.array_equal(one, other)
    before, after = planes(engine, plain), planes(engine, set_right)
    rest, most = np.setdiff1d(np.arange(16, 64), rows), 0.0
    for at, plane in after.items():
        change = np.abs(plane - before[at]).max((0, 2))
        assert not change[:16].any()
        assert not change[67:80].any()  # behind the span
        most = max(most, change[rest].min() / np.abs(before[at]).max())
    assert most > 1e-5


def test_what_goes_by_the_rows_contents_is_learnt_from_those_that_are_computed():
    rng, n = np.random.default_rng(3), 200
    rotary = ROTARIES[1]
    stale = [torch.from_numpy(rng.standard_normal((1, HEADS, n, DIM)).astype(np.float32)) for _ in range(2)]
    matrix = torch.from_numpy(rng.standard_normal((HEADS, DIM, DIM)).astype(np.float32)) / DIM
    off = stale[1] @ matrix + 0.5
    stored = [stale[0].clone(), stale[1].clone()]
    rows = np.arange(9, n, 4)
    layer = layer_of(*stored)
    drift = DriftCorrection([(0, n)], rows, {layer: rotary})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, stale[0][:, :, rows], (stale[1] + off)[:, :, rows])
    rest = np.setdiff1d(np.arange(n), rows)
    left = float(((stored[1] - stale[1] - off)[:, :, rest] ** 2).sum() / ((off - off.mean(2, keepdim=True)) ** 2).sum())
    assert left < 0.5 * len(rest) / n  # what a mean leaves is all of it
    assert np.abs((stored[0] - stale[0]).numpy()).max() < 1e-5  # K was right


def test_in_pieces_and_in_half_types(engine_of, tiny):
    """Any number of rows at once: what is computed behind a run sees it set right."""
    rows = list(range(18, 78, 2))
    _, whole = placed(engine_of("llama"), rows, [(16, 80)])
    _, pieces = placed(engine_of("llama", chunk=16), rows, [(16, 80)])
    _, none = placed(engine_of("llama"), rows, ())
    assert np.abs(whole - pieces).max() < np.abs(whole - none).max()
    half = TorchEngine(tiny("llama").to(torch.bfloat16), block_tokens=16, chunk=64)
    context, logits = placed(half, rows, [(16, 80)])
    assert np.isfinite(logits).all()
    assert context.n == 96


def test_only_what_was_moved_together_can_be_set_right(engine_of):
    engine = engine_of("llama")
    for spans in ([(0, 16)], [(10, 30)], [(16, 81)], [(20, 20)], [(16, 40), (30, 60)], [(40, 60), (16, 30)]):
        with pytest.raises(EngineError, match="drift"):
            placed(engine, [30], spans)
    ids = random_tokens(engine, 64)
    stored = engine.chunks.pin_run([BlockRows(parse(data), 0, 16) for data in seal(engine, ids).blocks], "stored")
    context = engine.new_context()
    engine.prefill(context, ids[:5])
    engine.chunks.attach(context, ids, [AttachedRun(5, stored, 0, 64)], LEVEL)
    with pytest.raises(EngineError, match="attached runs"):
        engine.chunks.recompute_rows(context, np.array([9], np.int32), ids[:3], drift=[(5, 69)])


@pytest.mark.parametrize("damage", [np.nan, np.inf, 3e38])
def test_rows_that_are_no_numbers_spoil_no_others(damage):
    right, stored = shifted(ROTARIES[1], 60, 0.05, 1)
    clean = [plane.clone() for plane in stored]
    for plane in stored:
        plane[0, :, 20] = damage
    rows = np.array([12, 20, 30, 40, 50])
    for planes, computed in ((stored, rows), (clean, np.delete(rows, 1))):
        layer = layer_of(*planes)
        drift = DriftCorrection([(0, 60)], computed, {layer: ROTARIES[1]})
        drift.begin(torch.from_numpy(computed))
        drift.correct(layer, *(plane[:, :, computed] for plane in right))
    others = np.delete(np.arange(60), 20)
    for plane, twin in zip(stored, clean):
        assert torch.isfinite(plane[0, :, others]).all()
        assert torch.allclose(plane[0, :, others], twin[0, :, others], atol=1e-4)


def test_runs_of_which_very_many_rows_are_computed():
    rng = np.random.default_rng(5)
    spans, n = [(0, 300), (300, 600), (600, 900)], 900
    stored = [torch.from_numpy(rng.standard_normal((1, HEADS, n, DIM)).astype(np.float32)) for _ in range(2)]
    rows = np.arange(9, n, 2)
    layer = layer_of(*(plane.clone() for plane in stored))
    drift = DriftCorrection(spans, rows, {layer: ROTARIES[0]})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, *(plane[:, :, rows] + 1 for plane in stored))
    left = (layer.values[0, :, ::2] - stored[1][0, :, ::2] - 1).abs()
    assert float(left.max()) < 0.2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: f"{rotary.style}-{2 * len(rotary.inv_freq)}")
def test_the_kernel_and_torch_correct_alike(rotary, dtype, monkeypatch):
    spans, kind = [(5, 40), (43, 120)], getattr(torch, dtype)
    rows = np.array([14, 20, 22, 30, 39, 60, 70, 80, 110])
    right, stored = ([plane.to(kind) for plane in some] for some in shifted(rotary, 130, 0.5, 7))
    room = [torch.zeros(1, HEADS, 200, DIM, dtype=kind) for _ in stored]  # more rows than are in use
    found = []
    for torch_only in (False, True):
        for plane, of in zip(room, stored):
            plane[:, :, :130] = of
        if torch_only:
            monkeypatch.setattr("ctxreuse.engines.torch_hf.chunks.drift._by_kernel", _by_torch)
        layer = layer_of(*(plane[:, :, :130] for plane in room))
        drift = DriftCorrection(spans, rows, {layer: rotary})
        drift.begin(torch.from_numpy(rows))
        drift.correct(layer, *(plane[:, :, rows] for plane in right))
        found.append([plane.float().clone() for plane in room])
    most = 1e-5 if dtype == "float32" else 0.05
    for one, other, was in zip(*found, stored):
        assert (one - other).abs().max() <= most
        assert (one[:, :, :130] - was.float())[:, :, 45:].abs().max() > 0.3
        assert not one[:, :, 130:].any()


def test_what_does_not_fit_is_refused():
    plane, one = np.zeros((HEADS, 20, DIM), np.float32), np.zeros((1, 4, HEADS * DIM), np.float32)
    fit = DriftFit(one, one[:, 0], np.ones(1, np.float32), np.ones((1, 4), np.float32), one, one)
    angles = np.zeros((7, 2), np.float32)
    correct_drift(plane, plane.copy(), "float32", np.array([(3, 10)]), fit, angles, angles)
    for spans in ([(3, 21)], [(-1, 10)], [(10, 3)], [(0, 4), (3, 6)]):
        many = DriftFit(*(np.repeat(x, len(spans), 0) for x in fit))
        with pytest.raises(ValueError, match="spans"):
            correct_drift(plane, plane.copy(), "float32", np.array(spans), many, angles, angles)
    for name in fit._fields:
        short = fit._replace(**{name: np.ascontiguousarray(getattr(fit, name)[..., :-1])})
        with pytest.raises(ValueError, match="fit"):
            correct_drift(plane, plane.copy(), "float32", np.array([(3, 10)]), short, angles, angles)
    for bad in (np.zeros((7, 5), np.float32), np.zeros((6, 2), np.float32)):
        with pytest.raises(ValueError, match="fit"):
            correct_drift(plane, plane.copy(), "float32", np.array([(3, 10)]), fit, bad, bad)
    turned = np.zeros((HEADS, DIM, 20), np.float32).transpose(0, 2, 1)
    with pytest.raises(ValueError, match="fit"):
        correct_drift(turned, plane.copy(), "float32", np.array([(3, 10)]), fit, angles, angles)
    plane.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        correct_drift(plane, plane.copy(), "float32", np.array([(3, 10)]), fit, angles, angles)
