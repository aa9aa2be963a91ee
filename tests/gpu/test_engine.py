"""The torch engine on a real device: the contracts of engines, levels, chunks, in-place attention and compression."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ctxreuse.block.format import parse
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.devices import TorchDevice
from ctxreuse.errors import EngineError
from ctxreuse.testing.engine import EngineContract, random_tokens, seal
from ctxreuse.testing.engine.chunks import EngineChunksContract
from ctxreuse.testing.engine.compressed import EngineCompressionContract
from ctxreuse.testing.engine.in_place import EngineInPlaceContract
from ctxreuse.testing.engine.levels import EngineLevelsContract
from support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


def engine_on(device: str, name: str, dtype: torch.dtype = torch.float32, **options: object) -> TorchEngine:
    return TorchEngine(tiny_model(name).to(device, dtype), **{"block_tokens": 16, "chunk": 64, **options})


@pytest.mark.parametrize("engine", ["llama", "gemma3", "mistral", "falconh1"], indirect=True, scope="class")
class TestEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request: pytest.FixtureRequest) -> TorchEngine:
        return engine_on("cuda", request.param)


@pytest.mark.parametrize("engine", ["llama", "gemma3"], indirect=True, scope="class")
class TestLevels(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request: pytest.FixtureRequest) -> TorchEngine:
        return engine_on("cuda", request.param)


class TestLevelsInThread(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> TorchEngine:
        return engine_on("cuda", "llama", background=True)


@pytest.mark.parametrize("engine", ["llama", "gemma3"], indirect=True, scope="class")
class TestChunks(EngineChunksContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request: pytest.FixtureRequest) -> TorchEngine:
        return engine_on("cuda", request.param, full_kv_for_windows=True)


class TestInPlace(EngineInPlaceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> TorchEngine:
        return engine_on("cuda", "llama64")


class TestCompressed(EngineCompressionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> TorchEngine:
        return engine_on("cuda", "llama64")


def test_blocks_cross_between_the_device_and_the_processor() -> None:
    there, here = engine_on("cuda", "llama"), engine_on("cpu", "llama")
    assert there.space.digest == here.space.digest
    ids = random_tokens(here, 70)
    for giver, taker in ((there, here), (here, there)):
        views = [parse(data) for data in seal(giver, ids).blocks]
        context = taker.new_context()
        taker.load(context, views).wait()
        got, want = taker.prefill(context, ids[64:]), taker.prefill(taker.new_context(), ids)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_resumed_context_has_the_bits_that_it_was_saved_with(dtype: torch.dtype) -> None:
    engine = engine_on("cuda", "llama64", dtype)
    ids = random_tokens(engine, 200)
    context = engine.new_context()
    engine.prefill(context, ids[:192])
    keys = [bytes([i]) * 32 for i in range(12)]
    blocks = [bytes(block) for block in engine.export(context, keys, bytes(32), 0)]
    again = engine.new_context()
    engine.load(again, [parse(block) for block in blocks]).wait()
    assert [bytes(block) for block in engine.export(again, keys, bytes(32), 0)] == blocks
    assert np.array_equal(engine.prefill(context, ids[192:]), engine.prefill(again, ids[192:]))


def test_memory_that_runs_out_is_an_error_and_the_engine_goes_on() -> None:
    engine = engine_on("cuda", "llama64")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    ids = random_tokens(engine, 40)
    try:
        with pytest.raises(EngineError, match="no memory left on cuda"):
            [engine.new_context(reserve=2048) for _ in range(1000)]
    finally:
        del held
        torch.cuda.empty_cache()
    assert np.isfinite(engine.prefill(engine.new_context(), ids)).all()


def test_the_kernels_are_there() -> None:
    assert TorchDevice.of(torch.device("cuda:0")).launcher is not None
