"""Planes quantised by a device's array functions, and what they stand for, are the CPU's bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ctxreuse.cuda.quantised import expand_plane, quantise_plane
from ctxreuse.kernels.attention import dequantise, quantise
from support.shim import Shim


@pytest.mark.build("shim")
@given(
    x=arrays(np.float32, (2, 5, 64), elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-31])),
    format=st.sampled_from(["int8", "int4"]),
)
def test_any_values(shim: Shim, x: np.ndarray, format: str) -> None:
    found, wanted = quantise_plane(shim, x, format), quantise(x, format)
    assert found.data.tobytes() == wanted.data.tobytes()
    assert found.scales is not None
    assert wanted.scales is not None
    assert found.scales.tobytes() == wanted.scales.tobytes()
    assert expand_plane(shim, found).tobytes() == dequantise(wanted).tobytes()


@pytest.mark.build("shim")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_that_cannot_be_held_are_refused(shim: Shim, bad: float) -> None:
    x = np.ones((1, 2, 64), np.float32)
    x[0, 1, 3] = bad
    with pytest.raises(ValueError, match="not all are finite"):
        quantise_plane(shim, x, "int4")
    with pytest.raises(ValueError, match="int8, or int4"):
        quantise_plane(shim, x, "int5")
