"""One plane coded in a call of its own: what whole blocks' calls are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxreuse.kernels import KltPlane, KltPlanes

__all__ = ["decode_plane", "encode_plane"]


def encode_plane(
    plane: KltPlane, src: Any, dtype: str, offset: int, strides: Sequence[int], counts: Sequence[int], **how: Any
) -> tuple[bytes, Any]:
    """The streams of consecutive blocks' rows of a tensor [heads, sum(counts), dim], and offsets [blocks + 1]."""
    angles = how.pop("angles", None)
    data, spans = _alone(plane, offset, strides, angles).encode(src, dtype, counts, angles=_turns(angles), **how)
    return data, np.append(0, spans.sum(1))


def decode_plane(
    plane: KltPlane,
    dst: Any,
    dst_dtype: str,
    dst_offset: int,
    dst_strides: Sequence[int],
    streams: Sequence[Any],
    token_counts: Sequence[int],
    raw_dtype: str,
    *,
    angles: Any = None,
    checksums: Sequence[int] | None = None,
    refinements: Sequence[Any] | None = None,
    refinement_checksums: Sequence[int] | None = None,
    times: Any = None,
) -> None:
    """Decode consecutive blocks' streams, each all that its buffer holds; with ``refinements`` they are of the base."""
    own = _sources(streams, checksums)
    more = [(None, None, None)] * len(streams) if refinements is None else _sources(refinements, refinement_checksums)
    sources: Any = [(count, *a, *b) for count, a, b in zip(token_counts, own, more, strict=True)]
    planes = _alone(plane, dst_offset, dst_strides, angles)
    planes.decode(dst, dst_dtype, sources, raw_dtype, angles=_turns(angles), times=times)


def _alone(plane: KltPlane, offset: int, strides: Sequence[int], angles: Any) -> KltPlanes:
    layout = [offset, *(*strides, 1)[:3], -1 if angles is None else 0]
    return KltPlanes.of([plane], np.array([layout], np.int64))


def _turns(angles: Any) -> Any:
    return () if angles is None else (angles,)


def _sources(streams: Sequence[Any], sums: Sequence[int] | None) -> list[tuple[Any, Any, Any]]:
    compared = [None] * len(streams) if sums is None else [n.to_bytes(8, "little") for n in sums]
    return [
        (data, np.array([0, memoryview(data).nbytes], np.int64), own)
        for data, own in zip(streams, compared, strict=True)
    ]
