"""Where a runtime's contexts keep states: exact resumes at the last one, at a branch and in the middle, by price."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ctxreuse.cost import CostModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.checkpoints import StateCheckpoints
from ctxreuse.store import BlockStore, open_store
from ctxreuse.store.policy.states import StatePolicy
from support.tiny_models import tiny_model

SIZE = 16


@pytest.fixture(scope="module", params=["gemma3", "falconh1", "mamba2"])
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    return TorchEngine(tiny_model(request.param), block_tokens=SIZE, chunk=64)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore.open(tmp_path) as store:
        yield store
        store.check()


def tokens(n: int, seed: int = 0) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(1, 500, n))


def join(*parts: Tokens) -> Tokens:
    return as_tokens(np.concatenate(parts))


def whole(engine: TorchEngine, ids: Tokens) -> npt.NDArray[np.float32]:
    return engine.prefill(engine.new_context(), ids)


def ask(runtime: Runtime, ids: Tokens) -> int:
    """Prefill and keep; checks the logits, returns how many tokens were reused."""
    done = runtime.prefill(ids)
    assert isinstance(runtime.engine, TorchEngine)
    np.testing.assert_allclose(done.logits, whole(runtime.engine, ids), atol=1e-4)
    runtime.release(done)
    if runtime.store is not None:
        runtime.store.flush()
    return done.usage.cached_tokens


def test_resumed_at_the_last_state_at_a_branch_and_in_the_middle(engine: TorchEngine, store: BlockStore) -> None:
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
    shared, one, two = tokens(128), tokens(40, 1), tokens(40, 2)
    assert ask(runtime, shared[:64]) == 0
    assert ask(runtime, join(shared, one)) == 64
    assert store.stats().states == 2
    # The second to part there replays from the state before it, and leaves one: at the branch.
    assert ask(runtime, join(shared, two)) == 64
    assert store.stats().states == 4
    assert ask(runtime, join(shared, tokens(40, 3))) == 128
    assert ask(runtime, join(shared, one, tokens(30, 4))) == 160
    # In the middle between two states: from the nearer one, and the next one finds its own.
    assert ask(runtime, join(shared[:96], tokens(30, 5))) == 64
    assert ask(runtime, join(shared[:96], tokens(30, 6))) == 96


def test_a_long_run_has_rungs_once_the_weight_of_a_state_is_known(tmp_path: Path, engine: TorchEngine) -> None:
    ids = tokens(1024)
    with open_store(tmp_path) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0, states=StatePolicy(worth=10)))
        points = runtime.checkpoints.points(store, runtime.keys(ids), runtime.request(ids))
        assert points == (384, 704, 864, 944, 1024)
        assert ask(runtime, ids) == 0
        for at in points:
            assert store.match(runtime.keys(ids[:at])).state_tokens == at
        assert ask(runtime, join(ids[:912], tokens(20, 1))) == 864
        store.check()


def test_what_is_replayed_is_not_stored(engine: TorchEngine, store: BlockStore) -> None:
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0, states=StatePolicy(replay=48)))
    ids = tokens(200)
    assert ask(runtime, ids[:100]) == 0
    assert ask(runtime, ids[:140]) == 96
    assert store.stats().states == 1
    assert ask(runtime, ids[:160]) == 96
    assert store.stats().states == 2
    assert ask(runtime, ids[:170]) == 160


def test_the_least_seconds_decide_where_a_prompt_goes_on(engine: TorchEngine, store: BlockStore) -> None:
    """A state that takes longer to load than the tokens behind an earlier one take to compute is left alone."""
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
    ids = tokens(150)
    for end in (40, 80, 144):
        ask(runtime, ids[:end])
    keys = runtime.keys(ids)[:9]
    keeping = StateCheckpoints(engine.space, StatePolicy())
    keeping.learn(1_000_000)

    def resumed(cost: CostModel | None, total: int) -> tuple[int, int]:
        return keeping.resume(store, keys, total, cost, None)

    assert resumed(None, 150) == (144, 144)
    assert resumed(CostModel(), 150) == (144, 144)

    def priced(compute: float, load: float) -> CostModel:
        """Seconds a token, and a byte beyond the state's."""
        cost = CostModel()
        for n in (10, 100, 400):
            cost.prefill.observe(n, 0, n * compute)
            cost.disk.observe(n * 10_000, n * 10_000 * load)
        return cost

    assert resumed(priced(1e-3, 1e-10), 150) == (144, 144)
    # A disk so slow that it loses to computing all of it.
    assert resumed(priced(1e-4, 1e-4), 150) == (0, 144)


def test_a_model_without_states_keeps_none(store: BlockStore) -> None:
    engine = TorchEngine(tiny_model("llama"), block_tokens=SIZE)
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
    ids = tokens(100)
    assert runtime.checkpoints.points(store, runtime.keys(ids), runtime.request(ids)) == ()
    assert ask(runtime, ids) == 0
    assert ask(runtime, join(ids[:70], tokens(9, 1))) == 64
    assert store.stats().states == 0
