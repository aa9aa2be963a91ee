"""Attention over quantised parts through the CUDA kernels' text, against float64 over the same codes."""

from itertools import pairwise

import numpy as np
import pytest

from ctxreuse.cuda.attention import ChunkAttention, DevicePart, attend, plane_on
from ctxreuse.cuda.attention_layout import ITEM, PLANE, RUN, bits_of, seen_rows, shared_out, spans, without
from ctxreuse.kernels.attention import Part, Plane, merge, quantise
from ctxreuse.kernels.attention import attend as cpu_attend
from ctxreuse.rope import Rotation
from support.attention import Chunk, compare_attention, parts_of
from support.shim import Shim

pytestmark = pytest.mark.build("shim")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("format", ["int8", "int4", "fp16", "bf16"])
@pytest.mark.parametrize("queries", [1, 5])
def test_every_format_and_width_of_head(shim: Shim, format: str, dim: int, queries: int) -> None:
    compare_attention(shim, [Chunk(150, format)], (4, queries, dim), 2)


@pytest.mark.parametrize("formats", [("int8", "int4"), ("int4", "int8"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_keys_and_values_may_be_of_two_formats(shim: Shim, formats: tuple[str, str]) -> None:
    compare_attention(shim, [Chunk(70, *formats)], (3, 1, 64))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("queries", [1, 2, 7])
def test_heads_that_share_keys(shim: Shim, group: int, queries: int) -> None:
    compare_attention(shim, [Chunk(100)], (2 * group, queries, 64), 2, seed=group)


@pytest.mark.parametrize(("queries", "format"), [(31, "int8"), (64, "int4"), (64, "fp16")])
def test_a_question_of_many_tokens_in_its_own_chunk(shim: Shim, queries: int, format: str) -> None:
    # 200 rows before it, and its own rows, each seen from itself on.
    chunks = [Chunk(200, format), Chunk(queries, "fp16", at=1000)]
    positions = 1000 + np.arange(queries)
    compare_attention(shim, chunks, (4, queries, 128), 2, positions=positions)


@pytest.mark.parametrize("multiprocessors", [1, 3, 8, 40, 1000])
def test_rows_are_split_among_any_number_of_blocks(shim: Shim, multiprocessors: int) -> None:
    other = Shim.__new__(Shim)
    other.__dict__ = {**vars(shim), "multiprocessors": multiprocessors}
    chunks = [Chunk(1, shift=3), Chunk(700, shift=-9), Chunk(16, "int4"), Chunk(33, "fp16"), Chunk(130, shift=-9)]
    compare_attention(other, chunks, (4, 1, 128), 2, seed=multiprocessors)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("interleaved", "rotary"), [(False, 1.0), (True, 1.0), (False, 0.5), (True, 0.25)])
def test_queries_are_turned_for_each_part(shim: Shim, dim: int, interleaved: bool, rotary: float) -> None:
    chunks = [
        Chunk(40, format, shift=shift, interleaved=interleaved, rotary=rotary)
        for format, shift in [("int8", 500), ("int8", -70), ("int4", 31), ("bf16", 12_345)]
    ]
    compare_attention(shim, chunks, (2, 3, dim))


@pytest.mark.parametrize("window", [None, 1, 20, 90])
@pytest.mark.parametrize("tiles", [64, 128])
def test_rows_are_seen_by_position(shim: Shim, window: int | None, tiles: int) -> None:
    scattered = np.sort(np.random.default_rng(1).integers(0, 300, 80))
    chunks = [
        Chunk(90, "int8", at=0),
        Chunk(80, "int4", first=3, last=75, at=scattered),
        Chunk(50, "fp16", at=200),
        Chunk(40, "int8", at=10_000),
    ]
    positions = [250, 3, 160, 220, 90, 0, 249]
    compare_attention(shim, chunks, (4, 7, tiles), 2, positions=positions, window=window)


@pytest.mark.parametrize("format", ["int8", "int4", "fp16", "bf16"])
def test_what_hidden_rows_hold_does_not_matter(shim: Shim, format: str) -> None:
    random = np.random.default_rng(2)
    hidden = np.array([0, 5, 31, 32, 77, 78, 79, *range(140, 220), 299], np.int64)
    q = random.standard_normal((4, 3, 64), np.float32)
    [part], [own] = parts_of(shim, q, [Chunk(300, format, hidden=hidden)], 2, random)
    want = cpu_attend(q, [own])
    for plane in (part.k, part.v):
        if plane.scales is not None:
            plane.scales[..., hidden] = np.nan if format == "int8" else 0xFF  # a step of 0xFF is no number
        else:
            plane.data[:, hidden] = 0x7FFF if format == "bf16" else np.nan
    got = attend(shim, q, [part])
    assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_queries_of_any_type(shim: Shim, dtype: type) -> None:
    compare_attention(shim, [Chunk(60, shift=7), Chunk(20, "bf16", shift=7)], (2, 2, 64), dtype=dtype)


def test_scores_may_be_limited(shim: Shim) -> None:
    compare_attention(shim, [Chunk(100), Chunk(20, "fp16")], (8, 2, 128), 2, softcap=3.0)


def test_rows_may_lie_far_apart_and_planes_be_cut(shim: Shim) -> None:
    random = np.random.default_rng(3)
    q = random.standard_normal((4, 2, 64), np.float32)
    for format in ("int8", "int4", "fp16"):
        planes = [quantise(random.standard_normal((2, 90, 64), np.float32), format) for _ in range(2)]
        # [tokens, heads, dim] in memory, as engines page it.
        wide = [Plane(p.format, np.ascontiguousarray(p.data.swapaxes(0, 1)).swapaxes(0, 1), p.scales) for p in planes]
        k, v = (plane.rows(10, 81) for plane in wide)
        got = attend(shim, q, [DevicePart(k, v, 1, 70)])
        want = cpu_attend(q, [Part(planes[0], planes[1], 11, 80)])
        assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()


def test_weights_that_differ_by_far_keep_the_small_ones(shim: Shim) -> None:
    # One key of a score 12 above all others, which together weigh as much.
    q = np.zeros((1, 1, 64), np.float32)
    q[0, 0, 0] = 96
    k, v = np.zeros((1, 8000, 64), np.float32), np.full((1, 8000, 64), 2.0, np.float32)
    k[0, 77, 0], v[0, 77] = 1, -1
    part = DevicePart(plane_on(shim, quantise(k, "int8")), plane_on(shim, quantise(v, "int8")))
    share = 7999 * np.exp(-12) / (1 + 7999 * np.exp(-12))
    np.testing.assert_allclose(attend(shim, q, [part]).o, 3 * share - 1, rtol=1e-3)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_values_of_any_size(shim: Shim, size: float) -> None:
    random = np.random.default_rng(4)
    q = random.standard_normal((2, 1, 128), np.float32)
    k, v = random.standard_normal((2, 1, 200, 128), np.float32)
    planes = quantise(k, "int8"), quantise(v * np.float32(size), "int8")
    got = attend(shim, q, [DevicePart(*(plane_on(shim, plane) for plane in planes))])
    want = cpu_attend(q, [Part(*planes)])
    assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()


def test_who_sees_nothing_gets_nothing(shim: Shim) -> None:
    got = compare_attention(shim, [Chunk(40, at=100)], (2, 3, 64), positions=[99, 100, 500])
    assert (got.o[:, 0] == 0).all()
    assert np.isneginf(got.lse[:, 0]).all()
    for chunks in ([], [Chunk(40, at=100)], [Chunk(9, first=4, last=4)]):
        none = compare_attention(shim, chunks, (2, 3, 64), positions=[1, 2, 3])
        assert np.isneginf(none.lse).all()


def test_zeros_and_what_is_no_number(shim: Shim) -> None:
    zero = quantise(np.zeros((1, 20, 64), np.float32), "int8")
    part = DevicePart(plane_on(shim, zero), plane_on(shim, zero))
    q = np.ones((1, 2, 64), np.float32)
    q[0, 1, 3] = np.inf
    got = attend(shim, q, [part])
    np.testing.assert_allclose(got.lse[0, 0], np.log(20), rtol=1e-6)
    assert (got.o[0, 0] == 0).all()
    assert not np.isfinite(got.o[0, 1]).any()


def test_results_of_the_device_and_of_the_host_are_merged(shim: Shim) -> None:
    random = np.random.default_rng(5)
    q = random.standard_normal((6, 2, 64), np.float32)
    there, here = parts_of(shim, q, [Chunk(50), Chunk(60, "int4"), Chunk(9, "fp16")], 2, random)
    got = merge([attend(shim, q, there[:1]), cpu_attend(q, here[1:])])
    want = cpu_attend(q, here)
    assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-3)


def test_one_layout_serves_many_queries(shim: Shim) -> None:
    random = np.random.default_rng(6)
    first, second = random.standard_normal((2, 2, 1, 64), np.float32)
    there, here = parts_of(shim, first, [Chunk(80, "int4")], 1, random)
    layout = ChunkAttention(shim, there, first.shape)
    room = layout.room()
    for q in (first, second):
        want = cpu_attend(q, here)
        for got in (layout(q), layout(q, room)):
            assert np.abs(got.o - want.o).max() < 1e-3 * np.abs(want.o).max()
    assert got.o is room.o


def test_structures_are_those_of_the_kernels(shim: Shim) -> None:
    known = {"AttendPlane": PLANE, "AttendRun": RUN, "AttendItem": ITEM}
    assert {name: shim.size_of(name) for name in known} == {name: dtype.itemsize for name, dtype in known.items()}


def test_what_the_kernels_cannot_do_is_refused(shim: Shim) -> None:
    random = np.random.default_rng(7)
    shape = (4, 2, 64)
    q = random.standard_normal(shape, np.float32)
    [part], _ = parts_of(shim, q, [Chunk(40)], 2, random)
    [four], _ = parts_of(shim, q, [Chunk(40, "int4")], 2, random)
    [floats], _ = parts_of(shim, q, [Chunk(40, "fp16")], 2, random)
    [other], _ = parts_of(shim, q, [Chunk(40)], 1, random)
    k = part.k
    uneven = np.zeros((2, 40, 65), np.int8)[:, :, :64]
    for wrong, why in [
        (part._replace(k=Plane("fp32", np.zeros((2, 40, 64), np.float32))), "one only is quantised"),
        (floats._replace(k=Plane("fp32", np.zeros((2, 40, 64), np.float32))), "the device reads"),
        (part._replace(k=k._replace(data=k.data.view(np.uint8))), "int8 needs int8"),
        (part._replace(k=k._replace(data=uneven)), "multiples of 16"),
        (part._replace(k=k._replace(scales=None)), "needs scales"),
        (part._replace(k=k._replace(scales=k.scales[:, :39])), "needs scales"),
        (part._replace(k=k._replace(scales=np.zeros((2, 80), np.float32)[:, ::2])), "neighbours"),
        (four._replace(v=four.v._replace(scales=four.v.scales[:1])), "needs scales"),
        (part._replace(v=floats.v), "one only is quantised"),
        (part._replace(v=other.v), "do not fit"),
        (part._replace(last=41), "rows 0..41 of 40"),
        (part._replace(first=-1), "rows -1..40"),
        (part._replace(at=3), "has positions"),
        (part._replace(hidden=np.zeros(2)), "hidden needs int64"),
        (part._replace(turn=Rotation(np.ones(33, np.float32), np.ones(33, np.float32))), "up to 32 angles"),
    ]:
        with pytest.raises(ValueError, match=why):
            ChunkAttention(shim, [wrong], shape)
    falling = part._replace(at=np.arange(40)[::-1].copy())
    with pytest.raises(ValueError, match="ascending"):
        ChunkAttention(shim, [falling], shape, positions=[1, 2])
    for parts, of, why in [
        ([part], (3, 2, 64), "do not divide"),
        ([part, other], shape, "do not divide"),
        ([part], (4, 2, 80), "one of 64, 128, 256"),
        ([part], (4, 0, 64), "needs"),
    ]:
        with pytest.raises(ValueError, match=why):
            ChunkAttention(shim, parts, of)
    for options in ({"window": 0}, {"softcap": -1.0}, {"positions": [1]}):
        with pytest.raises(ValueError):
            ChunkAttention(shim, [part], shape, **options)
    layout = ChunkAttention(shim, [part], shape)
    for bad in (q[:, :1], q.astype(np.float64), q.swapaxes(0, 1).copy().swapaxes(0, 1)):
        with pytest.raises(ValueError, match="q: needs"):
            layout(bad)


def test_every_row_goes_to_one_share() -> None:
    random = np.random.default_rng(8)
    for _ in range(200):
        runs = []
        for _ in range(random.integers(0, 6)):
            first = int(random.integers(0, 100))
            runs.append((first, first + int(random.integers(1, 400))))
        tile, wanted = int(random.choice([16, 32])), int(random.integers(0, 12))
        pieces, items = shared_out(runs, tile, wanted)
        for number, (first, last) in enumerate(runs):
            own = [(a, b) for run, a, b in pieces if run == number]
            assert (own[0][0], own[-1][1]) == (first, last)
            assert all(a[1] == b[0] and b[0] % tile == 0 for a, b in pairwise(own))
        assert [at for at, _ in items] == np.cumsum([0, *(count for _, count in items)])[:-1].tolist()
        assert sum(count for _, count in items) == len(pieces)
        assert len(items) <= max(1, wanted)


def test_spans_and_bits() -> None:
    assert spans(2, 9, None) == [(2, 9)]
    assert spans(3, 3, None) == []
    seen = np.array([[5, 9], [0, 3], [2, 4], [20, 20]], np.int32)
    assert spans(0, 30, seen) == [(0, 4), (5, 9)]
    assert without((3, 400), np.array([3, 9, *range(100, 200), 399])) == [(4, 100), (200, 399)]
    assert without((3, 5), np.arange(10)) == []
    assert bits_of(np.array([-1, 0, 33, 40]), 40).tolist() == [1, 2]
    assert seen_rows(0, 10, 0, np.array([9, 50]), None) is None
    assert seen_rows(0, 10, 5, np.array([4, 9]), 3).tolist() == [[0, 0], [2, 5]]
