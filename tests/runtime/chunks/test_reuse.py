"""Documents in another order: moved where the gate lets them, computed everywhere else, counted as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import parse
from ctxreuse.cost import CostModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import tenant_salt
from ctxreuse.metrics import Metrics
from ctxreuse.reuse import ChunkProfileStore, MaxSeconds, MaxTokens, QualityGate, RecomputeBudget, Share, chunks, record
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore, open_store
from ctxreuse.testing.profiles import plain_codec
from support.examples import examples
from support.shuffled import BLOCK, MAX_KL, Pool, card, forget_memory, gate, prefill, tokens

FORWARD, BACKWARD = (0, 1, 2, 3), (3, 2, 1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with open_store(tmp_path / "kv", capacity=1 << 27) as opened:
        yield opened
        opened.check()


@pytest.fixture
def pool() -> Any:
    return Pool()


def full(engine: TorchEngine, ids: Any) -> Any:
    return engine.prefill(engine.new_context(), ids)


def test_documents_in_another_order_are_moved(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), metrics=(metrics := Metrics())))
    first = prefill(runtime, pool.ask(FORWARD))
    assert first.usage.gate_decision == ""
    assert first.usage.cached_tokens == 0
    forget_memory(runtime, store)

    done = prefill(runtime, pool.ask(BACKWARD))
    usage = done.usage
    assert usage.gate_decision == "kl-0.020 by rotate"
    # What is left: ends of documents that filled no block, and the question.
    assert usage.tokens.relocated > 0.8 * len(done.context.tokens)
    assert usage.cached_tokens - usage.tokens.relocated in (0, BLOCK)  # the head, exactly
    assert usage.tokens.recomputed == 0
    assert set(usage.tokens.by_source) <= {"host", "disk"}
    assert usage.tokens.by_level["approx"] == usage.tokens.relocated
    assert [level for level in {run.level for run in done.context.levels} if level.startswith("approx")] == [
        "approx~kl-0.020"
    ]
    assert metrics.read("ctxreuse_chunk_reuse_requests_total", "allowed") == 1
    assert np.isfinite(done.logits).all()
    assert not np.allclose(done.logits, full(llama, done.context.tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (None, "rotate"),
        (Share(1), "first-4"),
        (MaxTokens(1024), "first-4"),
        (Share(0.02), "rotate"),
        (MaxTokens(5), "rotate"),
    ],
)
def test_a_budget_limits_what_is_recomputed(
    llama: TorchEngine, store: TieredStore, pool: Any, budget: RecomputeBudget | None, chosen: str
) -> None:
    both = card(llama, ("rotate", 0.03), ("first-4", 0.02), recomputed=0.0)
    rows = [msgspec.structs.replace(m, recomputed=0.05 if m.policy == "first-4" else 0.0) for m in both.measured]
    measured = QualityGate(llama.space, msgspec.structs.replace(both, measured=tuple(rows)))
    runtime = Runtime(llama, store, RuntimeOptions(gate=measured, recompute=budget))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    usage = prefill(runtime, pool.ask(BACKWARD)).usage
    assert usage.gate_decision.endswith(f"by {chosen}")
    assert usage.tokens.recomputed == (0 if chosen == "rotate" else 4 * 4)


def test_a_budget_of_time_pays_for_nothing_until_computing_is_known(
    llama: TorchEngine, store: TieredStore, pool: Any
) -> None:
    rows = [msgspec.structs.replace(m, recomputed=0.05) for m in card(llama, ("first-4", 0.02)).measured]
    measured = QualityGate(llama.space, msgspec.structs.replace(card(llama), measured=tuple(rows)))
    runtime = Runtime(llama, store, RuntimeOptions(gate=measured, recompute=MaxSeconds(10)))
    assert runtime.cost is not None
    assert runtime.cost.prefill.seconds(100) is None
    moving = runtime.chunk_reuse
    prefill(runtime, pool.ask(FORWARD))  # by which it learns
    forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.gate_decision.endswith("by first-4")
    forget_memory(runtime, store)
    moving.recompute = MaxSeconds(1e-6)
    usage = prefill(runtime, pool.ask((2, 0, 3, 1))).usage
    assert usage.gate_decision.startswith("refused: no policy within the budget: first-4")
    assert usage.tokens.relocated == 0


def test_an_exact_session_moves_nothing(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), metrics=(metrics := Metrics())))
    prefill(runtime, pool.ask(FORWARD), None)
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD), None)
    assert (done.usage.tokens.relocated, done.usage.gate_decision, done.usage.approximate) == (0, "", False)
    np.testing.assert_allclose(done.logits, full(llama, done.context.tokens), atol=2e-5)
    # What a lossy one leaves behind is of no use to an exact one.
    forget_memory(runtime, store)
    prefill(runtime, pool.ask((2, 0, 3, 1)))
    again = prefill(runtime, pool.ask((2, 0, 3, 1)), None)
    assert not again.usage.approximate
    np.testing.assert_allclose(again.logits, full(llama, again.context.tokens), atol=2e-5)
    assert metrics.read("ctxreuse_chunk_reuse_requests_total", "allowed") == 1


def test_a_run_that_deviates_too_much_is_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    strict = Runtime(llama, store, RuntimeOptions(gate=gate(llama, limit=0.0), metrics=(metrics := Metrics())))
    prefill(strict, pool.ask(FORWARD))
    forget_memory(strict, store)
    done = prefill(strict, pool.ask(BACKWARD))
    assert done.usage.tokens.relocated == 0
    assert done.usage.tokens.recomputed > 200
    assert "runs computed, as their probes deviate too much" in done.usage.gate_decision
    assert done.usage.miss_reason == "probe"
    assert metrics.read("ctxreuse_chunk_reuse_requests_total", "exceeded") == 1
    why = strict.why()
    assert why.reason == "probe"
    assert "deviated there by more than" in why.text
    np.testing.assert_allclose(done.logits, full(llama, done.context.tokens), atol=2e-4)


def test_a_repair_computes_its_share(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, ("first-4+v-10%", 0.01))))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate_decision == "kl-0.010 by first-4+v-10%"
    assert done.usage.tokens.relocated > 4 * done.usage.tokens.recomputed > 100
    why = runtime.why()
    assert (why.relocated, why.recomputed, why.gate_decision) == (
        done.usage.tokens.relocated,
        done.usage.tokens.recomputed,
        done.usage.gate_decision,
    )
    assert f"{done.usage.tokens.relocated:,} of these were relocated from other positions" in why.text
    assert f"{done.usage.tokens.recomputed:,} more were recomputed (kl-0.010 by first-4+v-10%)" in why.text


@pytest.mark.parametrize("repair", ["ask-10%", "first-4+every-12+ask-5%+drift"])
def test_a_repair_that_looks_where_the_question_looks(
    llama: TorchEngine, store: TieredStore, pool: Any, repair: str
) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, (repair, 0.01))))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate_decision == f"kl-0.010 by {repair}"
    assert done.usage.tokens.relocated > 3 * done.usage.tokens.recomputed > 60


def test_another_question_has_other_rows_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, ("ask-10%", 0.01))))
    prefill(runtime, pool.ask(FORWARD))
    left = []
    for seed in (50, 51, 50):
        ids, parts = pool.ask(BACKWARD, seed=seed)
        forget_memory(runtime, store)
        done = runtime.prefill(runtime.request(ids, parts=parts, max_kl=MAX_KL))
        left.append(done.context.relocated)  # type: ignore[attr-defined]
        del done  # the next one would start behind it
    assert left[0] == left[2] != left[1]


def test_all_rows_repaired_are_a_full_prefill(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, ("first-500", 0.001))))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert (done.usage.tokens.relocated, done.usage.why) == (0, "new")
    assert done.usage.tokens.recomputed > 200
    np.testing.assert_allclose(done.logits, full(llama, done.context.tokens), atol=2e-4)


@pytest.mark.parametrize(
    ("repairs", "more", "said"),
    [
        ([("rotate", 0.2)], {}, "refused: not good enough"),
        ([("rotate", 0.01)], {"kinds": ("head",)}, "refused: the chunk profile has nothing on behind runs"),
    ],
)
def test_the_gate_refuses_by_what_was_measured(
    llama: TorchEngine, store: TieredStore, pool: Any, repairs: Any, more: Any, said: str
) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, *repairs, **more), metrics=(metrics := Metrics())))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate_decision.startswith(said)
    assert (done.usage.tokens.relocated, done.usage.tokens.recomputed, done.usage.miss_reason) == (0, 0, "gate")
    assert runtime.why().reason == "gate"
    assert "None were relocated (refused: " in runtime.why().text
    assert "calibrate" in runtime.why().advice
    assert metrics.read("ctxreuse_chunk_reuse_requests_total", "refused") == 1
    np.testing.assert_allclose(done.logits, full(llama, done.context.tokens), atol=2e-5)


def test_without_a_card_the_answer_says_what_to_do(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=QualityGate(llama.space, None)))
    with pytest.raises(ConfigError, match="ctxreuse calibrate NAME --chunks"):
        runtime.prefill(runtime.request(pool.ask(FORWARD)[0], max_kl=MAX_KL))


def test_a_card_on_the_shelf_is_found_as_soon_as_it_is_there(
    llama: TorchEngine, store: TieredStore, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime = Runtime(llama, store)
    prefill(runtime, pool.ask(FORWARD), None)
    assert runtime.chunk_reuse.gate.profile is None
    with pytest.raises(ConfigError, match="calibration profile"):
        runtime.check_max_kl(MAX_KL)
    path = ChunkProfileStore().add(card(llama))
    assert tmp_path in path.parents
    forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.tokens.relocated
    path.unlink()
    assert runtime.chunk_reuse.gate.profile is None


def test_what_is_predicted_not_to_pay_is_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    cost = CostModel()
    for n in (16, 64, 300):
        cost.prefill.observe(n, 0, 1e-5 * n)
        cost.relocate.observe(n * llama.space.token_nbytes, 1e-3 * n)
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), cost=cost))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate_decision == "refused: computing them is predicted to be quicker"
    assert (done.usage.tokens.relocated, done.usage.miss_reason) == (0, "slow")


def test_an_engine_that_moves_nothing_is_asked_for_nothing(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    class Plain:
        """The engine without what reuse at other positions needs."""

        def __getattr__(self, name: str) -> Any:
            if name == "chunks":
                raise AttributeError(name)
            return getattr(llama, name)

    plain: Any = Plain()
    runtime = Runtime(plain, store, RuntimeOptions(gate=gate(llama)))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.gate_decision == ""


def test_reuse_does_not_decay(llama: TorchEngine, tmp_path: Path) -> None:
    """Every order of a pool, each prompt after the others: what was stored once is found from all of them."""
    pool = Pool(5, sizes=(48, 64, 80))
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), context_cache_bytes=0))
        shares, sizes = [], []
        for number, order in enumerate(list(permutations(range(5), 3))[:40]):
            done = prefill(runtime, pool.ask(order, seed=100 + number))
            shares.append(done.usage.cached_tokens / done.usage.prompt_tokens)
            sizes.append(store.stats().nbytes)
        assert min(shares[20:]) > 0.75
        assert abs(np.mean(shares[-10:]) - np.mean(shares[20:30])) < 0.03
        # What was only moved is not stored once more.
        assert sizes[-1] == sizes[20]
        store.check()


def test_a_new_document_behind_moved_ones_is_found_later(llama: TorchEngine, store: TieredStore) -> None:
    pool = Pool(4, sizes=(96,))
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), context_cache_bytes=0))
    prefill(runtime, pool.ask((0, 1)))
    assert prefill(runtime, pool.ask((1, 0, 2))).usage.tokens.relocated > 150
    done = prefill(runtime, pool.ask((2, 3)))
    assert done.usage.tokens.relocated >= 80
    assert done.context.relocated[0][0] <= len(pool.head) + BLOCK


def test_rows_that_were_moved_are_no_source(llama: TorchEngine, store: TieredStore) -> None:
    pool = Pool(3, sizes=(96,))
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama), context_cache_bytes=0))
    prefill(runtime, pool.ask((0, 1)))
    homes = dict(_homes(store, llama, pool))
    prefill(runtime, pool.ask((1, 0, 2)))  # stored, as the third is new
    after = dict(_homes(store, llama, pool))
    assert after[0] == homes[0]
    assert after[1] == homes[1]
    assert not homes[2]
    assert after[2]


def _homes(store: TieredStore, engine: TorchEngine, pool: Any) -> Iterator[tuple[int, Any]]:
    from ctxreuse.identity.keys import chunk_key, tenant_salt
    from ctxreuse.reuse import chunks

    for i, document in enumerate(pool.documents):
        keys = [chunk_key(engine.space.digest, tenant_salt("default"), document[a:b]) for a, b in chunks(document)]
        yield i, [store.chunks.locations(key) for key in keys if store.chunks.locations(key)]


def test_a_conversation_goes_on_from_moved_rows(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    ids, parts = pool.ask(BACKWARD)
    prefill(runtime, (ids, parts))
    more = np.concatenate([ids, tokens(20, 7)])
    done = prefill(runtime, (more, (*parts, len(ids))))
    assert done.usage.tokens.by_source == {"device": len(ids)}
    assert done.usage.tokens.relocated == 0
    assert done.usage.approximate


def test_a_model_of_states_computes_what_it_cannot_move(gemma: TorchEngine, store: TieredStore, pool: Any) -> None:
    # A card that claims it could: the engine says that it cannot, and nothing is lost.
    runtime = Runtime(gemma, store, RuntimeOptions(gate=gate(gemma)))
    prefill(runtime, pool.ask(FORWARD))
    forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate_decision.startswith("refused: a model that keeps states")
    assert done.usage.tokens.relocated == 0
    np.testing.assert_allclose(done.logits, full(gemma, done.context.tokens), atol=2e-5)


def test_sources_of_any_level_are_moved(
    llama: TorchEngine, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as they were computed, packed and lossy, side by side; what is worse than a request allows is computed."""
    with open_store(None, host_bytes=1 << 27) as plain, open_store(None, host_bytes=1 << 27) as store:
        prefill(Runtime(llama, plain, RuntimeOptions(gate=gate(llama))), pool.ask(FORWARD))
        with plain.read() as reader:
            found = [reader.peek(entry.key) for entry in plain.walk()]
            raw = [parse(bytes(view.buffer)) for view in found if view is not None]
            found.clear()
        codec = plain_codec(llama.space, raw, tmp_path / "cards")
        monkeypatch.setattr(llama._model, "_codec", codec)
        for i, view in enumerate(raw):
            assert store.put(
                view.header.key, codec.encode(view, ("kl-0.01", "exact+rans", "exact")[i % 3]), max_kl=MAX_KL
            )
        ids, parts = pool.ask(FORWARD)
        keys, salt = [view.header.key for view in raw], tenant_salt("default")
        record(store.chunks, salt, llama.space, ids, keys, chunks(ids, parts), [(0, len(ids))])
        runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama, ("rotate", 0.005)), context_cache_bytes=0))
        done = prefill(runtime, pool.ask(BACKWARD), 0.02)
        assert done.usage.tokens.relocated > 300
        # What moving does comes on top of what the code of the source does.
        assert {run.level for run in done.context.levels if run.end > 40} == {"approx~kl-0.015"}
        refused = prefill(runtime, pool.ask((3, 1, 0, 2), seed=5), 0.01)
        assert refused.usage.tokens.relocated == 0
        assert "its sources another 0.01" in refused.usage.gate_decision
        strict = prefill(runtime, pool.ask((1, 0, 2, 3), seed=3), 0.005)
        assert 0 < strict.usage.tokens.relocated < 200
        assert {run.level for run in strict.context.levels} <= {"exact", "exact+rans", "approx~kl-0.005"}
        store.check()


orders = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@examples("heavy")
@given(
    asked=st.lists(st.tuples(orders, st.sampled_from([MAX_KL, None, 0.01])), min_size=2, max_size=6),
    repair=st.sampled_from(
        [("rotate", 0.02), ("first-3", 0.005), ("v-10%@1", 0.02), ("none", 0.03), ("every-9+ask-5%+drift", 0.02)]
    ),
    limit=st.sampled_from([1e9, 1.0]),
    seed=st.integers(0, 3),
    memory=st.booleans(),
)
def test_tokens_always_add_up(
    llama: TorchEngine, asked: Any, repair: tuple[str, float], limit: float, seed: int, memory: bool
) -> None:
    pool = Pool(5, sizes=(40, 77, 16, 90), seed=10 * seed)
    with open_store(None, host_bytes=1 << 25) as store:
        runtime = Runtime(
            llama, store, RuntimeOptions(gate=gate(llama, repair, limit=limit), context_cache_bytes=(1 << 26) * memory)
        )
        for order, max_kl in asked:
            done = prefill(runtime, pool.ask(order), max_kl)
            runtime.context_cache.check()
            if max_kl is None or repair[1] > max_kl:
                assert not done.usage.tokens.relocated
            if max_kl is None:
                np.testing.assert_allclose(done.logits, full(llama, done.context.tokens), atol=3e-5)
        store.check()
