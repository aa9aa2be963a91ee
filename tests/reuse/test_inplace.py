"""In-place attention against plain softmax over rows that were copied and rotated; which pages are read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.kernels.attention import Plane, dequantise, quantise
from ctxreuse.reuse.inplace import AttachedRun, InPlaceRuns, PinnedRun, ScoreOptions, Selection, Slab
from ctxreuse.reuse.inplace.pages import bounds_of, ceilings, chosen
from ctxreuse.reuse.inplace.pinned import rotated_queries
from ctxreuse.rope import Rotary
from support.examples import examples

HEADS, GROUP, DIM = 2, 3, 32
TURN = Rotary("half", tuple(10000.0 ** (-i / 16) for i in range(16)))


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x [heads, n, dim] turned to positions [n], float64."""
    angle = np.asarray(positions)[:, None] * np.array(TURN.inv_freq)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :16], x[..., 16:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def plain(q, positions, k, v, at, window=None):
    """softmax(q K^T / sqrt(dim)) V over the rows that each query sees, float64."""
    out = np.zeros(q.shape)
    for head in range(len(q)):
        scores = q[head] @ k[head // GROUP].T / np.sqrt(DIM)
        seen = at[None] <= positions[:, None]
        if window is not None:
            seen &= at[None] > positions[:, None] - window
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[head] = weights / weights.sum(-1, keepdims=True) @ v[head // GROUP]
    return out


def held(rng, count, at, cuts=(), format="fp32"):
    """A run as slabs, and its K (as it was before it was turned) and V."""
    k, v = rng.standard_normal((2, HEADS, count, DIM))
    rotated = turned(k, at + np.arange(count)).astype(np.float32)
    values = v.astype(np.float32)
    bounds = [0, *cuts, count]
    slabs = []
    for a, b in pairwise(bounds):
        # As a block of which only a part is wanted: rows before and behind are others'.
        pad = [np.full((HEADS, 3, DIM), 9.0, np.float32)]
        planes = [quantise(np.concatenate([*pad, x[:, a:b], *pad], 1), format) for x in (rotated, values)]
        slabs.append(Slab(planes[0], planes[1], 3, b - a))
    run = PinnedRun(np.arange(count, dtype=np.int32), at, {0: tuple(slabs)}, format)
    kept = [[dequantise(plane)[:, 3:-3] for plane in (slab.k, slab.v)] for slab in slabs]
    k = turned(np.concatenate([k for k, _ in kept], 1).astype(np.float64), -at - np.arange(count))
    return run, k, np.concatenate([v for _, v in kept], 1).astype(np.float64)


class Own:
    """A context's own memory: rows are written where `InPlaceRuns.place` says."""

    def __init__(self, rng, residents):
        self.rng, self.residents = rng, residents
        self.k, self.v = (np.zeros((HEADS, 400, DIM), np.float32) for _ in range(2))

    def compute(self, positions):
        k, v = self.rng.standard_normal((2, HEADS, len(positions), DIM))
        rows = self.residents.allocate(np.asarray(positions, np.int64))
        self.k[:, rows], self.v[:, rows] = turned(k, np.asarray(positions)), v
        return k, v

    def ask(self, q, positions, **options):
        ready = turned(q, positions).astype(np.float32)
        planes = Plane("fp32", self.k), Plane("fp32", self.v)
        return self.residents.attend(0, ready, np.asarray(positions, np.int64), *planes, TURN, ScoreOptions(**options))


@examples("normal")
@given(data=st.data())
def test_any_context_is_read_as_if_its_rows_had_been_copied(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    n = data.draw(st.integers(0, 9))
    residents = InPlaceRuns(n)
    own = Own(rng, residents)
    k, v = np.zeros((HEADS, 300, DIM)), np.zeros((HEADS, 300, DIM))
    if n:
        k[:, :n], v[:, :n] = own.compute(np.arange(n))
    gaps = []
    format = data.draw(st.sampled_from(["fp32", "int8", "int4"]))
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(1, 30))
        cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=2))) if count > 1 else ()
        run, rk, rv = held(rng, count, data.draw(st.integers(0, 500)), cuts, format)
        row = data.draw(st.integers(0, count - 1))
        take = data.draw(st.integers(1, count - row))
        gap = data.draw(st.integers(0, 3))
        gaps += range(n, n + gap)
        residents.attach(AttachedRun(n + gap, run, row, take))
        n += gap
        k[:, n : n + take], v[:, n : n + take] = rk[:, row : row + take], rv[:, row : row + take]
        n += take
    again = sorted({*gaps, *data.draw(st.sets(st.integers(0, n - 1), max_size=6))})
    if again:
        k[:, again], v[:, again] = own.compute(again)
    residents.check(n)
    window = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    for count in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        q, positions = rng.standard_normal((HEADS * GROUP, count, DIM)), np.arange(n, n + count)
        k[:, positions], v[:, positions] = own.compute(positions)
        n += count
        residents.check(n)
        expected = plain(
            turned(q, positions), positions, turned(k[:, :n], np.arange(n)), v[:, :n], np.arange(n), window
        )
        assert np.abs(own.ask(q, positions, window=window).o - expected).max() < 1e-3
        cut = data.draw(st.integers(1, n))
        if cut < n and data.draw(st.booleans()):
            kept = residents.crop(cut)
            if kept is not None:
                own.k[:, : len(kept)], own.v[:, : len(kept)] = own.k[:, kept], own.v[:, kept]
            n = cut
            residents.check(n)


@pytest.mark.parametrize("format", ["fp32", "int8", "int4"])
def test_no_key_of_a_page_scores_more_than_its_ceiling(format):
    rng = np.random.default_rng(1)
    plane = quantise(rng.standard_normal((HEADS, 70, DIM)).astype(np.float32), format)
    q = rng.standard_normal((HEADS * GROUP, 2, DIM)).astype(np.float32)
    tops = ceilings(q, bounds_of(plane, 16))
    assert tops.shape == (HEADS, 5)
    scores = np.einsum("hgsd,htd->hgst", q.reshape(HEADS, GROUP, 2, DIM), dequantise(plane)).max((1, 2))
    for page in range(5):
        assert (scores[:, page * 16 : page * 16 + 16].max(1) <= tops[:, page] + 1e-4).all()


def test_the_pages_with_the_highest_ceilings_are_chosen():
    tops = np.array([[3.0, 1.0, 2.0, 5.0], [0.0, 9.0, 8.0, 7.0]], np.float32)
    assert chosen(tops, Selection(0.5, 16, 1)).tolist() == [[True, False, False, True], [False, True, True, False]]
    assert chosen(tops, Selection(0.5, 16, 3)).sum(1).tolist() == [3, 3]
    assert chosen(tops, Selection(0.1, 16, 9)).all()


def test_each_head_reads_its_own_pages_and_all_of_its_own_memory():
    rng = np.random.default_rng(2)
    residents = InPlaceRuns(4)
    own = Own(rng, residents)
    k, v = np.zeros((HEADS, 110, DIM)), np.zeros((HEADS, 110, DIM))
    k[:, :4], v[:, :4] = own.compute(np.arange(4))
    q, at = rng.standard_normal((HEADS * GROUP, 1, DIM)), np.array([100])
    run, k[:, 4:100], v[:, 4:100] = held(rng, 96, 17, (40,))
    residents.attach(AttachedRun(4, run, 0, 96))
    k[:, at], v[:, at] = own.compute(at)
    every = own.ask(q, at)
    residents.selection = Selection(1.0, 16, 1, dense=0)
    assert np.allclose(own.ask(q, at).o, every.o, atol=1e-5)
    residents.selection = Selection(0.5, 16, 1, dense=1)
    assert np.array_equal(own.ask(q, at).o, every.o)
    residents.selection = Selection(0.5, 16, 1, dense=0)
    some = own.ask(q, at)
    assert (some.lse <= every.lse + 1e-5).all()
    assert (some.lse < every.lse - 1e-3).any()
    # What was left out can be told from the ceilings, head by head.
    ready = turned(q, at).astype(np.float32)
    tops = [ceilings(rotated_queries(ready, TURN, 4 - 17), run.bounds(0, slab, 16)) for slab in (0, 1)]
    picked = chosen(np.concatenate(tops, 1), residents.selection)
    assert picked.shape == (HEADS, sum(len(top[0]) for top in tops))
    seen = np.zeros((HEADS, 101), bool)
    seen[:, [0, 1, 2, 3, 100]] = True
    first = 0
    for slab, rows in ((0, 40), (1, 56)):
        for row in range(rows):
            seen[:, 4 + first + row] = picked[:, (3 + row) // 16 + (len(tops[0][0]) if slab else 0)]
        first += rows
    full = turned(k[:, :101], np.arange(101))
    for head in range(HEADS):
        rows = np.flatnonzero(seen[head])
        mine = slice(head * GROUP, (head + 1) * GROUP)
        expected = plain(turned(q[mine], at), at, full[head : head + 1, rows], v[head : head + 1, rows], rows)
        assert np.abs(some.o[mine] - expected).max() < 1e-4


def test_a_run_with_layers_cut_otherwise_is_refused():
    rng = np.random.default_rng(3)
    one, _, _ = held(rng, 9, 0)
    two, _, _ = held(rng, 9, 0, (4,))
    with pytest.raises(ValueError, match="same rows"):
        PinnedRun(one.tokens, 0, {0: one.layers[0], 1: two.layers[0]}, "fp32")
    with pytest.raises(ValueError, match="same rows"):
        PinnedRun(one.tokens[:5], 0, one.layers, "fp32")
