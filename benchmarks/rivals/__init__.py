"""Published ways to code K and V, made anew from their formulas, and everything that they store counted.

All of them get what helps them: keys before rotary embedding, the whole context as one chunk (ours codes 64 tokens at a
time), side data in float16, entropy coders without overhead where an entropy is counted, and the first tokens raw,
which the caller adds. None but KVTC is calibrated: what they learn of the numbers, they learn from the very chunk.
"""

from __future__ import annotations

from benchmarks.rivals.base import Coded, Rival, Values
from benchmarks.rivals.cachegen import CacheGen
from benchmarks.rivals.int8 import Int8Zstd
from benchmarks.rivals.kivi import Kivi
from benchmarks.rivals.kvquant import KvQuant
from benchmarks.rivals.kvtc import Kvtc, KvtcBasis
from benchmarks.rivals.plain import Plain
from benchmarks.rivals.rotation import RotatedLloydMax

__all__ = [
    "KVTC",
    "PLAIN",
    "RIVALS",
    "CacheGen",
    "Coded",
    "Int8Zstd",
    "Kivi",
    "KvQuant",
    "Kvtc",
    "KvtcBasis",
    "Plain",
    "Rival",
    "RotatedLloydMax",
    "Values",
]

#: Families from fine to coarse; the settings of one family make its curve.
RIVALS: tuple[tuple[Rival, ...], ...] = (
    (Int8Zstd(),),
    (Kivi(4), Kivi(2)),
    (RotatedLloydMax(4), RotatedLloydMax(3), RotatedLloydMax(2)),
    (RotatedLloydMax(4, centred=True), RotatedLloydMax(3, centred=True), RotatedLloydMax(2, centred=True)),
    (CacheGen(3), CacheGen(2), CacheGen(1)),
    (KvQuant(4), KvQuant(3), KvQuant(2)),
)

#: What ours began with: no transform, nothing calibrated.
PLAIN: tuple[Rival, ...] = tuple(Plain(step) for step in (0.25, 0.5, 1.0))

#: Of whole contexts, all layers at once.
KVTC: tuple[Kvtc, ...] = (Kvtc(4), Kvtc(2.5), Kvtc(2), Kvtc(1.5), Kvtc(1))
