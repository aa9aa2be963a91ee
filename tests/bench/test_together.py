"""Bench together: agents that decode at once, with and without a long prompt that comes meanwhile."""

from __future__ import annotations

from benchmarks.together import _Unshared, cold, measure
from ctxreuse.engines.torch_hf import TorchEngine
from support.letters import Letters
from support.tiny_models import engine_of


def test_agents_answer_together_and_beside_a_long_prompt() -> None:
    engine: TorchEngine = engine_of("llama")
    engine.text = engine.text or Letters()  # type: ignore[assignment]
    for this in (engine, _Unshared(engine)):
        together = measure(this, 3, 40, 12)  # type: ignore[arg-type]
        assert len(together.gaps) == 3 * 11
        assert together.rate > 0
        beside = measure(this, 1, 40, 200, 300)  # type: ignore[arg-type]
        assert 0 < len(beside.gaps) <= 199


def test_cold_agents_share_their_system_prompt() -> None:
    engine: TorchEngine = engine_of("llama")
    engine.text = engine.text or Letters()  # type: ignore[assignment]
    assert all(cold(engine, 3, 64, 10, shared=shared) > 0 for shared in (True, False))
