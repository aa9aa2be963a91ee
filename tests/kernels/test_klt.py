"""The native transform coder equals the numpy oracle on every instruction set, and refuses what is no stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import kernels
from ctxreuse.codec.planes import PlaneCoder, raw_type
from ctxreuse.codec.profile import ChannelGroup, Coding, PlaneProfile
from ctxreuse.codec.stream import Coder
from ctxreuse.codec.whole import WholeForward
from ctxreuse.dtypes import BITS
from ctxreuse.kernels import KltGroup, KltPlane, KltPlanes, RansTables, StreamError, klt
from ctxreuse.rope import Rotary
from oracle.codec import planes as oracle
from oracle.codec.planes import to_bits
from support.examples import examples
from support.klt_planes import decode_plane, encode_plane

STEP = 0.25


def _tables(rng: np.random.Generator) -> RansTables:
    """Peaks of several widths with an escape; the first is a refinement's; tails are absent."""
    rows = [np.array([70, 110, 70] + [0] * 28 + [6])]
    for width in (0, 1, 2, 4, 8, 15):
        weight = np.clip(width + 1 - np.abs(np.arange(31) - 15), 0, None)
        row = np.append(weight * 200 // max(int(weight.sum()), 1), int(rng.integers(1, 9)))
        row[15] += 254 - row.sum()
        row[14 + 2 * int(rng.integers(2))] += 2
        rows.append(row)
    return RansTables(np.array(rows))


class Made:
    """A plane at a level and at the base below it, as numpy and as kernels see them, and rows to code."""

    def __init__(
        self, seed: int, *, dim: int, groups: list[int], tokens: int, dtype: str, style: str, narrow: bool, wild: bool,
        whole: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.tokens, self.dtype, self.start = tokens, dtype, int(rng.choice([0, 2, 77]))
        heads, tables = sum(groups), _tables(rng)
        rotary = 2 * int(rng.integers(1, dim // 2 + 1)) if style != "none" and dim > 1 else 0
        rope = Rotary(style, tuple((100.0 ** -rng.random(rotary // 2)).tolist()), 1.25) if rotary else None  # type: ignore[arg-type]
        found: list[list[Coder]] = [[], []]
        kept, first = [], 0
        for count in groups:
            channels = count * dim
            n = int(rng.integers(channels + 1))
            size = 4 * 0.9 ** np.arange(n)[:, None]
            forward = (rng.normal(size=(n, channels)) * size / np.sqrt(channels)).astype(np.float32)
            basis = rng.integers(-8191, 8192, (n, channels)).astype(np.int16)
            if narrow:
                basis[n // 3 :] = (basis[n // 3 :] // 64).clip(-127, 127) * 64
            mean, gain = rng.normal(size=(2, channels)).astype(np.float32)
            group = ChannelGroup(first, count, float(rng.normal()), mean, gain / 8191, forward, basis)
            low = int(rng.integers(n + 1))
            for coders, active, step in ((found[0], low, 3 * STEP), (found[1], n, STEP)):
                shift = np.where(np.arange(active) < active // 4, rng.integers(0, 5, active), 0)
                table = rng.integers(1, 7, active).astype(np.uint8)
                refine = rng.integers(0, 2, low if coders is found[1] else 0).astype(np.uint8)
                coding = Coding(table, shift.astype(np.uint8), refine)
                base = found[0][-1].coding if coders is found[1] else None
                nested = coders is found[0]
                numbers = WholeForward.of(group, active).at(step, nested=nested) if whole else None
                coders.append(Coder(group, coding, tables, step, base, nested, numbers))
            kept.append(group)
            first += count
        plane = PlaneProfile(0, "k", heads, dim, 0, tuple(kept))
        self.base = PlaneCoder.of(plane, 0, (rope,), found[0])
        self.coder = PlaneCoder.of(plane, 1, (rope,), found[1], self.base)
        self.planes = self.base.native, self.coder.native
        x = rng.normal(size=(heads, tokens, dim)).astype(np.float32)
        if wild:
            x *= 10.0 ** rng.integers(-3, 4, (1, tokens, 1)).astype(np.float32)
            x[:, rng.random(tokens) < 0.1] *= np.float32(1e9)
            x[0, rng.random(tokens) < 0.1, 0] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32))
        self.bits = np.asarray(to_bits(x, dtype)).reshape(x.shape).copy()
        self.rope = rope
        self.box = (tokens * dim, dim, 1)

    def encode(self, level: int, *, refinement: bool = False) -> bytes:
        undo = self.rope.span_tables(self.start, self.tokens, undo=True) if self.rope else None
        data, offsets = encode_plane(
            self.planes[level], self.bits, self.dtype, 0, self.box, [self.tokens], raw_first=max(0, 4 - self.start),
            raw_dtype=raw_type(self.dtype), angles=undo, refinement=refinement,
        )  # fmt: skip
        assert offsets.tolist() == [0, len(data)]
        return bytes(data)

    def decode(self, level: int, data: Any, more: Any = None, **others: Any) -> np.ndarray:
        """Rows [heads, tokens, dim]; what lies round them must stay as it is."""
        heads, tokens, dim = self.bits.shape
        held = np.full((heads, tokens + 2, dim), 0x1234, BITS[self.dtype])
        decode_plane(
            self.planes[level], held, self.dtype, dim * held.itemsize, (held.shape[1] * dim, dim, 1), [data], [tokens],
            raw_type(self.dtype), refinements=None if more is None else [more],
            angles=self.rope.span_tables(self.start, tokens) if self.rope else None, **others,
        )  # fmt: skip
        assert (held[:, 0] == 0x1234).all()
        assert (held[:, -1] == 0x1234).all()
        return held[:, 1:-1]


def everywhere(call: Callable[[], Any]) -> Any:
    """What a call gives, which must be the same with every table."""
    results = []
    for name in kernels.available():
        kernels.use(name)
        results.append(call())
    assert all(np.array_equal(results[0], other) for other in results[1:])
    return results[0]


@examples("normal")
@given(
    seed=st.integers(0, 2**32),
    dim=st.sampled_from([1, 2, 6, 16, 24, 64, 128]),
    groups=st.sampled_from([[1], [2], [1, 2], [2, 1, 1]]),
    tokens=st.integers(1, 150),
    dtype=st.sampled_from(sorted(BITS)),
    style=st.sampled_from(["none", "half", "pairs"]),
    narrow=st.booleans(),
    wild=st.booleans(),
    whole=st.booleans(),
)
def test_streams_and_rows_equal_numpy(seed: int, **shape: Any) -> None:
    made = Made(seed, **shape)
    coder, base, start, dtype = made.coder, made.base, made.start, made.dtype
    whole, low = (oracle.encode(each, made.bits, dtype, start) for each in (coder, base))
    more = oracle.refine(coder, made.bits, dtype, start)
    assert everywhere(lambda: made.encode(1)) == whole
    assert everywhere(lambda: made.encode(0)) == low
    assert everywhere(lambda: made.encode(1, refinement=True)) == more
    assert (everywhere(lambda: made.decode(1, whole)) == oracle.decode(coder, memoryview(whole), dtype, start)).all()
    merged = oracle.decode(coder, memoryview(low), dtype, start, memoryview(more))
    assert (everywhere(lambda: made.decode(1, low, more)) == merged).all()


def _small(seed: int = 0, tokens: int = 70, dim: int = 8) -> Made:
    return Made(
        seed, dim=dim, groups=[1, 2], tokens=tokens, dtype="bfloat16", style="half", narrow=True, wild=bool(seed % 2)
    )


@examples("light")
@given(seed=st.integers(0, 20), data=st.data())
def test_changed_bytes_are_refused_or_decoded_alike(seed: int, data: st.DataObject) -> None:
    made = _small(seed)
    stream, more = bytearray(made.encode(0)), bytearray(made.encode(1, refinement=True))
    level, of = data.draw(st.sampled_from([(0, stream), (1, stream), (1, more)]))
    for _ in range(data.draw(st.integers(1, 3))):
        of[data.draw(st.integers(0, len(of) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 40]))
    del of[len(of) - cut :]

    def attempt() -> Any:
        try:
            return made.decode(level, bytes(stream), bytes(more) if level else None)
        except StreamError as error:
            return f"{error} {error.stream}"

    everywhere(attempt)


def _change(made: Made, level: int, at: int, value: int) -> bytes:
    data = bytearray(made.encode(level))
    data[at] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        *((at, value, "scheme, level or part") for at, value in ((0, 2), (1, 9), (2, 1), (3, 1))),
        *((at, value, "number of tokens or cells") for at, value in ((4, 69), (6, 3))),
        *((at, value, "lengths exceed") for at, value in ((8 + 14, 1), (8 + 9, 255), (8 + 12, 255), (8 + 32, 255))),
    ],
)  # fmt: skip
def test_bent_heads_and_entries_are_named(at: int, value: int, reason: str) -> None:
    made = _small()
    for name in kernels.available():
        kernels.use(name)
        with pytest.raises(StreamError, match=reason):
            made.decode(1, _change(made, 1, at, value))
    with pytest.raises(StreamError, match="lengths exceed"):
        made.decode(1, made.encode(1) + b"\0")
    with pytest.raises(StreamError, match="scheme, level or part"):
        made.decode(1, b"")


def test_a_refinement_must_belong_to_its_base() -> None:
    made, other = _small(2), _small(4)
    with pytest.raises(StreamError, match="refinement 0"):
        made.decode(1, made.encode(0), other.encode(1, refinement=True))
    with pytest.raises(ValueError, match="refines no other"):
        made.decode(0, made.encode(0), b"")
    with pytest.raises(ValueError, match="refines no other"):
        made.encode(0, refinement=True)


def test_checksums_are_compared_of_long_and_short_streams() -> None:
    made = _small(2)
    whole, low, more = made.encode(1), made.encode(0), made.encode(1, refinement=True)
    assert len(whole) > 240
    sums = [xxhash.xxh3_64_intdigest(part) for part in (whole, low, more)]
    assert (made.decode(1, whole, checksums=[sums[0]]) == made.decode(1, whole)).all()
    assert (made.decode(1, low, more, checksums=[sums[1]], refinement_checksums=[sums[2]])).any()
    with pytest.raises(StreamError, match=r"checksum.*stream 0"):
        made.decode(1, whole, checksums=[sums[0] ^ 1])
    with pytest.raises(StreamError, match=r"checksum.*refinement 0"):
        made.decode(1, low, more, checksums=[sums[1]], refinement_checksums=[sums[2] ^ 1])
    bare = Made(0, dim=1, groups=[1], tokens=3, dtype="float16", style="none", narrow=False, wild=False)
    plane, mean = _bare_plane()
    data, _ = encode_plane(plane, bare.bits, "float16", 0, bare.box, [3])
    assert len(data) == 8 + 16
    out = np.zeros((1, 3, 1), np.float16)
    decode_plane(plane, out, "float16", 0, bare.box, [data], [3], "float16", checksums=[xxhash.xxh3_64_intdigest(data)])
    assert (out == mean).all()
    with pytest.raises(StreamError, match="checksum"):
        decode_plane(plane, out, "float16", 0, bare.box, [data], [3], "float16", checksums=[1])


def _bare_plane(**changed: Any) -> tuple[KltPlane, float]:
    """A plane of one channel that codes nothing but its mean; ``changed`` replaces fields of its group."""
    empty = np.empty((0, 1))
    fields: dict[str, Any] = {
        "first": 0, "heads": 1, "log_rms": 0.0, "mean": [0.5], "gain": [1e-3], "forward": empty,
        "basis": empty.astype(np.int16), "table": [], "shift": [],
    }  # fmt: skip
    return KltPlane(_tables(np.random.default_rng(0)), 1, [KltGroup(**(fields | changed))], 0, 1.0), 0.5


ONE = {"forward": [[1.0]], "basis": np.array([[1]], np.int16), "table": [1], "shift": [0]}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mean": [np.nan]}, "mean"), ({"gain": [np.inf]}, "gain"), ({"first": 1}, "cover the heads"),
        ({"log_rms": 1e4}, "energy"), ({"mean": [1.0, 2.0]}, "arrays"), ({"table": [1]}, "arrays"),
        ({**ONE, "forward": [[np.nan]]}, "forward"), ({**ONE, "basis": np.array([[8192]], np.int16)}, "basis"),
        ({**ONE, "shift": [11]}, "shift"), ({**ONE, "table": [99]}, "table"), ({**ONE, "refine": [0]}, "base"),
        ({**ONE, "basis": [[1.5]]}, "basis"), ({"heads": 2**40}, "arrays"), ({"heads": 0}, "512 channels|heads"),
    ],
)  # fmt: skip
def test_cards_that_cannot_be_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _bare_plane(**changed)


def test_runs_of_blocks_in_any_layout_and_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _small(6, tokens=200)
    heads, tokens, dim = made.bits.shape
    assert made.rope is not None
    plane, counts = made.planes[1], [64, 70, 1, 65]
    undo, turn = made.rope.span_tables(5, tokens, undo=True), made.rope.span_tables(5, tokens)
    data, offsets = encode_plane(plane, made.bits, "bfloat16", 0, made.box, counts, raw_first=66, angles=undo)
    streams = [data[a:b] for a, b in itertools.pairwise(offsets)]
    plain = np.zeros_like(made.bits)
    decode_plane(plane, plain, "bfloat16", 0, made.box, streams, counts, "bfloat16", angles=turn)
    assert (plain[:, :66] == made.bits[:, :66]).all()
    across = np.ascontiguousarray(made.bits.transpose(0, 2, 1))  # [heads, dim, tokens], as vLLM keeps K on CPUs
    strides = (dim * tokens, 1, tokens)
    again, _ = encode_plane(plane, across, "bfloat16", 0, strides, counts, raw_first=66, angles=undo)
    assert again == data
    out = np.zeros((heads, dim, tokens), np.float32)
    decode_plane(plane, out, "float32", 0, strides, streams, counts, "bfloat16", angles=turn)
    assert (to_bits(out, "bfloat16").reshape(out.shape).transpose(0, 2, 1) == plain).all()
    monkeypatch.setattr(klt, "PARALLEL_VALUES", 64)
    monkeypatch.setattr(klt, "cores", lambda: 3)
    spread, places = encode_plane(plane, made.bits, "bfloat16", 0, made.box, counts, raw_first=66, angles=undo)
    assert spread == data
    assert (places == offsets).all()
    threaded = np.zeros_like(plain)
    decode_plane(plane, threaded, "bfloat16", 0, made.box, streams, counts, "bfloat16", angles=turn)
    assert (threaded == plain).all()
    bad = [*streams[:3], streams[3][:-1]]
    with pytest.raises(StreamError, match="stream 3") as caught:
        decode_plane(plane, threaded, "bfloat16", 0, made.box, bad, counts, "bfloat16", angles=turn)
    assert caught.value.stream == 3


def test_times_of_the_parts_are_told() -> None:
    made = _small(8)
    times = np.zeros(len(klt.DECODE_PARTS), np.int64)
    made.decode(1, made.encode(1), times=times)
    assert (times > 0).all()
    with pytest.raises(ValueError, match="times"):
        made.decode(1, made.encode(1), times=np.zeros(1, np.int64))


def test_arguments_that_do_not_fit_are_refused() -> None:
    made = _small()
    data, plane = made.encode(1), made.planes[1]
    assert made.rope is not None
    turn = made.rope.span_tables(0, 70)
    good: dict[str, Any] = {
        "dst": np.zeros_like(made.bits), "dst_dtype": "bfloat16", "dst_offset": 0, "dst_strides": made.box,
        "streams": [data], "token_counts": [70], "raw_dtype": "bfloat16", "angles": turn,
    }  # fmt: skip
    for changed in (
        {"dst": bytes(10)}, {"dst_offset": 1}, {"dst_strides": (1, 1, 1)}, {"dst_dtype": "int8"},
        {"token_counts": [2**62]}, {"token_counts": [-1]}, {"angles": None}, {"angles": (turn[0][:9], turn[1][:9])},
        {"dst": bytes(10**5)}, {"raw_dtype": "x"},
    ):  # fmt: skip
        with pytest.raises((ValueError, OverflowError)):
            decode_plane(plane, **(good | changed))
    alone = KltPlanes.of([plane], np.array([[0, *made.box[:2], 1, 0]], np.int64))
    whole, target = np.array([0, len(data)], np.int64), np.zeros_like(made.bits)
    for source in (
        (70, data, whole, b"1234", None, None, None), (70, data, whole + 1, None, None, None, None),
        (70, data, whole[:1], None, None, None, None), (70, data, whole, None, data, whole - 1, None),
        (70, data, whole),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            alone.decode(target, "bfloat16", [source], "bfloat16", angles=[turn])  # type: ignore[list-item]
    with pytest.raises(StreamError):
        decode_plane(plane, **(good | {"token_counts": [0], "angles": (turn[0][:0], turn[1][:0])}))
    with pytest.raises(ValueError, match="cannot have 0 tokens"):
        encode_plane(plane, made.bits, "bfloat16", 0, made.box, [0])
