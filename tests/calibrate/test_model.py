"""What an engine tells about itself: rotations are the model's own, gradients are those of the scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.calibration import CalibrationModel, Prefix
from ctxreuse.engines.torch_hf.chunks.rotary import _alone
from ctxreuse.errors import EngineError
from ctxreuse.rope import Rotary

IDS = (np.arange(80) * 37 % 290).astype("<i4")


@pytest.mark.parametrize("name", ["llama", "yarn", "gemma3", "cohere", "falconh1"])
def test_rotation_of_every_layer_is_found(gauge_of: Any, name: str) -> None:
    model = gauge_of(name)
    rotaries = model.rotaries()
    assert sorted(rotaries) == [i for i, layer in enumerate(model.space.layers) if layer.kv_heads]
    assert {r.style for r in rotaries.values()} == {"pairs" if name == "cohere" else "half"}
    assert all(r.scale == (1.25 if name == "yarn" else 1.0) for r in rotaries.values())
    # One token alone has the same K in every layer wherever it stands, once it is turned back.
    near, far = (_alone(model._model, model._forward, [position]) for position in (3, 401))
    for layer, rotary in rotaries.items():
        a = rotary.rotate(near[layer], np.array([3]), undo=True)
        b = rotary.rotate(far[layer], np.array([401]), undo=True)
        assert np.abs(near[layer] - far[layer]).max() > 0.05 * np.abs(a).max()
        np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(a).max()))


def test_bases_of_gemma_are_told_apart(gauge_of: Any) -> None:
    rotaries = gauge_of("gemma3").rotaries()
    assert rotaries[0] == rotaries[2]
    exponent = np.arange(8) / 8
    np.testing.assert_allclose(rotaries[0].inv_freq, 100.0**-exponent, rtol=1e-6)
    np.testing.assert_allclose(rotaries[1].inv_freq, 1e6**-exponent, rtol=1e-6)


def test_a_model_that_turns_nothing(gauge_of: Any) -> None:
    assert set(gauge_of("gpt2").rotaries().values()) == {Rotary("none")}


@pytest.mark.parametrize("style", ["half", "pairs", "none"])
def test_turning_back_undoes_turning(style: Any) -> None:
    rng = np.random.default_rng(1)
    frequencies = tuple(10.0 ** -rng.random(3)) if style != "none" else ()
    rotary = Rotary(style, frequencies, 1.5 if frequencies else 1.0)
    k, positions = rng.normal(size=(2, 5, 8)).astype(np.float32), np.array([0, 1, 9, 1000, 30000])
    turned = rotary.rotate(k, positions)
    np.testing.assert_allclose(rotary.rotate(turned, positions, undo=True), k, atol=1e-6)
    np.testing.assert_array_equal(turned[..., 6:], k[..., 6:])  # only twice as many dims as frequencies turn
    length = np.linalg.norm(turned[..., :6], axis=-1) / np.linalg.norm(k[..., :6], axis=-1)
    np.testing.assert_allclose(length, rotary.scale, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1"])
def test_scores_follow_the_planes(gauge_of: Any, name: str) -> None:
    model = gauge_of(name)
    reading = model.read(IDS[:64])
    assert isinstance(model, CalibrationModel)
    assert isinstance(reading, Prefix)
    rows = {key: plane.shape[1] for key, plane in reading.planes.items()}
    assert all(n == (23 if name == "gemma3" and layer != 1 else 64) for (layer, _), n in rows.items())
    exact = model.scores(reading, IDS[64:])
    assert exact.shape == (16, 300)
    np.testing.assert_allclose(np.exp(exact).sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(model.scores(reading, IDS[64:], reading.planes), exact)
    for key in reading.planes:
        other = {k: plane * 1.5 if k == key else plane for k, plane in reading.planes.items()}
        assert np.abs(model.scores(reading, IDS[64:], other) - exact).max() > 1e-4, key
    np.testing.assert_array_equal(model.scores(reading, IDS[64:]), exact)  # nothing has changed the reading


def test_gradients_are_the_fisher_information(gauge_of: Any) -> None:
    model = gauge_of("llama")
    reading = model.read(IDS[:64])
    exact = model.scores(reading, IDS[64:])
    rng = np.random.default_rng(2)
    error = {k: 2e-3 * rng.normal(size=p.shape).astype(np.float32) for k, p in reading.planes.items()}
    moved = model.scores(reading, IDS[64:], {k: p + error[k] for k, p in reading.planes.items()})
    divergence = float((np.exp(exact) * (exact - moved)).sum())
    squares = []
    for seed in range(60):
        slopes = model.gradients(reading, IDS[64:], seed)
        squares.append(sum(float((slopes[k] * error[k]).sum()) for k in error) ** 2)
    assert divergence == pytest.approx(np.mean(squares) / 2, rel=0.4)


def test_gradients_repeat_by_seed(gauge_of: Any) -> None:
    model = gauge_of("gemma3")
    reading = model.read(IDS[:64])
    first, again, other = (model.gradients(reading, IDS[64:], seed) for seed in (3, 3, 4))
    assert all((first[key] == again[key]).all() for key in first)
    assert any((first[key] != other[key]).any() for key in first)


def test_a_reading_of_somebody_else(gauge_of: Any) -> None:
    with pytest.raises(EngineError, match="no reading of this engine"):
        gauge_of("llama").scores(SimpleNamespace(n=3, planes={}), IDS[:4])
