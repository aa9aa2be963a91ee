"""A device whose memory runs out, or that is gone, while a stored prefix is loaded: nothing stored is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.devices import TorchDevice
from ctxreuse.errors import EngineError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from ctxreuse.testing.engine import random_tokens
from support.tiny_models import engine_of

BLOCKS = 6
SAID = {
    torch.OutOfMemoryError: "CUDA out of memory. Tried to allocate 20.00 MiB.",
    torch.AcceleratorError: "CUDA error: unspecified launch failure\nCUDA kernel errors may be reported later",
}


class Failing(TorchDevice):
    """Memory of its own on this processor; of the next copies through pinned memory, number ``fails`` fails.

    ``stays``: all that follow fail, too.
    """

    def __init__(self, error: type[RuntimeError], *, stays: bool = False) -> None:
        super().__init__(torch.device("cpu"), apart=True)
        self.error, self.stays, self.fails = error, stays, 0

    def staging(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.fails -= 1
        if self.fails == 0:
            self.fails = int(self.stays)
            raise self.error(SAID[self.error])
        return super().staging(count, dtype)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("copy", range(1, 7))
@pytest.mark.parametrize("rest", [3, 300])
def test_the_request_fails_and_the_next_one_reuses_all(
    store: BlockStore, background: bool, copy: int, rest: int
) -> None:
    place = Failing(torch.OutOfMemoryError)
    engine: TorchEngine = engine_of("llama", place=place, background=background)
    ids = random_tokens(engine, BLOCKS * 16 + rest)
    whole = engine.prefill(engine.new_context(), ids)
    runtime = Runtime(engine, store, RuntimeOptions())
    runtime.release(runtime.prefill(ids[: BLOCKS * 16 + 1]))
    store.flush()
    kept = sorted(entry.key for entry in store.walk())

    place.fails = copy
    runtime = Runtime(engine, store, RuntimeOptions())
    with pytest.raises(EngineError, match="no memory left on cpu"):
        runtime.prefill(ids)
    store.flush()
    assert sorted(entry.key for entry in store.walk()) == kept

    done = runtime.prefill(ids)
    assert done.usage.tokens.cached >= BLOCKS * 16
    assert np.abs(done.logits - whole).max() <= 1e-4 * np.abs(whole).max()
    runtime.release(done)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("copy", [1, 4])
def test_a_device_that_is_gone_fails_each_request_and_another_engine_reuses_all(
    store: BlockStore, background: bool, copy: int
) -> None:
    place = Failing(torch.AcceleratorError, stays=True)
    engine: TorchEngine = engine_of("llama", place=place, background=background)
    ids = random_tokens(engine, BLOCKS * 16 + 3)
    runtime = Runtime(engine, store, RuntimeOptions())
    runtime.release(runtime.prefill(ids[: BLOCKS * 16 + 1]))
    store.flush()
    kept = sorted(entry.key for entry in store.walk())

    place.fails = copy
    runtime = Runtime(engine, store, RuntimeOptions())
    for _ in range(2):
        with pytest.raises(EngineError, match=r"cpu failed: CUDA error: unspecified launch failure\. Start again"):
            runtime.prefill(ids)
    store.flush()
    assert sorted(entry.key for entry in store.walk()) == kept

    started: TorchEngine = engine_of("llama")
    runtime = Runtime(started, store, RuntimeOptions())
    done = runtime.prefill(ids)
    assert done.usage.tokens.cached >= BLOCKS * 16
    whole = started.prefill(started.new_context(), ids)
    assert np.abs(done.logits - whole).max() <= 1e-4 * np.abs(whole).max()
    runtime.release(done)


class Measured(TorchDevice):
    """Memory of its own on this processor that says how much of it is free."""

    free = 1 << 40

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), apart=True)

    def free_memory(self) -> int:
        return self.free


def test_prompts_are_let_in_by_the_memory_of_the_device() -> None:
    """The host says that nothing is free, the device that all is; and contexts that wait go if the device is full."""
    place = Measured()
    engine: TorchEngine = engine_of("llama", place=place)
    options = RuntimeOptions(available_memory=lambda: 0, context_cache_bytes=1 << 30)
    runtime, ids = Runtime(engine, None, options), random_tokens(engine, 100)
    kept = [np.concatenate([random_tokens(engine, 50, seed=seed), ids]) for seed in range(3)]
    for one in kept:
        runtime.release(runtime.prefill(one))
    assert len(runtime.context_cache) == 3
    place.free = 0
    done = runtime.prefill(np.concatenate([ids, ids]))
    assert len(runtime.context_cache) < 3
    runtime.release(done)
