"""The plain policies by the names of the native ones."""

from __future__ import annotations

from collections.abc import Callable

from ctxreuse.store.policy import Policy
from oracle.policy.arc import ARC
from oracle.policy.gdsf import GDSF
from oracle.policy.hazard import Hazard
from oracle.policy.lfu import LFU
from oracle.policy.lru import LRU
from oracle.policy.pauses import Pauses
from oracle.policy.s3fifo import S3FIFO

__all__ = ["REFERENCE"]

REFERENCE: dict[str, Callable[[], Policy[int]]] = {
    "lru": LRU,
    "lfu": LFU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "gdsf": lambda: GDSF(alpha=0.7),
    "hazard": Hazard,
    "pauses": Pauses,
}
