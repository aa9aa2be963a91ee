"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random, SystemRandom

from ctxreuse.errors import ConfigError
from ctxreuse.store.policy.arc import ARC
from ctxreuse.store.policy.base import Facts, K, Learner, Policy, Rebuild, fill, prefill_line
from ctxreuse.store.policy.duel import Duel, Standing
from ctxreuse.store.policy.gdsf import GDSF
from ctxreuse.store.policy.hazard import Hazard
from ctxreuse.store.policy.lfu import LFU
from ctxreuse.store.policy.lru import LRU
from ctxreuse.store.policy.native import NATIVE, NativeRoster, NativeShadow
from ctxreuse.store.policy.numbered import NumberedShadow
from ctxreuse.store.policy.pauses import Pauses
from ctxreuse.store.policy.roster import Contender
from ctxreuse.store.policy.s3fifo import S3FIFO
from ctxreuse.store.policy.shadow import Served, Shadow

__all__ = [
    "ARC",
    "CONTENDERS",
    "GDSF",
    "LFU",
    "LRU",
    "NAMES",
    "NATIVE",
    "S3FIFO",
    "Duel",
    "Facts",
    "Hazard",
    "Learner",
    "NativeRoster",
    "NativeShadow",
    "NumberedShadow",
    "Pauses",
    "Policy",
    "Rebuild",
    "Served",
    "Shadow",
    "Standing",
    "fill",
    "make_policy",
    "prefill_line",
    "single_policy",
]

_SINGLE: dict[str, Callable[[Rebuild], Policy[bytes]]] = {
    "lru": lambda _: LRU(),
    "lfu": lambda _: LFU(),
    "s3fifo": lambda _: S3FIFO(),
    "arc": lambda _: ARC(),
    "gdsf": lambda rebuild: GDSF(rebuild),
    "hazard": lambda _: Hazard(),
    "pauses": lambda _: Pauses(),
}

#: What can be named; ``duel`` also as ``duel:lru,arc`` with other contenders.
NAMES = (*_SINGLE, "duel")
#: Who is in the duel unless others are named.
CONTENDERS = ("lru", "lfu", "arc", "hazard")


def single_policy(name: str, rebuild: Rebuild | None = None) -> Policy[K]:
    """A fresh policy that is no duel. Raises ConfigError for an unknown name."""
    if name not in _SINGLE:
        raise ConfigError(f"no eviction policy {name!r}", fix=f"Choose one of: {', '.join(sorted(_SINGLE))}")
    return _SINGLE[name](rebuild if rebuild is not None else prefill_line())  # type: ignore[return-value]


def make_policy(
    policy: str | Policy[K], capacity: int, rebuild: Rebuild | None = None, rng: Random | None = None
) -> Policy[K]:
    """A fresh policy of that name for a cache of ``capacity`` bytes, or the one given.

    ``duel`` is one of the default contenders, ``duel:NAME,NAME`` one of others. ``rebuild``: what recomputing takes;
    ``rng``: the duel's coins (default: the system's). Raises ConfigError for an unknown name.
    """
    if not isinstance(policy, str):
        return policy
    kind, _, named = policy.partition(":")
    if kind != "duel" or (named and len(set(named.split(","))) != len(named.split(","))):
        if policy not in _SINGLE:
            fix = f"Choose one of: {', '.join(sorted(NAMES))}; or a duel of your own, such as duel:lru,arc"
            raise ConfigError(f"no eviction policy {policy!r}", fix=fix)
        return single_policy(policy, rebuild)
    names = named.split(",") if named else CONTENDERS
    coins = rng if rng is not None else SystemRandom()
    return Duel([_contender(name, capacity, rebuild) for name in names], capacity, coins, NativeRoster())


def _contender(name: str, capacity: int, rebuild: Rebuild | None) -> Contender[K]:
    if name in NATIVE and (rebuild is None or name != "gdsf"):
        return NativeShadow[K](name, capacity)
    return NumberedShadow[K](single_policy(name, rebuild), capacity)
