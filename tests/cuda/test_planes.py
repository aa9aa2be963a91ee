"""Coded planes through the CUDA kernels' text: the CPU's numbers and bytes, and how hostile bytes are met."""

import numpy as np
import pytest

from ctxreuse.block.format import parse
from ctxreuse.codec.planes import plane_coder
from ctxreuse.cuda import CodedPlane, DeviceProfile, PagedPlane, Pages, decode_to_pages, encode_planes
from ctxreuse.cuda.layout import CELL, GROUP, PLANE, RUN, fragments, runs_of
from ctxreuse.cuda.rans import CODE, TABLE
from ctxreuse.errors import FormatError
from ctxreuse.kernels import RansTables
from oracle.codec import planes as oracle
from support.device import Sample, compare_planes, decode_planes
from support.shim import Shim

pytestmark = pytest.mark.build("shim")

DENSE = np.zeros(1, np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "card", [{}, {"style": "pairs"}, {"style": "none"}, {"groups": (1, 2)}, {"version": 1}], ids=str
)
@pytest.mark.parametrize("level", ["kl-0.05", "kl-0.005"])
def test_planes_equal_the_cpu(shim: Shim, dtype: str, card: dict[str, object], level: str) -> None:
    compare_planes(shim, Sample(dtype, 150, start=64, **card), level)


@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 128])
def test_any_number_of_tokens(shim: Shim, tokens: int) -> None:
    compare_planes(shim, Sample("bfloat16", tokens, start=2, groups=(2, 1)), "kl-0.005")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_tokens_of_a_context_stand_raw(shim: Shim, dtype: str) -> None:
    compare_planes(shim, Sample(dtype, 70, start=1), "kl-0.05")


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("page_tokens", "row"), [(16, 5), (1, 0), (48, 47)])
def test_pages_of_any_order(shim: Shim, heads_first: bool, page_tokens: int, row: int) -> None:
    compare_planes(shim, Sample("float16", 70), "kl-0.05", heads_first=heads_first, page_tokens=page_tokens, row=row)


def test_heads_of_64_with_a_wide_transform(shim: Shim) -> None:
    # All 190 components, numbers of 11 bits, low bits and escapes in every cell.
    sample = Sample("bfloat16", 70, dim=64, start=0, spread=(300.0, 0.98))
    assert len(sample.card.levels[sample.card.number("kl-0.005")].codings[0].table) == 190
    entries = np.frombuffer(sample.coded("kl-0.005").plane(0, "k"), "<u8,<u4,<u2,<u2", 2, 8)
    assert (entries["f2"] > 100).all()
    compare_planes(shim, sample, "kl-0.005")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 1e-40, 0.0])
def test_a_token_that_cannot_be_coded_stands_raw(shim: Shim, value: float) -> None:
    sample = Sample("float32", 70)
    array = sample.block.array(0, "v").copy()
    array[1, 10], array[:, 66] = value, value
    coder = sample.device(shim, "kl-0.05")
    [stream] = encode_planes(coder, [PagedPlane(0, "v", Pages(array[None], "float32", DENSE), 70, 0, 64)])
    [back] = decode_planes(coder, [(0, "v", stream)], "float32", 64)
    if not abs(value) < 1e30:  # in bfloat16
        bits = array[:, [10, 66]].view(np.uint32)
        rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
        assert (np.where(np.isnan(array[:, [10, 66]]), bits, rounded) == back[:, [10, 66]].view(np.uint32)).all()
    near = np.delete(np.arange(70), [10, 66])
    assert np.abs(back[:, near] - array[:, near]).max() < 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_may_keep_another_type_than_the_block(shim: Shim, dtype: str) -> None:
    sample = Sample("float16", 70, start=0)  # four raw tokens of fp16
    card, data = sample.device(shim, "kl-0.05"), sample.coded("kl-0.05")
    jobs = [(layer, role, data.plane(layer, role)) for layer, role in sample.planes]
    wide = decode_planes(card, jobs, "float32", 0)
    for array, other in zip(wide, decode_planes(card, jobs, dtype, 0), strict=True):
        bits = array.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        assert (other == (array if dtype == "float32" else rounded)).all()
    raw = sample.block.array(0, "k")[:, :4].view(np.float16).astype(np.float32)
    assert (wide[0][:, :4] == raw).all()


def test_structures_are_those_of_the_kernels(shim: Shim) -> None:
    known = {"RansTable": TABLE, "RansCode": CODE, "Run": RUN, "KltGroup": GROUP}
    known |= {"KltPlane": PLANE, "KltCell": CELL}
    assert {name: shim.size_of(name) for name in known} == {name: dtype.itemsize for name, dtype in known.items()}


def test_every_channel_is_in_one_run() -> None:
    for rotary in (("half", 8), ("half", 32), ("pairs", 16), ("none", 0)):
        runs = runs_of(3, 3, 64, rotary)
        used = runs[runs["head"] != 0xFFFF]
        channels = (used["channel"][..., None] + np.arange(4)).reshape(-1)
        assert sorted(channels.tolist()) == list(range(192))
        assert (used["channel"] - used["dim"] == (used["head"][:, None] - 3) * 64).all()
        assert len(runs) % 4 == 0
    with pytest.raises(ValueError, match="multiples of 8"):
        runs_of(0, 1, 20, ("none", 0))
    with pytest.raises(ValueError, match="multiples of 8"):
        runs_of(0, 1, 64, ("half", 10))


def test_tiles_of_coarse_rows_are_known() -> None:
    basis = np.random.default_rng(0).integers(-8191, 8192, (70, 64)).astype(np.int16)
    basis[32:] = basis[32:] // 64 * 64
    basis[0, 0] = 8191
    bytes_, coarse = fragments(basis, runs_of(0, 1, 64, ("none", 0)), False, 3)
    assert coarse == 0b110
    assert bytes_.shape == (2, 3, 2, 2, 32, 2, 2, 4)


def spoil(data: bytes, random: np.random.Generator) -> bytes:
    of = bytearray(data)
    kind = random.integers(4)
    if kind == 0:
        return bytes(of[: random.integers(len(of))])
    if kind == 1:
        return bytes(of) + bytes(int(random.integers(1, 9)))
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(len(of) if kind == 2 else 60))
        of[at] ^= 1 << int(random.integers(8))
    return bytes(of)


@pytest.mark.parametrize("seed", range(4))
def test_hostile_streams_give_an_error_or_what_the_cpu_makes_of_them(shim: Shim, seed: int) -> None:
    random = np.random.default_rng(seed)
    sample = Sample("float32", 70, start=0)
    card, block = sample.device(shim, "kl-0.05"), sample.coded("kl-0.05")
    tables = RansTables(sample.card.tables)
    refused = accepted = 0
    for _ in range(60):
        layer, role = sample.planes[random.integers(len(sample.planes))]
        data = spoil(bytes(block.plane(layer, role)), random)
        memory = np.zeros((3, 3, 70, 16), np.float32)
        try:
            decode_to_pages(card, [CodedPlane(layer, role, data, Pages(memory, "float32", DENSE + 1), 0, 0)])
        except FormatError:
            refused += 1
        else:
            accepted += 1
            coder = plane_coder(sample.card, sample.card.number("kl-0.05"), layer, role, tables)
            wanted = oracle.decode(coder, memoryview(data), "float32", 0)
            assert (memory[1].view(np.uint32) == wanted.view(np.uint32)).all()
        assert not memory[[0, 2]].any()
    assert refused > 30
    assert accepted > 0


def test_a_refinement_must_fit_its_base(shim: Shim) -> None:
    sample = Sample("float32", 70)
    other = Sample("float32", 71)
    fine, base = sample.device(shim, "kl-0.005"), sample.coded("kl-0.05").plane(0, "k")
    pages = Pages(np.zeros((1, 3, 80, 16), np.float32), "float32", DENSE)
    more = parse(other.codec.refinement(other.block, "kl-0.005")).plane(0, "k")
    with pytest.raises(FormatError, match="differ"):
        decode_to_pages(fine, [CodedPlane(0, "k", base, pages, 0, 64, more)])
    with pytest.raises(FormatError, match="no head of this level"):
        decode_to_pages(fine, [CodedPlane(0, "k", base, pages, 0, 64, base)])
    with pytest.raises(ValueError, match="refines no other"):
        decode_to_pages(sample.device(shim, "kl-0.01"), [CodedPlane(0, "k", base, pages, 0, 64, more)])
    assert not pages.memory.any()


def test_pages_that_cannot_be_are_refused(shim: Shim) -> None:
    sample = Sample("float32", 70)
    card, data = sample.device(shim, "kl-0.05"), sample.coded("kl-0.05").plane(1, "v")
    good = np.zeros((1, 3, 80, 16), np.float32)

    def decode(memory: np.ndarray, dtype: str = "float32", table: np.ndarray = DENSE, row: int = 0) -> None:
        decode_to_pages(card, [CodedPlane(1, "v", data, Pages(memory, dtype, table), row, 64)])

    decode(good)
    for call, reason in [
        (lambda: decode(good, "float16"), "no float16"),
        (lambda: decode(good[:, :2]), "needs"),
        (lambda: decode(good, row=11), "end before"),
        (lambda: decode(good, row=-1), "end before"),
        (lambda: decode(good, table=DENSE.astype(np.int64)), "int32"),
        (lambda: decode(np.zeros((1, 3, 80, 17), np.float32)[..., :16]), "aligned"),
        (lambda: decode(np.asfortranarray(good)), "contiguous"),
        (lambda: decode(good, table=DENSE + 1), "no page"),
        (lambda: decode(good, table=DENSE - 1), "no page"),
        (lambda: encode_planes(card, [PagedPlane(1, "v", Pages(good, "float32", DENSE - 1), 70)]), "no page"),
        (lambda: encode_planes(card, [PagedPlane(1, "v", Pages(good, "float32", DENSE), 0)]), "1 to 65,535"),
        (lambda: card.number(7, "v"), "no plane"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
    half = Pages(good.astype(np.float16), "float16", DENSE)
    with pytest.raises(ValueError, match="not the type of the model space"):
        encode_planes(card, [PagedPlane(1, "v", half, 70)])
    small = Shim.__new__(Shim)
    small.__dict__ = {**vars(shim), "shared_bytes": 4096}
    with pytest.raises(ValueError, match="shared memory"):
        DeviceProfile(small, sample.card, "kl-0.05", "float32")


def test_blocks_hold_as_many_warps_as_shared_memory_lets(shim: Shim) -> None:
    wide = Sample("float16", 64, dim=64, spread=(300.0, 0.98))
    assert wide.device(shim, "kl-0.005").warps == 8
    assert Sample("float16", 64).device(shim, "kl-0.005").warps == 16
    small = Shim.__new__(Shim)
    small.__dict__ = {**vars(shim), "shared_bytes": 100 * 1024}
    assert wide.device(small, "kl-0.005").warps == 3
    compare_planes(small, Sample("float16", 64, dim=64), "kl-0.05")
