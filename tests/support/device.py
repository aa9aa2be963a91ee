"""Comparisons of the CUDA kernels with the CPU, bit for bit, on any Launcher: a GPU, or the shim on this processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block.format import BlockView, parse
from ctxreuse.codec import Codec, CodecProfile, profile_digest, read_profile, write_profile
from ctxreuse.cuda import CodedPlane, DeviceProfile, Launcher, PagedPlane, Pages, decode_to_pages, encode_planes, rans
from ctxreuse.dtypes import BITS
from ctxreuse.identity.model import ModelSpace
from support.profiles import make_block, make_profile, make_space

__all__ = ["Sample", "compare_planes", "compare_streams", "paged", "sample_streams"]


def sample_streams(
    seed: int, counts: list[int]
) -> tuple[npt.NDArray[np.uint8], kernels.RansTables, npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Symbols drawn from the tables of their steps, the tables (extreme ones among them), steps, and random seeds."""
    random = np.random.default_rng(seed)
    rows = [[255, 1], [1, 255], [1] * 31 + [225], [8] * 32, [128, 128]]
    for scale in (0.3, 1, 3, 9):
        weights = np.exp(-(((np.arange(32) - 15) / scale) ** 2) / 2)
        row = np.maximum(1, np.floor(weights / weights.sum() * 200)).astype(int)
        row[15] += 256 - row.sum()
        rows.append(row.tolist())
    tables = kernels.RansTables([row + [0] * (32 - len(row)) for row in rows])
    slots = np.stack([np.repeat(np.arange(32, dtype=np.uint8), row) for row in tables.freqs])
    steps, symbols = [], []
    for n in counts:
        mine = random.integers(0, len(tables), -(-n // 64), dtype=np.uint16)
        steps.append(mine)
        symbols.append(slots[np.repeat(mine, 64)[:n], random.integers(0, 256, n)])
    seeds = random.integers(0, 65536, (len(counts), 64), dtype=np.uint16)
    return np.concatenate(symbols), tables, np.concatenate(steps), seeds


def compare_streams(launcher: Launcher, seed: int, counts: list[int]) -> None:
    """Encode, decode and count on the device and on the CPU; AssertionError where they differ."""
    symbols, tables, steps, seeds = sample_streams(seed, counts)
    wanted, offsets = kernels.rans_encode_many(symbols, counts, tables, steps, seeds)
    data, starts, sizes = rans.encode(launcher, symbols, counts, tables, steps, seeds)
    made = rans.on_host(data)
    assert sizes.tolist() == np.diff(offsets).tolist()
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        assert (made[start : start + size] == wanted[offsets[i] : offsets[i + 1]]).all(), f"bytes of stream {i}"
    back, ends = rans.decode(launcher, wanted, offsets, counts, tables, steps)
    assert (rans.on_host(back) == symbols).all()
    assert (rans.on_host(ends) == seeds).all()
    first, steps_of = symbols[: counts[0]], steps[: -(-counts[0] // 64)]
    counted = rans.on_host(rans.count(launcher, first, steps_of, len(tables)))
    assert (counted == kernels.rans_count(first, steps_of, len(tables))).all()


class Sample:
    """A made-up model with heads of ``dim`` channels, its card, and a block of it with raw planes."""

    def __init__(self, dtype: str, tokens: int, *, dim: int = 16, start: int = 64, **card: Any) -> None:
        spread = card.get("spread", (6.0, 0.9))
        self.space: ModelSpace = make_space(dtype, tokens, dim=dim)
        data = write_profile(make_profile(self.space, **card))
        self.card: CodecProfile = read_profile(data)
        self.codec = Codec(self.space, (profile_digest(data).hex(), self.card))
        self.start, self.dtype = start, dtype
        self.block = make_block(self.space, self.card, start=start, spread=spread)
        self.planes = [(plane.layer, plane.role) for plane in self.card.planes]

    def coded(self, level: str) -> BlockView:
        """The block at a level, by the CPU."""
        return parse(self.codec.encode(self.block, level))

    def device(self, launcher: Launcher, level: str) -> DeviceProfile:
        """The card at a level, on the device."""
        return DeviceProfile(launcher, self.card, level, self.dtype)


def paged(
    launcher: Launcher, like: npt.NDArray[Any], dtype: str, page_tokens: int, *, heads_first: bool, row: int
) -> Pages:
    """Pages of 0xa5 with room for ``like`` [heads, tokens, dim] from slot ``row`` on, in an order of their own."""
    heads, tokens, dim = like.shape
    used = -(-(row + tokens) // page_tokens)
    inner = (heads, page_tokens, dim) if heads_first else (page_tokens, heads, dim)
    memory = launcher.xp.asarray(np.full((used + 2, *inner), 0xA5A5A5A5, np.uint64).astype(BITS[dtype]))
    table = np.random.default_rng(tokens).permutation(used + 2)[:used].astype(np.int32)
    return Pages(memory if heads_first else memory.transpose(0, 2, 1, 3), dtype, launcher.xp.asarray(table))


def _rows(pages: Pages, row: int, tokens: int) -> npt.NDArray[Any]:
    memory, table = rans.on_host(pages.memory), rans.on_host(pages.table)
    size = memory.shape[2]
    slots = np.arange(row, row + tokens)
    return np.ascontiguousarray(memory[table[slots // size], :, slots % size].transpose(1, 0, 2))


def compare_planes(
    launcher: Launcher, sample: Sample, level: str, *, page_tokens: int = 16, heads_first: bool = True, row: int = 0
) -> None:
    """Decode a block's coded planes into pages and encode them from pages; AssertionError where the CPU differs.

    A level that refines another is decoded from its base and refinement as well.
    """
    device, coded = sample.device(launcher, level), sample.coded(level)
    decoded = parse(sample.codec.decode(coded))
    base = sample.codec.info(level).base
    jobs, wanted = [], []
    pairs: list[tuple[BlockView, BlockView | None]] = [(coded, None)]
    if base:
        pairs.append((sample.coded(base), parse(sample.codec.refinement(sample.block, level))))
    for whole, more in pairs:
        for layer, role in sample.planes:
            array = decoded.array(layer, role).view(BITS[sample.dtype])
            pages = paged(launcher, array, sample.dtype, page_tokens, heads_first=heads_first, row=row)
            finer = None if more is None else more.plane(layer, role)
            jobs.append(CodedPlane(layer, role, whole.plane(layer, role), pages, row, sample.start, finer))
            wanted.append(array)
    decode_to_pages(device, jobs)
    for job, array in zip(jobs, wanted, strict=True):
        where = f"layer {job.layer} {job.role}"
        assert (_rows(job.pages, row, array.shape[1]) == array).all(), where
        touched = rans.on_host(job.pages.memory) != np.array(0xA5A5A5A5, np.uint64).astype(array.dtype)
        assert touched.sum() <= array.size, f"{where}: more than its own rows"
    sources = []
    for layer, role in sample.planes:
        array = sample.block.array(layer, role).view(BITS[sample.dtype])
        pages = paged(launcher, array, sample.dtype, page_tokens, heads_first=heads_first, row=row)
        memory, table = rans.on_host(pages.memory).copy(), rans.on_host(pages.table)
        slots = np.arange(row, row + array.shape[1])
        memory[table[slots // page_tokens], :, slots % page_tokens] = array.transpose(1, 0, 2)
        filled = Pages(launcher.xp.asarray(memory), sample.dtype, pages.table)
        sources.append(PagedPlane(layer, role, filled, array.shape[1], row, sample.start))
    for stream, source in zip(encode_planes(device, sources), sources, strict=True):
        assert stream.tobytes() == bytes(coded.plane(source.layer, source.role)), f"layer {source.layer} {source.role}"
