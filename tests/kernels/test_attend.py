"""Attention over stored formats: every table and numpy agree, and arguments that do not fit are refused."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from ctxreuse.kernels.attention import FORMATS, Attended, Part, Plane, attend, attend_name, dequantise, merge, quantise
from ctxreuse.rope import inverse_frequencies, shift_tables
from oracle.kernels import attention as reference_attend
from support.examples import examples

#: Where queries and weights are rounded to bf16, of 8 bits.
ROUNDED = 4e-2
LIMITS = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 1e-5, "int8": 3e-4, "int4": 3e-4}


def _plane(rng: np.random.Generator, format: str, heads: int, tokens: int, dim: int, layout: str) -> Plane:
    """A plane of normal values: contiguous, as rows of [tokens, heads, dim], or at an odd address."""
    x = rng.standard_normal((heads, tokens, dim), np.float32)
    plane = quantise(reference_attend.quantise(x, "bf16")[0] if format == "bf16" else x, format)
    if layout == "tokens first":
        return plane._replace(data=np.ascontiguousarray(plane.data.swapaxes(0, 1)).swapaxes(0, 1))
    if layout == "odd":
        room = np.zeros(plane.data.nbytes + 1, np.uint8)
        data = np.frombuffer(room.data, plane.data.dtype, plane.data.size, 1).reshape(plane.data.shape)
        room[1:] = plane.data.reshape(-1).view(np.uint8)
        return plane._replace(data=data)
    return plane


def _close(got: Attended, wanted: Attended, limit: float) -> None:
    assert np.isfinite(got.o).all()
    assert np.abs(got.o - wanted.o).max(initial=0) <= limit * max(1, np.abs(wanted.o).max(initial=0))
    seen = wanted.lse > -np.inf
    assert (got.lse > -np.inf).tolist() == seen.tolist()
    assert np.abs(got.lse[seen] - wanted.lse[seen]).max(initial=0) <= limit


@examples("normal")
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_table_agrees_with_numpy(data: st.DataObject, seed: int) -> None:
    rng, draw = np.random.default_rng(seed), data.draw
    heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 3), (3, 1)]))
    queries, dim = (
        draw(st.sampled_from([1, 2, 7, 33])),
        draw(st.sampled_from([1, 12, 16, 32, 48, 64, 96, 128, 160, 256])),
    )
    formats = [f for f in FORMATS if f != "int4" or dim % 32 == 0]
    q = rng.standard_normal((heads * group, queries, dim), np.float32)
    positions = rng.integers(0, 300, queries) if draw(st.booleans()) else None
    parts, limit = [], 0.0
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.sampled_from([1, 3, 31, 128, 200]))
        layout = draw(st.sampled_from(["plain", "tokens first", "odd"]))
        kinds = draw(st.tuples(st.sampled_from(formats), st.sampled_from(formats)))
        limit = max(limit, *(LIMITS[kind] for kind in kinds))
        k, v = (_plane(rng, kind, heads, tokens, dim, layout) for kind in kinds)
        first = draw(st.integers(0, tokens))
        at: Any = None
        if positions is not None:
            at = draw(st.sampled_from([None, -3, 40, np.sort(rng.integers(0, 300, tokens))]))
        parts.append(
            Part(
                k,
                v,
                first,
                draw(st.none() | st.integers(first, tokens)),
                at,
                rng.standard_normal(q.shape, np.float32) if draw(st.booleans()) else None,
                np.flatnonzero(rng.random(tokens) < 0.3) if draw(st.booleans()) else None,
            )
        )
    how: dict[str, Any] = {
        "positions": positions,
        "window": draw(st.sampled_from([None, None, 1, 50])),
        "softcap": draw(st.sampled_from([None, None, 5.0])),
    }
    rounded = draw(st.booleans())
    if rounded and any("bf16" in (part.k.format, part.v.format) for part in parts):
        limit = ROUNDED
    scale = 1 / np.sqrt(dim)
    wanted = Attended(*reference_attend.attend(q, parts, positions, scale, how["window"], how["softcap"]))
    for name in kernels.available():
        kernels.use(name)
        _close(attend(q, parts, **how, rounded=rounded), wanted, limit)
        _close(attend(q, parts, **how, rounded=rounded, threads=2), wanted, limit)
        _close(merge([attend(q, [part], **how) for part in parts[::-1]]), wanted, limit)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("spread", ["even", "late", "unordered", "none"])
def test_many_queries_are_shared_out_among_threads(threads: int, spread: str) -> None:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 200, 16), np.float32)
    k, v = (quantise(rng.standard_normal((1, 300, 16), np.float32), "fp32") for _ in range(2))
    positions = np.sort(rng.choice(300, 200, replace=False))
    if spread == "late":
        positions[:190] = 3
    if spread == "unordered":
        positions = rng.permutation(positions)
    at = None if spread == "none" else 0
    turned = rng.standard_normal(q.shape, np.float32)
    parts = [Part(k, v, 0, 180, at), Part(k, v, 180, None, None if at is None else np.arange(300), turned)]
    how: dict[str, Any] = {"positions": None if spread == "none" else positions}
    whole = attend(q, parts, **how, threads=1)
    found = attend(q, parts, **how, threads=threads)
    assert np.array_equal(found.o, whole.o)
    assert np.array_equal(found.lse, whole.lse)


@pytest.mark.parametrize(("tokens", "dim", "window"), [(700, 64, None), (701, 80, None), (513, 128, 200)])
def test_a_slice_of_a_prompt_in_bf16(tokens: int, dim: int, window: int | None) -> None:
    """Many queries, each of which sees all before it, rounded and not."""
    rng = np.random.default_rng(tokens)
    k, v = (_plane(rng, "bf16", 2, tokens, dim, "plain") for _ in range(2))
    queries = 260
    q = (rng.standard_normal((6, queries, dim), np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    positions = np.arange(tokens - queries, tokens)
    how: dict[str, Any] = {"positions": positions, "window": window}
    wanted = Attended(*reference_attend.attend(q, [Part(k, v, at=0)], positions, 1 / np.sqrt(dim), window, None))
    for name in kernels.available():
        kernels.use(name)
        _close(attend(q, [Part(k, v, at=0)], **how), wanted, LIMITS["bf16"])
        _close(attend(q, [Part(k, v, at=0)], **how, rounded=True), wanted, ROUNDED / 4)


@pytest.mark.parametrize("format", FORMATS)
def test_a_chunk_served_where_it_lies(format: str, tmp_path: Path) -> None:
    """Rows in a memory map at another position than they were computed at: the query is turned, and not the keys."""
    rng = np.random.default_rng(5)
    freqs = inverse_frequencies(1e4, 64)
    k, v = rng.standard_normal((2, 2, 70, 64), np.float32)
    q = rng.standard_normal((4, 1, 64), np.float32)

    def turned(x: Any, shift: int) -> Any:
        out = x.copy()
        kernels.rope_shift(out, out, x.shape, *shift_tables(freqs, shift), dst_dtype="fp32")
        return out

    held = quantise(k, format) if format != "bf16" else Plane("bf16", reference_attend.quantise(k, "bf16")[0])
    file = tmp_path / "plane"
    file.write_bytes(b"head" + held.data.tobytes())
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as map_:
        data = np.frombuffer(map_, held.data.dtype, held.data.size, 4).reshape(held.data.shape)
        part = Part(held._replace(data=data), Plane("fp32", v), q=turned(q, -11))
        got = attend(q, [part])
        del data, part
    wanted = attend(q, [Part(Plane("fp32", turned(dequantise(held), 11)), Plane("fp32", v))])
    _close(got, wanted, LIMITS[format])


def test_int8_lies_within_a_thousandth_at_many_tokens() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((8, 1, 128), np.float32) * 3
    k, v = (quantise(rng.standard_normal((2, 9000, 128), np.float32), "int8") for _ in range(2))
    wanted, _ = reference_attend.attend(q, [Part(k, v)], None, 128**-0.5, None, None)
    got = attend(q, [Part(k, v)]).o
    assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_merging_is_in_any_order_and_nothing_is_neutral() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 16), np.float32)
    k, v = (quantise(rng.standard_normal((2, 90, 16), np.float32), "fp16") for _ in range(2))
    whole = attend(q, [Part(k, v)])
    pieces = [attend(q, [Part(k, v, a, b)]) for a, b in ((0, 10), (10, 60), (60, 90))] + [attend(q, [])]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]):
        _close(merge([pieces[i] for i in order]), whole, 1e-6)
    numpy = reference_attend.merge(np.stack([p.o for p in pieces]), np.stack([p.lse for p in pieces]))
    _close(Attended(*numpy), whole, 1e-6)
    nothing = merge([pieces[3], pieces[3]])
    assert (nothing.o == 0).all()
    assert (nothing.lse == -np.inf).all()
    with pytest.raises(ValueError, match="at least one"):
        merge([])


@examples("normal")
@given(
    seed=st.integers(0, 2**32), shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([32, 64, 96])),
    size=st.sampled_from([1.0, 1e-6, 1e3, 0.0]), strided=st.booleans(), of=st.sampled_from(["fp32", "fp16", "bf16"]),
)  # fmt: skip
def test_quantising_gives_numpys_codes(
    seed: int, shape: tuple[int, int, int], size: float, strided: bool, of: str
) -> None:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(size)
    x[0, 0, :5] = 0, -0.0, size, -size, 0
    x, _ = reference_attend.quantise(x, of)
    given_ = np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) if strided else x
    for format in ("int8", "int4"):
        wide = reference_attend.widen(x, of)
        wanted = reference_attend.quantise(wide, format)
        for name in kernels.available():
            kernels.use(name)
            plane = quantise(given_, format)
            assert plane.scales is not None
            assert wanted[1] is not None
            assert (plane.data == wanted[0]).all()
            assert plane.scales.tobytes() == wanted[1].tobytes()
        off, most = np.abs(dequantise(plane) - wide).max(), np.abs(wide).max()
        if format == "int8":
            assert off <= 0.51 * most / 127 + 1e-6
        else:  # 15 steps, each up to 1/17 too small, from a low that is up to 1/16 off; the least step is 2^-17
            assert off <= 0.95 * max(np.ptp(wide), most) / 15 + 15 * 2**-18


def test_formats_of_floats() -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 8), np.float32)
    assert quantise(x, "fp32").data is x
    half = quantise(x, "fp16")
    assert quantise(half.data, "fp16").data is half.data
    assert (dequantise(half) == x.astype(np.float16).astype(np.float32)).all()
    bits = np.zeros(x.shape, np.uint16)
    kernels.rope_shift(bits, x, x.shape, [], [], dst_dtype="bf16", src_dtype="fp32")
    assert (quantise(x, "bf16").data == bits).all()
    assert quantise(x[:, :, ::2], "int8").data.shape == (1, 4, 4)
    assert quantise(x, "int8").nbytes == 32 + 16
    assert attend_name(64) == kernels.active()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_quantised(value: float) -> None:
    x = np.zeros((1, 2, 32), np.float32)
    x[0, 1, 7] = value
    for format in ("int8", "int4"):
        with pytest.raises(ValueError, match="not finite"):
            quantise(x, format)
        with pytest.raises(ValueError, match="not finite"):
            reference_attend.quantise(x, format)
    with pytest.raises(ValueError, match="half floats"):
        quantise(np.full((1, 1, 32), 1e6, np.float32), "int4")


def _part(format: str = "int8", tokens: int = 6, dim: int = 32, heads: int = 2, **changed: Any) -> Part:
    x = np.zeros((heads, tokens, dim), np.float32)
    return Part(quantise(x, format), quantise(x, format))._replace(**changed)


def _bad_planes() -> list[Plane]:
    good, four = _part("int8").k, _part("int4").k
    assert good.scales is not None
    assert four.scales is not None
    return [
        Plane("int9", good.data, good.scales), Plane("int8", good.data), Plane("int8", good.data, good.scales[:1]),
        Plane("int8", good.data.view(np.uint8), good.scales), Plane("int8", good.data[0], good.scales),
        Plane("int8", good.data, good.scales.astype(np.float64)), Plane("int8", good.data[:, :, ::2], good.scales),
        Plane("int8", good.data[:, :5], good.scales), Plane("int8", good.data[:, :, :16], good.scales),
        Plane("fp32", good.data), Plane("fp16", np.zeros((2, 6, 32), np.float16), good.scales),
        Plane("int4", four.data, four.scales[:, :1]), Plane("int4", four.data[:, :, :8], four.scales),
        Plane("int4", four.data, four.scales.view(np.uint16)), Plane("fp32", np.zeros((2, 6, 32), ">f4")),
    ]  # fmt: skip


REFUSED: list[dict[str, Any]] = [
    *({"parts": [_part()._replace(k=plane)]} for plane in _bad_planes()),
    *({"parts": [_part()._replace(v=plane)]} for plane in _bad_planes()),
    {"parts": [_part(heads=3)]}, {"parts": [_part(), _part(heads=4)]}, {"parts": [_part(dim=64)]},
    {"parts": [_part(first=-1)]}, {"parts": [_part(last=7)]}, {"parts": [_part(first=4, last=3)]},
    {"parts": [_part(last=2**70)]}, {"parts": [_part(at=0)], "positions": None}, {"parts": [_part(at=2**61)]},
    {"parts": [_part(at=np.arange(5))]}, {"parts": [_part(at=np.arange(6)[::-1].copy())]},
    {"parts": [_part(at=np.arange(6.0))]}, {"parts": [_part(hidden=np.array([3, 1]))]},
    {"parts": [_part(hidden=np.array([1.0]))]}, {"parts": [_part(q=np.zeros((4, 3, 31), np.float32))]},
    {"parts": [_part(q=np.zeros((4, 3, 32)))]}, {"positions": [1, 2]}, {"positions": [2**62, 0, 0]},
    {"positions": [0.5, 1, 2]}, {"window": 0}, {"window": -4}, {"window": 2**61}, {"softcap": 0.0}, {"softcap": np.inf},
    {"scale": np.nan}, {"scale": np.inf}, {"q": np.zeros((4, 3, 32))}, {"q": np.zeros((4, 32), np.float32)},
    {"q": np.zeros((5, 3, 32), np.float32)}, {"q": np.zeros((4, 3, 0), np.float32)},
    {"q": np.zeros((4, 3, 513), np.float32)},
]  # fmt: skip


@pytest.mark.parametrize("changed", REFUSED, ids=lambda changed: str(changed)[:70])
def test_what_does_not_fit_is_refused(changed: dict[str, Any]) -> None:
    args = {"q": np.zeros((4, 3, 32), np.float32), "parts": [_part()], "positions": [5, 6, 7]}
    assert attend(**args).o.shape == (4, 3, 32)
    with pytest.raises((ValueError, OverflowError)):
        attend(**(args | changed))


def test_the_extension_checks_for_itself() -> None:
    q, o, lse = np.zeros((4, 1, 32), np.float32), np.zeros((4, 1, 32), np.float32), np.zeros((4, 1), np.float32)
    plane = np.zeros((2, 6, 32), np.float32)
    fields = [0, plane, None, 0, plane, None, 6, 0, 6, None, None, None]

    def call(at: int | None = None, value: Any = None, field: int | None = None) -> None:
        mine = [value if i == field else x for i, x in enumerate(fields)]
        args: list[Any] = [q, o, lse, 4, 2, 1, 32, None, 1.0, 0, 0.0, 0, [tuple(mine)], 0, 2, 0, 6, 1]
        if at is not None:
            args[at] = value
        _native.attend(*args)

    call()
    for at, value in (
        (0, q[:3]), (0, q.astype(np.float64)), (1, bytes(512)), (1, o[:3]), (2, lse[:3]), (3, 5), (3, 0), (4, 0),
        (4, 3), (5, 2**62), (6, 0), (6, 31), (6, 2**63 - 1), (7, np.zeros(2, np.int64)), (7, 5), (8, np.nan), (9, -1),
        (10, -1.0), (11, -1), (11, "x"), (12, [()]), (12, 7), (12, [None]), (14, 3), (15, 7), (13, -1), (16, -1),
        (0, None), (8, "x"), (9, None), (17, -1),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            call(at, value)
    for field, value in (
        (0, 5), (0, 3), (0, 4), (0, 1), (1, plane[0]), (1, plane[:, :5]), (1, plane[:1]), (1, None),
        (1, plane[:, ::-1]), (1, bytes(1536)), (2, plane), (6, 5), (6, 7), (7, 7), (8, 5.5), (9, 0), (9, b""),
        (10, q[:2]), (11, b"abc"),
        (6, 2**63), (7, -1),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            call(None, value, field)
    four = np.zeros((2, 6, 16), np.uint8)
    for scales in (None, np.zeros((2, 2, 1, 5), np.float16), np.zeros((2, 2, 6), np.float16), np.zeros(24, np.float16)):
        wrong = (4, four, scales, *fields[3:])
        with pytest.raises((ValueError, TypeError)):
            _native.attend(q, o, lse, 4, 2, 1, 32, None, 1.0, 0, 0.0, 0, [wrong], 0, 2, 0, 6, 1)
    for result, logs, *sizes in (
        (o, lse, 2, 4, 32), (o, lse, 0, 4, 32), (o, lse, 1, 2**62, 2**62), (o, lse, 1, 4, 31), (o, 5, 1, 4, 32),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            _native.attend_merge(result, logs, *sizes)
    codes, found = np.zeros((2, 6, 32), np.int8), np.zeros((2, 6), np.float32)
    for wrong in (
        (plane, 0, 0, codes, found), (plane, 0, 3, codes[:1], found), (plane, 0, 3, codes, found[:1]),
        (plane, 0, 4, codes, found), (plane[:, :, ::2], 0, 3, codes, found), (b"abc", 0, 3, codes, found),
        (plane, 0, 3, bytes(384), found), (plane[0], 0, 3, codes, found), (plane, 1, 3, codes, found),
        (plane, 3, 3, codes, found), (np.broadcast_to(np.float32(0), (2**20, 2**20, 512)), 0, 3, codes, found),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            _native.attend_quantise(*wrong)
