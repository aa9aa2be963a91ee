"""A group's forward map in whole numbers of 16 bits, which encoders multiply twice as fast as floats.

The same numbers on every machine: scales are powers of two, found by exponents, and sums are taken in order.
"""

from __future__ import annotations

from math import frexp, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.codec.profile import ChannelGroup, JointGroup

__all__ = ["WholeForward", "joint_group"]

#: A token's RMS is known to a 64th of an octave, and lengths are rounded; this is more.
_MARGIN = 1.05


class WholeForward(NamedTuple):
    """``rows`` int16 [n, C] are the forward map times 2^``exponents`` [n]; vectors are rounded after 2^``unit``.

    No sum of products leaves 32 bits: a row's length is at most 2^16, that of a vector at most 2^15.
    """

    rows: npt.NDArray[np.int16]
    exponents: npt.NDArray[np.int32]
    unit: int

    @classmethod
    def of(cls, group: ChannelGroup | JointGroup, components: int) -> WholeForward:
        """Round the first ``components`` rows of a group's forward map; a joint group has them rounded."""
        unit = 15 - frexp(_MARGIN * sqrt(len(group.mean)) * 2.0**group.log_rms)[1]
        if isinstance(group, JointGroup):
            return cls(group.rows[:components], group.exponents[:components], unit)
        forward = group.forward[:components].astype(np.float64)
        squares = np.cumsum(forward * forward, axis=1)[:, -1:].max(1, initial=0.0) * _MARGIN**2
        longest = (np.frexp(squares)[1] + 1) >> 1
        largest = np.frexp(np.abs(forward).max(1, initial=0.0) * _MARGIN)[1]
        exponents = np.minimum(16 - longest, 15 - largest).astype(np.int32)
        return cls(np.rint(np.ldexp(forward, exponents[:, None])).astype(np.int16), exponents, unit)

    def at(self, step: float, *, nested: bool) -> kernels.WholeNumbers:
        """Return the map to integers of a step; ``nested``: of a third of it."""
        fine = np.float32(step) / np.float32(3) if nested else np.float32(step)
        quantum = np.ldexp(np.float32(1) / fine, -(self.exponents + self.unit))
        return kernels.WholeNumbers(self.rows, quantum.astype(np.float32), 2.0**self.unit)


def joint_group(group: ChannelGroup, narrow: int) -> JointGroup:
    """Return a group of several planes as a profile keeps it; every level rounds its basis from ``narrow`` on."""
    whole, basis = WholeForward.of(group, len(group.forward)), group.rounded(narrow).basis
    tail = (basis[narrow:] // 64).astype(np.int8)
    return JointGroup(
        group.first, group.heads, group.log_rms, group.mean, group.gain, whole.rows, whole.exponents,
        np.ascontiguousarray(basis[:narrow]), tail,
    )  # fmt: skip
