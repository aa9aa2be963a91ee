"""gather_checked: spans of a buffer come out one behind another, and the first that was altered is named."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from support.examples import examples

TABLES = pytest.mark.parametrize("table", _native.kernels())


def spans_of(buffers: list[bytes], cuts: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    spans = np.array([(min(at, 7000 - size), size) for at, size in cuts], np.int64).reshape(1, -1, 2)
    spans = np.repeat(spans, len(buffers), 0)
    sums = [[xxhash.xxh3_64_intdigest(data[at : at + size]) for at, size in spans[0].tolist()] for data in buffers]
    return spans, np.array(sums, np.uint64).reshape(spans.shape[:2])


@TABLES
@examples("light")
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from([241, 512, 1024, 2000]) | st.integers(0, 3000)), max_size=6
    ),
    altered=st.integers(0, 20),
    count=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_any_spans(table: str, cuts: list[tuple[int, int]], altered: int, count: int, seed: int) -> None:
    kernels.use(table)
    buffers = [np.random.default_rng(seed + i).bytes(7000) for i in range(count)]
    spans, sums = spans_of(buffers, cuts)
    wanted = b"".join(data[at : at + size] for data in buffers for at, size in spans[0].tolist())
    out = np.full(len(wanted) + 9, 0xA5, np.uint8)
    assert kernels.gather_checked(out, buffers, spans, sums) == -1
    assert out[: len(wanted)].tobytes() == wanted
    assert (out[len(wanted) :] == 0xA5).all()
    if altered < sums.size:
        sums.ravel()[altered] ^= np.uint64(1)
        assert kernels.gather_checked(out, buffers, spans, sums) == altered


@pytest.mark.parametrize("span", [(-1, 300), (0, 1001), (900, 300), (2**62, 300), (0, -5), (300, 2**62)])
def test_spans_outside_of_their_buffer_are_refused(span: tuple[int, int]) -> None:
    data, out = bytes(1000), np.zeros(2000, np.uint8)
    with pytest.raises(ValueError, match="spans"):
        kernels.gather_checked(out, [data], np.array([[span]], np.int64), np.zeros((1, 1), np.uint64))


@pytest.mark.parametrize("size", [400, 100])
def test_too_little_room_or_too_few_checksums_or_buffers_are_refused(size: int) -> None:
    data, spans = bytes(1000), np.array([[(0, size), (500, size)]], np.int64)
    for room, sums, buffers in ((2 * size - 1, 2, 1), (800, 1, 1), (800, 3, 1), (800, 2, 3)):
        with pytest.raises(ValueError, match="spans"):
            kernels.gather_checked(np.zeros(room, np.uint8), [data] * buffers, spans, np.zeros((1, sums), np.uint64))
