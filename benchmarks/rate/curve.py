"""Curves of rate against divergence: what a codec takes at a divergence that none of its settings has exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Point", "Rate", "at_divergence", "best_meeting"]


class Point(NamedTuple):
    """One codec at one setting, means over all texts: bits a value, KL in nats, share of equal top-1, change of NLL."""

    family: str
    setting: str
    bits: float
    kl: float
    top1: float
    dnll: float


class Rate(NamedTuple):
    """Bits a value at a divergence; ``measured`` is False if the curve was drawn on beyond its last point."""

    bits: float
    measured: bool


def at_divergence(points: Sequence[Point], kl: float) -> Rate:
    """Bits that a family's settings take at divergence ``kl``: linear in log KL between its two nearest settings.

    A divergence above all settings takes the bits of the cheapest: whoever allows more damage pays no more. One below
    all settings takes the line of the two finest drawn on (``measured`` False); a family of one setting that does not
    reach it takes infinitely many.
    """
    curve = sorted(points, key=lambda point: point.kl)
    if kl >= curve[-1].kl:
        return Rate(min(point.bits for point in curve), True)
    if kl < curve[0].kl:
        if len(curve) == 1:
            return Rate(math.inf, False)
        return Rate(_line(curve[0], curve[1], kl), False)
    for fine, coarse in itertools.pairwise(curve):
        if fine.kl <= kl < coarse.kl:
            return Rate(_line(fine, coarse, kl), True)
    raise AssertionError("a divergence between the ends lies between two points")


def best_meeting(points: Sequence[Point], kl: float) -> Point | None:
    """The cheapest setting whose divergence is at most ``kl``, if any is."""
    return min((point for point in points if point.kl <= kl), key=lambda point: point.bits, default=None)


def _line(a: Point, b: Point, kl: float) -> float:
    low, high = (math.log(max(point.kl, 1e-12)) for point in (a, b))
    if high - low < 1e-9:
        return min(a.bits, b.bits)
    return a.bits + (b.bits - a.bits) * (math.log(max(kl, 1e-12)) - low) / (high - low)
