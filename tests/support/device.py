"""Comparisons of the CUDA kernels with the CPU, bit for bit, on any Launcher: a GPU, or the shim on this processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse
from ctxreuse.codec import Codec, CodecProfile, profile_digest, read_profile, write_profile
from ctxreuse.cuda import CodedPlane, DeviceProfile, Launcher, PagedPlane, Pages, decode_to_pages, encode_planes
from ctxreuse.cuda.cells import parse as parse_stream
from ctxreuse.cuda.copies import on_host
from ctxreuse.dtypes import BITS
from ctxreuse.identity.model import ModelSpace
from support.profiles import make_block, make_profile, make_space

__all__ = ["Sample", "compare_planes", "decode_planes", "paged"]


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
    memory, table = on_host(pages.memory), on_host(pages.table)
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
        touched = on_host(job.pages.memory) != np.array(0xA5A5A5A5, np.uint64).astype(array.dtype)
        assert touched.sum() <= array.size, f"{where}: more than its own rows"
    sources = []
    for layer, role in sample.planes:
        array = sample.block.array(layer, role).view(BITS[sample.dtype])
        pages = paged(launcher, array, sample.dtype, page_tokens, heads_first=heads_first, row=row)
        memory, table = on_host(pages.memory).copy(), on_host(pages.table)
        slots = np.arange(row, row + array.shape[1])
        memory[table[slots // page_tokens], :, slots % page_tokens] = array.transpose(1, 0, 2)
        filled = Pages(launcher.xp.asarray(memory), sample.dtype, pages.table)
        sources.append(PagedPlane(layer, role, filled, array.shape[1], row, sample.start))
    for stream, source in zip(encode_planes(device, sources), sources, strict=True):
        assert stream.tobytes() == bytes(coded.plane(source.layer, source.role)), f"layer {source.layer} {source.role}"


def decode_planes(
    profile: DeviceProfile, coded: Sequence[tuple[int, str, Any]], dtype: str, start: int = 0
) -> list[Any]:
    """Decode streams (layer, role, bytes) to arrays [heads, tokens, dim] on the device; row 0 has position ``start``.

    ``dtype`` bfloat16 gives uint16 arrays.
    """
    xp = profile.launcher.xp
    items = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    outs, jobs = [], []
    for layer, role, data in coded:
        plane = profile.profile.planes[profile.number(layer, role)]
        tokens = parse_stream(data, profile, profile.number(layer, role), f"layer {layer} {role}").tokens
        out = xp.empty((1, plane.heads, tokens, plane.dim), items[dtype])
        outs.append(out[0])
        jobs.append(CodedPlane(layer, role, data, Pages(out, dtype, xp.zeros(1, np.int32)), 0, start))
    decode_to_pages(profile, jobs)
    return outs
