"""Contexts that wait, kept quantised: the contract, and what it costs on a real model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctxreuse.calibrate import default_texts
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.testing.engine.compressed import EngineCompressionContract


@pytest.mark.parametrize("engine", ["llama", "qwen2", "gemma3"], indirect=True, scope="class")
class TestTiny(EngineCompressionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request: pytest.FixtureRequest, engine_of: Any) -> TorchEngine:
        found: TorchEngine = engine_of(request.param, full_kv_for_windows=True)
        return found


def test_a_model_with_states_keeps_its_contexts_as_they_are(engine_of: Any) -> None:
    engine = engine_of("gemma3")
    context = engine.new_context()
    engine.prefill(context, np.arange(1, 40, dtype="<i4"))
    with pytest.raises(EngineError, match="keeps states"):
        engine.chunks.compress(context, "int8", "approx~kl-0.05")
    assert context.levels[0].level == "exact"


def test_layers_of_a_compressed_context_are_computed_by_the_kernels(engine_of: Any) -> None:
    """In float32: a row of theirs has the same bits alone and beside other contexts; torch's has not."""
    engine = engine_of("llama")
    ids = np.arange(1, 60, dtype="<i4")
    contexts = [engine.new_context() for _ in range(3)]
    for context in contexts:
        engine.prefill(context, ids)
        engine.chunks.compress(context, "int8", "approx~kl-0.05")
    step = np.array([7], np.int32)
    alone = engine.prefill(contexts[0], step)
    for found in engine.step([(context, step) for context in contexts[1:]]):
        assert found.tobytes() == alone.tobytes()


@pytest.mark.model
def test_a_real_model_hardly_notices(smollm2: Any) -> None:
    ids = smollm2.text.encode(default_texts()["held-out"]["prose"][0][:6_000])[:700].astype("<i4")
    lead, following = ids[:640], ids[640:]

    def logs(format: str) -> Any:
        context = smollm2.new_context()
        smollm2.prefill(context, lead)
        exact = context.nbytes
        if format:
            smollm2.chunks.compress(context, format, "approx~kl-0.05")
            assert context.nbytes < {"int8": 0.3, "int4": 0.15}[format] * exact
        rows = np.stack([smollm2.prefill(context, following[i : i + 1]) for i in range(24)]).astype(np.float64)
        rows -= rows.max(1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(1, keepdims=True))

    exact = logs("")
    kl = {name: float((np.exp(exact) * (exact - logs(name))).sum(1).mean()) for name in ("int8", "int4")}
    assert 0 < kl["int8"] < 0.005
    assert kl["int8"] < kl["int4"] < 0.2
