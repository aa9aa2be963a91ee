"""Whole blocks coded on a device: what a store keeps, and what peers are sent, where a process has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from ctxreuse import kernels
from ctxreuse.block.format import BlockView
from ctxreuse.codec.profile import CodecProfile
from ctxreuse.cuda.encoding import PagedPlane, encode_planes
from ctxreuse.cuda.launch import Launcher
from ctxreuse.cuda.planes import Pages
from ctxreuse.cuda.profile import DeviceProfiles
from ctxreuse.dtypes import VALUES

__all__ = ["DeviceBlocks"]

#: Bytes of a block's raw planes from which it pays: a block's launches take about 2 ms, whatever its size.
_LEAST: Final = 2 << 20


class DeviceBlocks:
    """Encodes blocks on a device, to the bytes that the CPU gives. Any thread may call."""

    def __init__(self, launcher: Launcher, *, least: int = _LEAST) -> None:
        """``least``: bytes of raw planes of the smallest block that goes there."""
        self._launcher, self._least = launcher, least
        self._profiles = DeviceProfiles(launcher)

    def encode(
        self, view: BlockView, profile: CodecProfile, level: str, dtype: str
    ) -> dict[tuple[int, str], memoryview] | None:
        """The coded planes of a raw block at a level; None if they are better encoded on the CPU.

        Raises FormatError for a corrupt plane.
        """
        numbers = [i for i, plane in enumerate(view.layout.planes) if (plane.layer, plane.role) in profile.alone.number]
        if view.header.kind != "block" or view.layout.nbytes < self._least or not numbers:
            return None
        planes = [view.layout.planes[i] for i in numbers]
        if any(plane.dtype != dtype or len(plane.shape) != 3 for plane in planes):
            return None
        there = self._profiles.get(profile, level, dtype)
        if there is None:
            return None
        spans = view.spans[numbers]
        data = np.empty(int(spans[:, 1].sum()), np.uint8)
        bad = kernels.gather_checked(data, [view.buffer], spans[None], view.checksums[None, numbers])
        if bad >= 0:
            view.plane(planes[bad].layer, planes[bad].role)  # raises, naming it
        xp = self._launcher.xp
        with self._stream():
            rows, table, at, sources = xp.asarray(data), xp.zeros(1, np.int32), 0, list[PagedPlane]()
            for plane in planes:
                heads, tokens, dim = plane.shape
                memory = rows[at : at + plane.nbytes].view(VALUES[dtype]).reshape(1, heads, tokens, dim)
                pages = Pages(memory, dtype, table)
                sources.append(PagedPlane(plane.layer, plane.role, pages, tokens, 0, view.header.end - tokens))
                at += plane.nbytes
            try:
                coded = encode_planes(there, sources)
            except ValueError:
                return None
        return {(p.layer, p.role): memoryview(data.data) for p, data in zip(planes, coded, strict=True)}

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of the call's own, so that no model waits for it."""
        xp: Any = self._launcher.xp
        if xp is np:
            yield
            return
        with xp.cuda.Stream(non_blocking=True):
            yield
