"""Every policy of ours keeps the contract."""

from __future__ import annotations

from random import Random

import pytest

from ctxreuse.store.policy import DEFAULT_EXPERTS, AdaptivePolicy, NativePolicy, NativeShadow, Policy, make_policy
from ctxreuse.testing.policy import PolicyContract


class TestLRU(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("lru")


class TestLFU(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("lfu")


class TestS3FIFO(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("s3fifo")


class TestARC(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("arc")


class TestGDSF(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("gdsf", alpha=0.5)


class TestTunedGDSF(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("gdsf")


class TestHazard(PolicyContract):
    def make(self) -> Policy[int]:
        return NativePolicy("hazard")


class TestAdaptive(PolicyContract):
    def make(self) -> Policy[int]:
        return AdaptivePolicy([NativeShadow(name, 30) for name in ("lru", "lfu", "arc")], 30, Random(0))


def test_the_name_of_version_0_1_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for name, experts in (("duel", DEFAULT_EXPERTS), ("duel:lru,pauses", ("lru", "pauses"))):
        policy: Policy[int] = make_policy(name, 100)
        assert isinstance(policy, AdaptivePolicy)
        assert tuple(expert.name for expert in policy.experts) == experts
        assert name.replace("duel", "adaptive") in caplog.text
