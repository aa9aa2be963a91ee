"""Planes of an engine's paged cache coded on a device: the bytes that `ctxreuse.codec` gives for them on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.profile import SINKS
from ctxreuse.cuda.cells import ENTRY
from ctxreuse.cuda.copies import on_host, to_device, to_host
from ctxreuse.cuda.layout import CELL, PLANE
from ctxreuse.cuda.planes import Pages, angles_on, paged
from ctxreuse.cuda.profile import DeviceProfile
from ctxreuse.cuda.rans import CODE

__all__ = ["PagedPlane", "encode_planes"]

_WARPS, _WARP, _THREADS = 4, 32, 256
_HEAD = 8


class PagedPlane(NamedTuple):
    """``tokens`` rows of a plane in paged memory from slot ``row`` of its table on, the first at position ``start``."""

    layer: int
    role: str
    pages: Pages
    tokens: int
    row: int = 0
    start: int = 0


def encode_planes(profile: DeviceProfile, planes: Sequence[PagedPlane]) -> list[npt.NDArray[np.uint8]]:
    """The coded stream of each plane at the profile's level, uint8 on the host. Waits for the device.

    Pages must be of the type of the model space. The first tokens of a context and those out of range are kept raw, in
    16 bits. ValueError for pages; 1 to 65,535 tokens a plane.
    """
    if not planes:
        return []
    launcher, xp = profile.launcher, profile.launcher.xp
    kept: list[Any] = []
    angles: dict[tuple[int, int, int], tuple[Any, Any]] = {}
    records = np.array([_record(profile, one, angles, kept) for one in planes], PLANE)
    cells = np.concatenate([_cells(profile, i, one) for i, one in enumerate(planes)])
    of = profile.book_groups[cells["group"]]
    rooms = 128 + 32 * of["components"].astype(np.int64)
    amounts = 64 * of["components"].astype(np.int64)
    cells["data"], cells["more"] = np.cumsum(amounts) - amounts, np.cumsum(rooms) - rooms
    numbers, words = xp.empty(max(1, int(amounts.sum())), np.int16), xp.empty(int(rooms.sum()), np.uint16)
    seeds, status = xp.empty(64 * len(cells), np.uint16), xp.zeros(len(cells), np.uint32)
    listed, given = to_device(launcher, [cells], kept), to_device(launcher, [records], kept)
    count = np.uint32(len(cells))
    channels = -(-of["channels"].astype(np.int64) // 32) * 32
    shared = int((1024 + 272 * channels + (of["unit"] > 0) * (128 * channels + 2048)).max())
    if shared > launcher.shared_bytes:
        raise ValueError(
            f"a group of {int(of['channels'].max())} channels does not fit into the device's shared memory"
        )
    launcher.launch(
        "ctx_klt_quantise",
        len(cells),
        _THREADS,
        shared,
        (listed, given, profile.groups, profile.book, numbers, seeds, status),
    )
    blocks = -(-len(cells) // _WARPS)
    known = np.uint32(profile.known)
    launcher.launch(
        "ctx_klt_code",
        blocks,
        _WARPS * _WARP,
        profile.known * CODE.itemsize,
        (listed, count, profile.groups, profile.book, profile.codes, known, numbers, seeds, words),
    )
    coded = to_host(launcher, listed).view(CELL)
    if on_host(status).any():
        raise ValueError("the page table has no page for a token")
    places, heads, size = _laid_out(profile, coded, planes)
    out, there = xp.empty(size, np.uint8), to_device(launcher, [places], kept)
    launcher.launch(
        "ctx_klt_pack",
        blocks,
        _WARPS * _WARP,
        profile.known * CODE.itemsize,
        (listed, count, given, profile.groups, profile.book, profile.codes, known, numbers, words, there, out),
    )
    data = to_host(launcher, out)
    streams = []
    for at, end, head in heads:
        data[at : at + len(head)] = np.frombuffer(head, np.uint8)
        streams.append(data[at:end])
    return streams


def _record(
    profile: DeviceProfile, one: PagedPlane, angles: dict[tuple[int, int, int], tuple[Any, Any]], kept: list[Any]
) -> np.void:
    where = f"layer {one.layer} {one.role}"
    if not 0 < one.tokens < 1 << 16:
        raise ValueError(f"a coded plane has 1 to 65,535 tokens, not {one.tokens} ({where})")
    plane = profile.profile.planes[profile.number(one.layer, one.role)]
    out = paged(profile, plane, one.pages, one.row, one.tokens, kept, where)
    if out["type"] != profile.type:
        raise ValueError(f"pages: {one.pages.dtype} is not the type of the model space ({where})")
    out["raw_type"] = profile.raw_type
    found = angles_on(profile, plane, one.start, one.tokens, angles, undo=True)
    out["interleaved"], out["angles"], out["cosine"], out["sine"] = found
    return out


def _cells(profile: DeviceProfile, number: int, one: PagedPlane) -> npt.NDArray[np.void]:
    plane = profile.number(one.layer, one.role)
    groups = len(profile.profile.planes[plane].groups)
    cells = np.zeros(-(-one.tokens // 64) * groups, CELL)
    index = np.arange(len(cells))
    cells["plane"], cells["group"] = number, profile.profile.alone.first_group[plane] + index % groups
    cells["first"] = index // groups * 64
    cells["tokens"] = np.minimum(64, one.tokens - cells["first"])
    sinks = np.clip(SINKS - one.start - cells["first"].astype(np.int64), 0, cells["tokens"])
    cells["raw"] = (np.uint64(1) << sinks.astype(np.uint64)) - np.uint64(1)
    return cells


def _laid_out(
    profile: DeviceProfile, cells: npt.NDArray[np.void], planes: Sequence[PagedPlane]
) -> tuple[npt.NDArray[np.uint64], list[tuple[int, int, bytes]], int]:
    """Where each cell's body goes; each stream's start, end and head; bytes of all."""
    of = profile.book_groups[cells["group"]]
    item = 4 if profile.raw_type == 0 else 2
    bodies = (
        cells["bytes"].astype(np.int64)
        + -(-cells["tokens"].astype(np.int64) // 8) * of["shifts"]
        + 2 * cells["escapes"].astype(np.int64)
        + np.bitwise_count(cells["raw"]).astype(np.int64) * of["channels"] * item
    )
    counts = np.bincount(cells["plane"], minlength=len(planes))
    lead = np.repeat(np.cumsum(_HEAD + ENTRY.itemsize * counts), counts)
    ends = lead + np.cumsum(bodies)
    last = np.cumsum(counts) - 1
    heads, start = [], 0
    for number, (one, count) in enumerate(zip(planes, counts.tolist(), strict=True)):
        mine = cells[last[number] + 1 - count : last[number] + 1]
        entries = np.zeros(count, ENTRY)
        entries["raw"], entries["bytes"], entries["escapes"] = mine["raw"], mine["bytes"], mine["escapes"]
        head = bytes([1, profile.level, 0, 0]) + one.tokens.to_bytes(2, "little") + count.to_bytes(2, "little")
        end = int(ends[last[number]])
        heads.append((start, end, head + entries.tobytes()))
        start = end
    return (ends - bodies).astype(np.uint64), heads, start
