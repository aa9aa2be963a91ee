"""scatter_checked against xxhash and the reference: every table, every shape, and every plane that lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from oracle.kernels import reference
from support.examples import examples

TABLES = pytest.mark.parametrize("table", _native.kernels())
BACKENDS = pytest.mark.parametrize("backend", [_native, reference], ids=["native", "reference"])


class Run:
    """Planes of consecutive blocks at odd offsets of buffers of their own, and a tensor with gaps to take them."""

    def __init__(self, seed: int, heads: int, dim: int, counts: list[int], kind: int, to: int, odd: int) -> None:
        random = np.random.default_rng(seed)
        sizes = [heads * n * dim * (4, 2, 2)[kind] for n in counts]
        self.offsets = [int(random.integers(0, 70)) for _ in counts]
        self.buffers = [random.integers(0, 256, at + n + 3, np.uint8) for at, n in zip(self.offsets, sizes)]
        self.sums = [xxhash.xxh3_64_intdigest(self.plane(i, n).tobytes()) for i, n in enumerate(sizes)]
        self.sizes, self.heads, self.dim, self.counts, self.kind, self.to = sizes, heads, dim, counts, kind, to
        room = sum(counts) + 5
        self.strides = (room * dim, dim)
        memory = np.zeros(heads * room * dim * 4 + 192, np.uint8)
        start = -memory.ctypes.data % 64 + odd
        self.tensor = memory[start : start + heads * room * dim * 4]

    def plane(self, i: int, n: int) -> Any:
        return self.buffers[i][self.offsets[i] : self.offsets[i] + n]

    def arguments(self, tensor: Any) -> list[Any]:
        run = [self.buffers, self.offsets, self.kind, self.heads, self.dim, self.counts]
        return [tensor, self.to, 0, self.strides, *run]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 16, 64, 80]))
    counts = draw(st.lists(st.integers(0, 70) | st.just(64), min_size=1, max_size=4))
    kind = draw(st.sampled_from([0, 1, 2]))
    to = draw(st.sampled_from([kind, kind, kind, 0, 1, 2]))
    return Run(draw(st.integers(0, 99)), heads, dim, counts, kind, to, draw(st.sampled_from([0, 0, 0, 2, 4])))


@TABLES
@examples("light")
@given(run=runs(), data=st.data())
def test_whole_planes_pass_and_altered_ones_are_named(table: str, run: Run, data: st.DataObject) -> None:
    kernels.use(table)
    names = ("float32", "float16", "bfloat16")
    got, want = run.tensor.copy(), run.tensor.copy()
    _, *rest = run.arguments(run.tensor)
    arguments: Any = [names[v] if i in (0, 5) else v for i, v in enumerate(rest)]
    assert kernels.scatter_checked(run.tensor, *arguments, run.sums) == -1
    assert reference.scatter_checked(want, *rest, run.sums) == -1
    assert run.tensor.tobytes() == want.tobytes()
    full = [i for i, n in enumerate(run.sizes) if n]
    if full:
        bad = data.draw(st.sampled_from(full))
        at = data.draw(st.integers(0, run.sizes[bad] - 1))
        run.buffers[bad][run.offsets[bad] + at] ^= 1 << data.draw(st.integers(0, 7))
        assert kernels.scatter_checked(got, *arguments, run.sums) == bad
        assert reference.scatter_checked(got, *rest, run.sums) == bad


@TABLES
@pytest.mark.parametrize("kib", range(1, 9))
def test_streamed_rows_of_whole_kib(table: str, kib: int) -> None:
    """The fast path: aligned destination, rows of whole hash blocks, the last of which is hashed differently."""
    kernels.use(table)
    for heads in (1, 2, 3):
        run = Run(kib, heads, 64, [4 * kib, 4 * kib], 0, 0, 0)
        want = run.tensor.copy()
        assert _native.scatter_checked(*run.arguments(run.tensor), run.sums) == -1
        assert reference.scatter_checked(*run.arguments(want), run.sums) == -1
        assert run.tensor.tobytes() == want.tobytes()


@BACKENDS
def test_refused(backend: Any) -> None:
    run = Run(0, 2, 64, [16, 16], 0, 0, 0)
    arguments = run.arguments(run.tensor)
    for sums in ([1], [1, 2, 3], [-1, 0], [1 << 64, 0], [None, 1], ["a", "b"], 5):
        with pytest.raises((ValueError, TypeError)):
            backend.scatter_checked(*arguments, sums)
    for index, value in (
        (2, 1 << 62),
        (3, (1 << 62, 64)),
        (5, [1 << 62, 0]),
        (7, -1),
        (8, 1 << 40),
        (9, [16, 1 << 60]),
    ):
        changed = list(arguments)
        changed[index] = value
        with pytest.raises((ValueError, TypeError)):
            backend.scatter_checked(*changed, run.sums)
    with pytest.raises((ValueError, TypeError)):
        backend.scatter_checked(bytes(run.tensor), *arguments[1:], run.sums)
    assert not run.tensor.any()


def test_native_refuses_planes_that_xxh3_hashes_in_another_way() -> None:
    run = Run(0, 1, 1, [60], 0, 0, 0)
    with pytest.raises(ValueError, match="too short"):
        _native.scatter_checked(*run.arguments(run.tensor), run.sums)
