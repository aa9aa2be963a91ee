"""What the bench of the proxy measures with."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import proxy
from ctxreuse.errors import EngineError

pytestmark = pytest.mark.timing


def test_the_load_counts_whole_answers_of_its_backend() -> None:
    with proxy.backend() as url:
        fast = asyncio.run(proxy._load(url, 3, 7, 0.0))
        paced = asyncio.run(proxy._load(url, 1, 1, 0.001))
    assert len(fast.first) == len(fast.whole) == 7
    assert all(0 < first <= whole <= fast.seconds for first, whole in zip(fast.first, fast.whole))
    assert fast.at(0.0) <= fast.at(0.5) <= fast.at(1.0) == max(fast.whole)
    assert paced.whole[0] >= proxy.EVENTS * 0.001


def test_real_backends_are_named_by_a_variable() -> None:
    assert proxy._named("") == {}
    named = proxy._named("vllm=http://127.0.0.1:8000/v1,llama=http://127.0.0.1:8080")
    assert named == {"vllm": "http://127.0.0.1:8000", "llama": "http://127.0.0.1:8080"}
    with pytest.raises(EngineError, match="CTXREUSE_PROXY_BACKENDS"):
        proxy._named("http://127.0.0.1:8000")
