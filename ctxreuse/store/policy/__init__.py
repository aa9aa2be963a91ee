"""Eviction policies by name."""

from __future__ import annotations

from ctxreuse.errors import ConfigError
from ctxreuse.store.policy.base import Facts, K, Learner, Policy, Rebuild, prefill_line
from ctxreuse.store.policy.lru import LRU
from ctxreuse.store.policy.shadow import Served, Shadow

__all__ = ["LRU", "Facts", "Learner", "Policy", "Rebuild", "Served", "Shadow", "make_policy", "prefill_line"]

_POLICIES = {"lru": LRU}


def make_policy(policy: str | Policy[K]) -> Policy[K]:
    """A fresh policy of that name (``lru``), or the one given. Raises ConfigError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in _POLICIES:
        raise ConfigError(f"no eviction policy {policy!r}", fix=f"Choose one of: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[policy]()
