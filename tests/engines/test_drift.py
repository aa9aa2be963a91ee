"""Drift: what rows have in common that were moved together is taken from those that are computed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.block import parse
from ctxreuse.engines.gauge import Rotary
from ctxreuse.engines.moving import Rows
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.drift import Drift
from ctxreuse.engines.torch_hf.layers import ArenaLayer
from ctxreuse.errors import EngineError
from ctxreuse.reuse.attend import HeldMove
from ctxreuse.testing.engine import random_tokens, seal
from ctxreuse.testing.moving import moves_of

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


def moved(rotary: Rotary, n: int, noise: float, seed: int):
    """K and V as they should be, and as they are held: all rows off by one vector before K is turned."""
    rng = np.random.default_rng(seed)
    right = [rng.standard_normal((HEADS, n, DIM)).astype(np.float32) for _ in range(2)]
    off = [rng.standard_normal((HEADS, 1, DIM)).astype(np.float32) for _ in range(2)]
    held = [r - o + noise * rng.standard_normal(r.shape).astype(np.float32) for r, o in zip(right, off)]
    where = np.arange(n)
    k = [rotary.turn(rows, where, back=False) for rows in (right[0], held[0])]
    return [torch.from_numpy(rows)[None] for rows in (k[0], right[1])], [
        torch.from_numpy(rows.copy())[None] for rows in (k[1], held[1])
    ]


@settings(max_examples=60, deadline=None)
@given(
    rotary=st.sampled_from(ROTARIES),
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True).map(sorted),
    cut=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_what_is_common_is_set_right_as_far_as_it_was_seen(rotary, rows, cut, seed):
    spans, n = [(5, 40), (40, 90)], 100
    right, held = moved(rotary, n, 0.0, seed)
    before = [plane.clone() for plane in held]
    layer = layer_of(*held)
    drift = Drift(spans, np.array(rows), {layer: rotary})
    for part in (rows[:cut], rows[cut:]):
        if not part:
            continue
        at = torch.tensor(part)
        drift.begin(at)
        fresh = [plane[:, :, at] for plane in right]
        drift.correct(layer, *fresh)
        for plane, new in zip(held, fresh):
            plane.index_copy_(2, at, new)
    for plane, was, wanted in zip(held, before, right):
        off, left = ((x[0] - wanted[0]).norm(dim=(0, 2)) for x in (was, plane))
        for row in range(n):
            run = next((span for span in spans if span[0] <= row < span[1]), None)
            if row in rows:
                assert left[row] == 0
            elif run is None:
                assert left[row] == off[row]
            else:
                told = [r for r in rows if run[0] + 8 <= r < run[1]]
                # What each forward tells is of the rows up to its last one, or to the run's end.
                shares = [len(set(told) & set(part)) for part in (rows[:cut], rows[cut:])]
                possible = [off[row] * 4 / (4 + count) for count in {0, *shares}]
                assert min(abs(left[row] - one) for one in possible) <= 1e-4 * off[row]
                if told and row > told[-1]:
                    assert left[row] < 0.9 * off[row]


def test_rows_that_are_off_by_far_more_than_others_tell_nothing():
    right, held = moved(ROTARIES[1], 60, 0.05, 1)
    for plane in held:
        plane[0, :, 20] += 50
    rows = np.array([12, 20, 30, 40, 50])
    layer = layer_of(*held)
    drift = Drift([(0, 60)], rows, {layer: ROTARIES[1]})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, *(plane[:, :, rows] for plane in right))
    left = (held[1] - right[1])[0, :, 55]
    assert float(left.abs().max()) < 3


def placed(engine, rows, drift):
    ids = random_tokens(engine, 64)
    blocks = [parse(data) for data in seal(engine, ids).blocks]
    live = engine.start()
    engine.prefill(live, random_tokens(engine, 16, seed=1))
    engine.place(live, ids, list(moves_of(blocks, 0, 64, 16)), LEVEL)
    logits = engine.mend(live, np.array(rows, np.int32), random_tokens(engine, 16, seed=2), drift=drift)
    return live, logits


def planes(engine, live):
    keys = [bytes([number]) * 32 for number in range(live.n // 16)]
    views = [parse(block) for block in engine.export(live, keys, bytes(32), 0)]
    return {
        (layer, role): np.concatenate([view.array(layer, role) for view in views], axis=1)
        for layer in range(len(engine.space.layers))
        for role in ("k", "v")
    }


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_rows_that_are_left_are_changed_and_no_others(name, engine_of):
    engine, rows = engine_of(name, whole=True), [30, 41, 52, 66]
    (plain, one), (set_right, other) = placed(engine, rows, ()), placed(engine, rows, [(16, 64)])
    assert (plain.moved, plain.levels) == (set_right.moved, set_right.levels)
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
    held = [stale[0].clone(), stale[1].clone()]
    rows = np.arange(9, n, 4)
    layer = layer_of(*held)
    drift = Drift([(0, n)], rows, {layer: rotary})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, stale[0][:, :, rows], (stale[1] + off)[:, :, rows])
    rest = np.setdiff1d(np.arange(n), rows)
    left = float(((held[1] - stale[1] - off)[:, :, rest] ** 2).sum() / ((off - off.mean(2, keepdim=True)) ** 2).sum())
    assert left < 0.5 * len(rest) / n  # what a mean leaves is all of it
    assert np.abs((held[0] - stale[0]).numpy()).max() < 1e-5  # K was right


def test_in_pieces_and_in_half_types(engine_of, tiny):
    """Any number of rows at once: what is computed behind a run sees it set right."""
    rows = list(range(18, 78, 2))
    _, whole = placed(engine_of("llama"), rows, [(16, 80)])
    _, pieces = placed(engine_of("llama", chunk=16), rows, [(16, 80)])
    _, none = placed(engine_of("llama"), rows, ())
    assert np.abs(whole - pieces).max() < np.abs(whole - none).max()
    half = TorchEngine(tiny("llama").to(torch.bfloat16), block_tokens=16, chunk=64)
    live, logits = placed(half, rows, [(16, 80)])
    assert np.isfinite(logits).all()
    assert live.n == 96


def test_only_what_was_moved_together_can_be_set_right(engine_of):
    engine = engine_of("llama")
    for spans in ([(0, 16)], [(10, 30)], [(16, 81)], [(20, 20)], [(16, 40), (30, 60)], [(40, 60), (16, 30)]):
        with pytest.raises(EngineError, match="drift"):
            placed(engine, [30], spans)
    ids = random_tokens(engine, 64)
    held = engine.hold([Rows(parse(data), 0, 16) for data in seal(engine, ids).blocks], "stored")
    live = engine.start()
    engine.prefill(live, ids[:5])
    engine.show(live, ids, [HeldMove(5, held, 0, 64)], LEVEL)
    with pytest.raises(EngineError, match="held"):
        engine.mend(live, np.array([9], np.int32), ids[:3], drift=[(5, 69)])


@pytest.mark.parametrize("damage", [np.nan, np.inf, 3e38])
def test_rows_that_are_no_numbers_spoil_no_others(damage):
    right, held = moved(ROTARIES[1], 60, 0.05, 1)
    clean = [plane.clone() for plane in held]
    for plane in held:
        plane[0, :, 20] = damage
    rows = np.array([12, 20, 30, 40, 50])
    for planes, computed in ((held, rows), (clean, np.delete(rows, 1))):
        layer = layer_of(*planes)
        drift = Drift([(0, 60)], computed, {layer: ROTARIES[1]})
        drift.begin(torch.from_numpy(computed))
        drift.correct(layer, *(plane[:, :, computed] for plane in right))
    others = np.delete(np.arange(60), 20)
    for plane, twin in zip(held, clean):
        assert torch.isfinite(plane[0, :, others]).all()
        assert torch.allclose(plane[0, :, others], twin[0, :, others], atol=1e-4)


def test_runs_of_which_very_many_rows_are_computed():
    rng = np.random.default_rng(5)
    spans, n = [(0, 300), (300, 600), (600, 900)], 900
    held = [torch.from_numpy(rng.standard_normal((1, HEADS, n, DIM)).astype(np.float32)) for _ in range(2)]
    rows = np.arange(9, n, 2)
    layer = layer_of(*(plane.clone() for plane in held))
    drift = Drift(spans, rows, {layer: ROTARIES[0]})
    drift.begin(torch.from_numpy(rows))
    drift.correct(layer, *(plane[:, :, rows] + 1 for plane in held))
    left = (layer.values[0, :, ::2] - held[1][0, :, ::2] - 1).abs()
    assert float(left.max()) < 0.2
