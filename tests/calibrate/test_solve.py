"""Transform, tables and steps: exact inverses, distributions that are valid for any counts, steps that only fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.calibrate.coding import Planned, quantised
from ctxreuse.calibrate.gather import Channels, GroupStats, channel_groups, joint_groups
from ctxreuse.calibrate.steps import active_components, find_step
from ctxreuse.calibrate.tables import CENTRE, ESCAPE, cluster, fold, integer_table, table_bits
from ctxreuse.calibrate.transform import BASIS_LIMIT, solve
from ctxreuse.codec.profile import MOST_CHANNELS
from ctxreuse.identity.model import LayerSpec
from support.examples import examples


def stats_of(seed: int, size: int = 24, *, fisher: bool = True) -> GroupStats:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, size, size)) * 2.0 ** rng.uniform(-4, 4, (2, 1, size))
    information = a @ a.T if fisher else np.zeros((size, size))
    channels = Channels(((0, "k"),), 0, 3, size // 3)
    return GroupStats(channels, rng.normal(size=size), 1.5, b @ b.T / size, information[None])


@pytest.mark.parametrize("seed", range(4))
def test_the_transform_inverts_and_decorrelates(seed: int) -> None:
    stats = stats_of(seed)
    transform = solve(stats, epsilon=0.02)
    forward, inverse = transform.forward.astype(float), transform.inverse.astype(float)
    np.testing.assert_allclose(inverse @ forward, np.eye(24), atol=0.02)
    # Largest variance first, no correlation, and an error of y costs its squared length.
    assert (np.diff(transform.variance) <= 1e-9).all()
    spread = forward @ stats.moment @ forward.T
    np.testing.assert_allclose(spread, np.diag(transform.variance), atol=1e-4 * transform.variance[0])
    metric = stats.fisher[0] + 0.02 * np.trace(stats.fisher[0]) / 24 * np.eye(24)
    np.testing.assert_allclose(inverse.T @ metric @ inverse, np.eye(24), atol=0.02)


def test_the_metric_of_joint_planes_has_a_block_for_each() -> None:
    one, two = stats_of(1), stats_of(2)
    rng = np.random.default_rng(3)
    b = rng.normal(size=(48, 60))
    channels = one.channels._replace(places=((0, "k"), (0, "v")), joint=True)
    fisher = np.concatenate([one.fisher, two.fisher])
    stats = GroupStats(channels, np.concatenate([one.mean, two.mean]), 1.5, b @ b.T / 60, fisher)
    transform = solve(stats, epsilon=0.02)
    forward, inverse = transform.forward.astype(float), transform.inverse.astype(float)
    np.testing.assert_allclose(inverse @ forward, np.eye(48), atol=0.02)
    spread = forward @ stats.moment @ forward.T
    np.testing.assert_allclose(spread, np.diag(transform.variance), atol=1e-4 * transform.variance[0])
    metric = np.zeros((48, 48))
    for at, block in ((slice(0, 24), fisher[0]), (slice(24, 48), fisher[1])):
        metric[at, at] = block + 0.02 * np.trace(block) / 24 * np.eye(24)
    np.testing.assert_allclose(inverse.T @ metric @ inverse, np.eye(48), atol=0.02)


def test_the_basis_is_whole_and_bounded() -> None:
    transform = solve(stats_of(5), epsilon=0.02)
    group = transform.group(10)
    assert group.basis.dtype == np.int16
    assert group.basis.shape == group.forward.shape == (10, 24)
    assert np.abs(transform.basis).max() == BASIS_LIMIT
    np.testing.assert_allclose((group.basis * group.gain).T, transform.inverse[:, :10], rtol=1e-6)


def test_small_components_fit_a_byte() -> None:
    transform = solve(stats_of(5), epsilon=0.02)
    step = float((transform.variance[9] * transform.variance[10]) ** 0.25) / 4
    assert transform.narrow(step) == 10
    basis = transform.group(24).rounded(10).basis
    assert (basis[:10] == transform.basis[:10]).all()
    assert (basis[10:] % 64 == 0).all()
    assert np.abs(basis[10:]).max() <= 127 * 64
    assert np.abs(basis.astype(int) - transform.basis).max() <= 63
    np.testing.assert_allclose((basis * transform.gain).T, transform.inverse_at(step, 24), rtol=1e-6)


def test_a_plane_that_nothing_reads() -> None:
    transform = solve(stats_of(6, fisher=False), epsilon=0.02)
    assert np.isfinite(transform.forward).all()
    assert np.isfinite(transform.inverse).all()
    assert active_components([np.ones((9, 24), np.float32) @ transform.forward.T], 1e-3) == [0]


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 256), (8, 128), (32, 128), (5, 96), (2, 512), (7, 64)])
def test_groups_cover_all_heads(heads: int, dim: int) -> None:
    places = [(layer, role) for layer in range(12) for role in "kv"]
    planes = {place: np.empty((heads, 1, dim), np.float32) for place in places}
    groups = list(channel_groups(planes))
    assert all(group.heads * dim <= 256 or group.heads == 1 for group in groups)
    kinds = [LayerSpec("full" if layer % 3 else "sliding", heads, dim, dim, 8) for layer in range(12)]
    joint = joint_groups(planes, kinds)
    for group in joint:
        assert len(group.places) * group.heads * dim <= MOST_CHANNELS
        assert len({kinds[layer].blocked for layer, _ in group.places}) == 1
    for found in (groups, joint):
        covered = [(at, h) for one in found for at in one.places for h in range(one.first, one.first + one.heads)]
        assert sorted(covered) == [(at, h) for at in places for h in range(heads)]


def test_layers_whose_k_and_v_differ_are_not_joint() -> None:
    planes = {(0, "k"): np.empty((2, 1, 64), np.float32), (0, "v"): np.empty((2, 1, 32), np.float32)}
    assert joint_groups(planes, [LayerSpec("full", 2, 64, 32)]) == []


counts = st.lists(st.integers(0, 10**6), min_size=31, max_size=31)


@examples("normal")
@given(counts, st.integers(0, 1000))
def test_any_counts_give_a_table_that_codes_anything(weights: list[int], escapes: int) -> None:
    table = integer_table(np.array([*weights, escapes], float), escapes=True)
    assert table.sum(dtype=int) == 256
    assert table.dtype == np.uint8
    assert table[ESCAPE] >= 1
    assert table[CENTRE] >= 1
    assert np.isfinite(table_bits(table[None], escapes=True)).all()


@examples("heavy")
@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_refinements_know_all_their_symbols(weights: list[int]) -> None:
    table = integer_table(np.pad(np.array(weights, float), (0, 29)), escapes=False)
    assert table.sum(dtype=int) == 256
    assert (table[[0, 1, 2, ESCAPE]] >= 1).all()
    assert not table[3:ESCAPE].any()


def test_a_table_costs_little_more_than_the_entropy() -> None:
    rng = np.random.default_rng(3)
    for sigma in (0.2, 0.5, 1.0, 3.0):
        q = np.rint(rng.laplace(scale=sigma, size=20000)).astype(int)
        weights = np.bincount(np.clip(q, -16, 15) + CENTRE + 1, minlength=32)[1:].astype(float)
        weights = np.append(weights[:31], (np.abs(q) > CENTRE).sum())
        share = weights / weights.sum()
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        cost = float((table_bits(integer_table(weights, escapes=True)[None], escapes=True) @ share)[0])
        assert entropy <= cost < 1.03 * entropy + 0.03


def test_folding_counts() -> None:
    values = np.zeros((1, 961))
    values[0, 480 + np.array([-40, -3, 0, 1, 2, 47, 62, 480])] = 1
    folded = fold(values, 2)[0]
    symbols = {s: int(n) for s, n in enumerate(folded) if n}
    assert symbols == {5: 1, 14: 1, 15: 2, 16: 1, 27: 1, 31: 2}
    assert fold(values, 0)[0, ESCAPE] == 4


def test_each_component_gets_a_table_that_suits_it() -> None:
    rng = np.random.default_rng(4)
    sigmas = np.repeat([0.3, 1.0, 4.0, 60.0], 25)
    q = np.clip(np.rint(rng.normal(scale=sigmas, size=(4000, 100))), -480, 480).astype(int)
    counts = np.array([np.bincount(column + 480, minlength=961) for column in q.T], float)
    choice = cluster(np.array([fold(counts, k) for k in range(7)]), 4, escapes=True)
    assert 2 <= len(choice.tables) <= 4
    # A wide component is coded with its low bits apart, a narrow one whole.
    assert set(choice.shift[:50].tolist()) == {0}
    assert choice.shift[75:].min() >= 3
    share = counts / 4000
    entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum(1)
    assert (choice.bits / 4000).mean() < 1.06 * entropy.mean()


def test_components_fade_as_the_step_grows() -> None:
    rng = np.random.default_rng(5)
    y = (rng.normal(size=(500, 40)) * 2.0 ** -np.arange(40)).astype(np.float32)
    counts = [active_components([y], step)[0] for step in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 100.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 10
    assert counts[-1] == 0


@pytest.mark.parametrize("target", [0.05, 0.01, 0.002])
@pytest.mark.parametrize("power", [1.2, 2.0])
@pytest.mark.parametrize("start", [1e-3, 1.0, 50.0])
def test_steps_are_found_from_anywhere(target: float, power: float, start: float) -> None:
    asked: list[float] = []

    def measure(step: float) -> float:
        asked.append(step)
        return 0.3 * step**power * (1 + 0.01 * np.sin(1e4 * step))

    step, kl = find_step(measure, target, start, rounds=12)
    assert target * 0.9 <= kl <= target
    assert measure(step) == kl


def test_a_base_is_made_of_its_refinement() -> None:
    rng = np.random.default_rng(6)
    y = rng.normal(size=(300, 5)).astype(np.float32) * 10
    levels = [Planned("a", float(np.float32(3) * np.float32(0.1)), (5,)), Planned("b", float(np.float32(0.1)), (5,), 0)]
    base, fine = quantised(y, levels)
    rest: Any = fine - 3 * base
    assert set(np.unique(rest)) <= {-1, 0, 1}
    np.testing.assert_array_equal(base, (fine + 1) // 3)
