"""Every policy of ours keeps the contract."""

from __future__ import annotations

from random import Random

from ctxreuse.store.policy import ARC, GDSF, LFU, LRU, S3FIFO, Duel, Policy, Shadow
from ctxreuse.testing.policy import PolicyContract


class TestLRU(PolicyContract):
    def make(self) -> Policy[int]:
        return LRU()


class TestLFU(PolicyContract):
    def make(self) -> Policy[int]:
        return LFU()


class TestS3FIFO(PolicyContract):
    def make(self) -> Policy[int]:
        return S3FIFO()


class TestARC(PolicyContract):
    def make(self) -> Policy[int]:
        return ARC()


class TestGDSF(PolicyContract):
    def make(self) -> Policy[int]:
        return GDSF(alpha=0.5)


class TestTunedGDSF(PolicyContract):
    def make(self) -> Policy[int]:
        return GDSF()


class TestDuel(PolicyContract):
    def make(self) -> Policy[int]:
        return Duel([Shadow(make(), 30) for make in (LRU, LFU, ARC)], 30, Random(0))
