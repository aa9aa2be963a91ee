"""The stored form of what the pauses policy learnt, which is that of `ctxreuse.pauses.Estimator`."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from ctxreuse.pauses.estimator import Counts, pack_counts, unpack_counts
from ctxreuse.pauses.hazard import BUCKETS
from ctxreuse.pauses.kinds import LABELS, REASONS, RUNNING, PauseKind

__all__ = ["pack_pauses", "unpack_pauses"]

#: Numbers of a row of the native core: which type, how often it returned, returns and seconds away by bucket.
_ROW: Final = 2 + 2 * BUCKETS


def _names() -> dict[tuple[str, ...], int]:
    """Types by name, as the native core numbers them: all pauses, stops, labels."""
    found: dict[tuple[str, ...], int] = {(): 0}
    found.update({(REASONS[stop],): 1 + stop for stop in range(RUNNING + 1)})
    for label in range(LABELS):
        kind = PauseKind.of(label)
        if kind.label == label and kind.reason != RUNNING:
            found[kind.stop, kind.tool] = 2 + RUNNING + label
    return found


_NUMBERS: Final = _names()
_NAMES: Final = {number: name for name, number in _NUMBERS.items()}


def pack_pauses(raw: bytes) -> bytes:
    """Encode rows of the native core."""
    rows = np.frombuffer(raw).reshape(-1, _ROW)
    return pack_counts(
        Counts(_NAMES[int(row[0])], row[1], row[2 : 2 + BUCKETS], row[2 + BUCKETS :])
        for row in rows
        if int(row[0]) in _NAMES
    )


def unpack_pauses(raw: bytes) -> bytes | None:
    """Decode `pack_pauses` to rows of the native core, without types that it does not count; None for anything else."""
    rows = unpack_counts(raw)
    if rows is None:
        return None
    known = array("d")
    for row in rows:
        if row.name in _NUMBERS:
            known.extend((_NUMBERS[row.name], row.changes, *row.returns, *row.seconds))
    return known.tobytes()
