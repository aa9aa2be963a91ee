"""Each native table equals the numpy reference bit for bit, on random layouts, types and bit patterns."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxreuse import _native, kernels
from oracle.kernels import reference
from support.examples import examples

ITEM = (4, 2, 2)
DTYPES = st.sampled_from([0, 1, 2])
TABLES = pytest.mark.parametrize("table", _native.kernels())
Shape = tuple[int, int, int]
shapes = st.tuples(st.integers(0, 3), st.integers(0, 20) | st.just(70), st.integers(0, 40) | st.just(64))


@dataclass
class Layout:
    """Memory full of random bits, and where a box lies in it."""

    memory: NDArray[np.uint8]
    dtype: int
    offset: int
    strides: Shape

    @property
    def place(self) -> tuple[int, int, Shape]:
        return self.dtype, self.offset, self.strides

    def copy(self) -> NDArray[np.uint8]:
        return self.memory.copy()


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, *, source: bool = False) -> Layout:
    order = draw(st.sampled_from([(0, 1, 2), (0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1), (1, 2, 0)]))
    strides, reach = [0, 0, 0], 0
    for axis in reversed(order):
        repeated = source and draw(st.integers(0, 9)) == 0
        strides[axis] = 0 if repeated else reach + 1 + draw(st.sampled_from([0, 0, 0, 1, 5]))
        reach += max(shape[axis] - 1, 0) * strides[axis]
    dtype, offset = draw(DTYPES), draw(st.sampled_from([0, 0, 1, 6, 64]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = offset + (reach + 1) * ITEM[dtype]
    memory = random.integers(0, 256, size, dtype=np.uint8)
    if draw(st.booleans()):  # numbers of everyday size: random bits are mostly huge or tiny
        floats = random.standard_normal(reach + 1, dtype=np.float32).view(np.uint32)
        memory[offset:] = reference.convert(floats, 0, dtype).view(np.uint8)
    return Layout(memory, dtype, offset, (strides[0], strides[1], strides[2]))


@TABLES
@examples("light")
@given(data=st.data(), shape=shapes, interleaved=st.booleans(), in_place=st.booleans())
def test_rope_shift(table: str, data: st.DataObject, shape: Shape, interleaved: bool, in_place: bool) -> None:
    kernels.use(table)
    src, dst = data.draw(layouts(shape, source=True)), data.draw(layouts(shape))
    half = data.draw(st.just(0) | st.integers(0, shape[2] // 2))  # without angles it is a copy of a box
    angles = np.random.default_rng(0).uniform(-7, 7, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got, want = dst.copy(), dst.copy()
    src = dst if in_place else src
    _native.rope_shift(
        got, *dst.place, got if in_place else src.memory, *src.place, shape, cos, sin, interleaved
    )  # fmt: skip
    reference.rope_shift(want, *dst.place, src.memory, *src.place, shape, cos, sin, interleaved)
    assert got.tobytes() == want.tobytes()


@TABLES
def test_a_slice_of_an_array_is_its_span(table: str) -> None:
    kernels.use(table)
    whole = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    part = whole[1:3, 2:5, :]
    out = np.zeros((2, 3, 8), np.float16)
    kernels.rope_shift(out, part, part.shape, [], [], dst_dtype="fp16", src_dtype="fp32", src_strides=(48, 8))
    assert (out == part.astype(np.float16)).all()
    ones = np.ones((2, 3, 8), np.float32)
    kernels.rope_shift(part, ones, part.shape, [], [], dst_dtype="fp32", dst_strides=(48, 8, 1))
    assert (whole[1:3, 2:5] == 1).all()
    assert (whole != 1).sum() == whole.size - part.size - 1
