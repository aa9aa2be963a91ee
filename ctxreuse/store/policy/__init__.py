"""Eviction policies by name."""

from __future__ import annotations

import logging
from random import Random, SystemRandom

from ctxreuse.errors import ConfigError
from ctxreuse.store.policy.adaptive import AdaptivePolicy, Expert
from ctxreuse.store.policy.base import Facts, K, Policy, RecomputeCost, prefill_line
from ctxreuse.store.policy.native import NATIVE, NativePolicy, NativeResidentSet, NativeShadow
from ctxreuse.store.policy.shadow import NumberedShadow, Served, Shadow

__all__ = [
    "DEFAULT_EXPERTS",
    "NAMES",
    "NATIVE",
    "AdaptivePolicy",
    "Expert",
    "Facts",
    "NativePolicy",
    "NativeResidentSet",
    "NativeShadow",
    "NumberedShadow",
    "Policy",
    "RecomputeCost",
    "Served",
    "Shadow",
    "make_policy",
    "prefill_line",
]

log = logging.getLogger(__name__)

#: Policies by name; ``adaptive`` also as ``adaptive:lru,arc`` with other experts.
NAMES = (*NATIVE, "adaptive")
#: The adaptive policy's experts unless others are named.
DEFAULT_EXPERTS = ("lru", "lfu", "arc", "hazard", "pauses")


def make_policy(
    name: str | Policy[K],
    capacity: int,
    *,
    per_token: float = 1e-3,
    per_pair: float = 1e-7,
    rng: Random | None = None,
) -> Policy[K]:
    """Create the policy of that name for a cache of ``capacity`` bytes; a policy is returned as it is.

    Args:
        name: one of `NAMES`, or ``adaptive:NAME,NAME``. ``duel``, its name in version 0.1.0, is still accepted.
        capacity: bytes of the cache.
        per_token: seconds of prefill a token; see `prefill_line`.
        per_pair: seconds a pair of tokens.
        rng: randomness of the adaptive policy; default: the system's.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(name, str):
        return name
    kind, _, named = name.partition(":")
    if kind == "duel":
        log.warning("the eviction policy %r is now called %r", name, name.replace("duel", "adaptive"))
    experts = named.split(",") if named else DEFAULT_EXPERTS
    if kind not in ("adaptive", "duel") or len(set(experts)) < len(experts):
        return _single(name, per_token, per_pair)
    if not set(experts) <= set(NATIVE):
        raise _unknown(name)
    shadows: list[NativeShadow[K]] = []
    for expert in experts:
        beside = shadows[0] if shadows else None
        shadows.append(NativeShadow[K](expert, capacity, per_token=per_token, per_pair=per_pair, beside=beside))
    return AdaptivePolicy(shadows, capacity, rng if rng is not None else SystemRandom())


def _single(name: str, per_token: float, per_pair: float) -> Policy[K]:
    if name not in NATIVE:
        raise _unknown(name)
    return NativePolicy(name, per_token=per_token, per_pair=per_pair)


def _unknown(name: str) -> ConfigError:
    fix = f"Choose one of: {', '.join(sorted(NAMES))}; or with other experts, such as adaptive:lru,arc"
    return ConfigError(f"no eviction policy {name!r}", fix=fix)
