"""Slots of contexts: who shares a pass, what memory costs, and buffers that are not the machine's own."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from ctxreuse.engines import open_engine
from ctxreuse.engines.onnx_rt.arena import DeviceArena, KvPool
from ctxreuse.engines.onnx_rt.model import OnnxModel
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.sealed import random_tokens


@pytest.fixture(scope="class")
def staged_engine(onnx_folder: Path):
    """An engine whose K and V are copied to a device and back; the device is the CPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr(KvPool, "_new", lambda self, capacity: DeviceArena(self._model, capacity))
    engine = open_engine(onnx_folder, block_tokens=16, chunk=64, threads=1)
    yield engine
    patch.undo()


class TestBuffersOnADevice(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, staged_engine):
        return staged_engine


@pytest.fixture
def engine(onnx_folder: Path):
    return open_engine(onnx_folder, block_tokens=16, chunk=64, threads=1)


def test_neighbours_decode_in_one_pass_with_the_bits_of_one_alone(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    run = OnnxModel.run

    def counted(self, binding, ids, starts, *wanted):
        passes.append(len(ids))
        return run(self, binding, ids, starts, *wanted)

    prompts = [random_tokens(engine, 20 + 31 * n, seed=n) for n in range(5)]
    contexts, twins = ([engine.new_context() for _ in prompts] for _ in range(2))
    for context, twin, ids in zip(contexts, twins, prompts):
        engine.prefill(context, ids)
        engine.prefill(twin, ids)
    monkeypatch.setattr(OnnxModel, "run", counted)
    for token in random_tokens(engine, 4, seed=9):
        batch = [(context, np.array([token], np.int32)) for context in reversed(contexts)]
        found = engine.step(batch)
        assert passes == [5]
        for logits, twin in zip(found, reversed(twins)):
            assert np.array_equal(logits, engine.prefill(twin, np.array([token], np.int32)))
        passes.clear()
    one = np.array([1], np.int32)
    engine.step([(contexts[n], one) for n in (0, 1, 3, 4)])  # the third is left alone: it may be anybody's
    assert passes == [2, 2]
    assert contexts[2].n == twins[2].n
    for context, ids in zip(contexts, prompts):
        assert np.array_equal(context.tokens[: len(ids)], ids)


def test_a_context_that_outgrows_its_slot_goes_on_elsewhere(engine) -> None:
    ids = random_tokens(engine, 256)
    context, beside, twin = (engine.new_context() for _ in range(3))
    for one in (context, beside):
        engine.prefill(one, ids)
    engine.prefill(twin, np.concatenate([ids, ids[:1]]))
    before = context.nbytes
    found = engine.step([(context, ids[:1]), (beside, ids[:1])])
    assert (context.n, context.nbytes) == (257, 2 * before)
    for one in (context, beside):
        more = engine.prefill(one, ids[:3])
    assert np.array_equal(more, engine.prefill(twin, ids[:3]))
    assert np.array_equal(found[0], found[1])


def test_slots_are_used_again_and_beyond_a_limit_their_memory_goes_back(
    engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [engine.new_context() for _ in range(3)]
    arena = contexts[0].slot.arena
    ids = random_tokens(engine, 200)
    for context in contexts:
        engine.prefill(context, ids)
    index = contexts[1].slot.index
    monkeypatch.setattr(engine._pool, "_keep", 0)
    plane = arena.rows(index, (0, "k"))
    assert plane[:, 199].any()
    del contexts[1], context
    gc.collect()
    assert not plane.any()  # the system's zeros
    again = engine.new_context()
    assert (again.slot.arena is arena, again.slot.index) == (True, index)
    assert np.array_equal(engine.prefill(again, ids[:50]), engine.prefill(engine.new_context(), ids[:50]))
