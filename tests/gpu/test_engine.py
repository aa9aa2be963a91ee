"""The torch engine on a real device: the contracts of engines, levels, chunks, in-place attention and compression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ctxreuse.block.format import parse
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.devices import TorchDevice
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from ctxreuse.testing.engine import EngineContract, random_tokens, seal
from ctxreuse.testing.engine.chunks import EngineChunksContract
from ctxreuse.testing.engine.compressed import EngineCompressionContract
from ctxreuse.testing.engine.in_place import EngineInPlaceContract
from ctxreuse.testing.engine.levels import EngineLevelsContract
from support.early import early_engine
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


def test_tokens_leave_early_where_the_processor_lets_them() -> None:
    here, there = early_engine(), early_engine(device="cuda")
    ids = np.random.default_rng(1).integers(3, 250, 60).astype("<i4")
    contexts = [engine.new_context() for engine in (here, there)]
    for engine, context in zip((here, there), contexts):
        engine.prefill(context, ids[:20])
    for at in range(20, 60):
        plan = ExitPlan((0, 1), {at % 2: -1e9} if at % 3 else {})
        (ours,), (theirs,) = (
            engine.exit_step([(context, ids[at : at + 1], plan)]) for engine, context in zip((here, there), contexts)
        )
        assert (theirs.token, theirs.left) == (ours.token, ours.left)
        assert [row.right for row in theirs.rows] == [row.right for row in ours.rows]
    for ours, theirs in zip(*(engine.complete_rows(one) for engine, one in zip((here, there), contexts)), strict=True):
        assert (theirs.right, theirs.left) == (ours.right, ours.left)
        assert theirs.scores == pytest.approx(ours.scores, rel=1e-4)


def test_what_one_engine_stored_another_goes_on_from(tmp_path: Path) -> None:
    found = []
    ids = random_tokens(engine_on("cpu", "llama64"), 120)
    for _ in range(2):
        engine = engine_on("cuda", "llama64", torch.bfloat16)
        with BlockStore.open(tmp_path, capacity=64 << 20) as store:
            runtime = Runtime(engine, store, RuntimeOptions())
            done = runtime.prefill(ids)
            found.append((done.usage.tokens.cached, done.logits.copy()))
            runtime.release(done)
            store.flush()
    assert [cached for cached, _ in found] == [0, 112]
    assert np.abs(found[1][1] - found[0][1]).max() <= 0.02 * np.abs(found[0][1]).max()
