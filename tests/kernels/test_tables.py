"""Each native table equals the numpy reference bit for bit, on random layouts, types and bit patterns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxreuse import _native, kernels
from ctxreuse.kernels import reference

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
@settings(max_examples=120, deadline=None)
@given(data=st.data(), shape=shapes)
def test_copy3(table: str, data: st.DataObject, shape: Shape) -> None:
    kernels.use(table)
    src, dst = data.draw(layouts(shape, source=True)), data.draw(layouts(shape))
    got, want = dst.copy(), dst.copy()
    _native.copy3(got, *dst.place, src.memory, *src.place, shape)
    reference.copy3(want, *dst.place, src.memory, *src.place, shape)
    assert got.tobytes() == want.tobytes()


@TABLES
@settings(max_examples=120, deadline=None)
@given(data=st.data(), shape=shapes, interleaved=st.booleans(), in_place=st.booleans())
def test_rope_shift(table: str, data: st.DataObject, shape: Shape, interleaved: bool, in_place: bool) -> None:
    kernels.use(table)
    src, dst = data.draw(layouts(shape, source=True)), data.draw(layouts(shape))
    angles = np.random.default_rng(0).uniform(-7, 7, data.draw(st.integers(0, shape[2] // 2)))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got, want = dst.copy(), dst.copy()
    src = dst if in_place else src
    _native.rope_shift(
        got, *dst.place, got if in_place else src.memory, *src.place, shape, cos, sin, interleaved
    )  # fmt: skip
    reference.rope_shift(want, *dst.place, src.memory, *src.place, shape, cos, sin, interleaved)
    assert got.tobytes() == want.tobytes()


@TABLES
@settings(max_examples=80, deadline=None)
@given(data=st.data(), heads=st.integers(0, 4), dim=st.integers(0, 40), counts=st.lists(st.integers(0, 20), max_size=6))
def test_runs(table: str, data: st.DataObject, heads: int, dim: int, counts: list[int]) -> None:
    kernels.use(table)
    tensor = data.draw(layouts((heads, sum(counts), dim)))
    planes = [data.draw(layouts((heads, count, dim))) for count in counts]
    dtype = data.draw(DTYPES)
    sizes = [heads * count * dim * ITEM[dtype] for count in counts]
    memories = [np.resize(plane.memory, plane.offset + size) for plane, size in zip(planes, sizes, strict=True)]
    offsets = [plane.offset for plane in planes]
    rest: Any = (offsets, dtype, heads, dim, counts)

    got, want = tensor.copy(), tensor.copy()
    _native.scatter_run(got, *tensor.place, memories, *rest)
    reference.scatter_run(want, *tensor.place, memories, *rest)
    assert got.tobytes() == want.tobytes()

    cut, expected = [memory.copy() for memory in memories], [memory.copy() for memory in memories]
    _native.gather_run(got, *tensor.place, cut, *rest)
    reference.gather_run(want, *tensor.place, expected, *rest)
    assert [memory.tobytes() for memory in cut] == [memory.tobytes() for memory in expected]


@TABLES
def test_scatter_then_gather_gives_the_blocks_back(table: str) -> None:
    kernels.use(table)
    random = np.random.default_rng(1)
    counts, heads, dim, room = [64, 64, 17], 3, 32, 200
    blocks = [random.integers(0, 2**16, 5 + heads * count * dim, dtype=np.uint16) for count in counts]
    tensor = np.zeros((heads, room, dim), np.uint16)
    at = (7 * dim * 2, (room * dim, dim))
    kernels.scatter_run(tensor, "bf16", *at, blocks, [10] * 3, "bf16", heads, dim, counts)
    assert (tensor[:, 7:71] == blocks[0][5:].reshape(heads, 64, dim)).all()
    assert (tensor[:, :7] == 0).all()
    assert (tensor[:, 7 + sum(counts) :] == 0).all()
    back = [np.zeros_like(block) for block in blocks]
    kernels.gather_run(tensor, "bf16", *at, back, [10] * 3, "bf16", heads, dim, counts)
    for block, again in zip(blocks, back, strict=True):
        assert (again[5:] == block[5:]).all()
        assert (again[:5] == 0).all()


@TABLES
def test_a_slice_of_an_array_is_its_span(table: str) -> None:
    kernels.use(table)
    whole = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    part = whole[1:3, 2:5, :]
    out = np.zeros((2, 3, 8), np.float16)
    kernels.copy3(out, part, part.shape, dst_dtype="fp16", src_dtype="fp32", src_strides=(48, 8))
    assert (out == part.astype(np.float16)).all()
    kernels.copy3(part, np.ones((2, 3, 8), np.float32), part.shape, dst_dtype="fp32", dst_strides=(48, 8, 1))
    assert (whole[1:3, 2:5] == 1).all()
    assert (whole != 1).sum() == whole.size - part.size - 1
