"""How the suite runs: depth of its property tests, threads, and what several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Two test processes on two cores, and tiny matrices are slower with more threads. Daemons and examples inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from support import shared
from support.examples import register_profiles

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf import TorchEngine

pytest_plugins = ["support.distribution"]

register_profiles(os.environ.get("CTXREUSE_TEST_PROFILE", "ci"))


@pytest.fixture(scope="session")
def smollm2() -> TorchEngine:
    """SmolLM2-135M-Instruct in float32."""
    from ctxreuse.engines.torch_hf import TorchEngine

    return TorchEngine.open("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def smollm2_card() -> bytes:
    """A profile of SmolLM2 with most usual levels, from a part of the usual text."""
    return shared.smollm2_card()


@pytest.fixture
def coded_smollm2(smollm2: TorchEngine, smollm2_card: bytes) -> Iterator[TorchEngine]:
    """SmolLM2 with the codec of `smollm2_card`."""
    from ctxreuse.codec import Codec, profile_digest, read_profile

    before = smollm2.codec
    smollm2.codec = Codec(smollm2.space, (profile_digest(smollm2_card).hex(), read_profile(smollm2_card)))
    yield smollm2
    smollm2.codec = before
