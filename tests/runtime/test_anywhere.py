"""Documents in another order: moved where the gate lets them, computed everywhere else, counted as what they are."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.block import parse
from ctxreuse.cost import CostModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.keys import tenant_salt
from ctxreuse.metrics import Metrics
from ctxreuse.reuse import ChunkShelf, Gate, record
from ctxreuse.runtime import Runtime
from ctxreuse.store import TieredStore, open_store
from ctxreuse.testing.plain_card import shelved

S: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("shuffled.py"))))
BLOCK, LOSSY, Pool, card, gate, holds, prefill, tokens = (
    S.BLOCK, S.LOSSY, S.Pool, S.card, S.gate, S.holds, S.prefill, S.tokens,
)  # fmt: skip
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
    return engine.prefill(engine.start(), ids)


def test_documents_in_another_order_are_moved(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama), metrics=(metrics := Metrics()))
    first = prefill(runtime, pool.ask(FORWARD))
    assert first.usage.gate == ""
    assert first.usage.cached_tokens == 0
    S.forget_memory(runtime, store)

    done = prefill(runtime, pool.ask(BACKWARD))
    usage = done.usage
    assert usage.gate == "kl-0.020 by rotate"
    # What is left: ends of documents that filled no block, and the question.
    assert usage.moved > 0.8 * len(done.live.tokens)
    assert usage.cached_tokens - usage.moved in (0, BLOCK)  # the head, exactly
    assert usage.mended == 0
    assert set(usage.by_source) <= {"host", "disk"}
    assert usage.by_level["approx"] == usage.moved
    assert [level for level in {run.level for run in done.live.levels} if level.startswith("approx")] == [
        "approx~kl-0.020"
    ]
    assert metrics.read("ctxreuse_gated_requests_total", "allowed") == 1
    assert np.isfinite(done.logits).all()
    assert not np.allclose(done.logits, full(llama, done.live.tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("budget", "chosen"), [("", "rotate"), ("100%", "first-4"), ("1024", "first-4"), ("2%", "rotate"), ("5", "rotate")]
)
def test_what_mending_may_compute(llama: TorchEngine, store: TieredStore, pool: Any, budget: str, chosen: str) -> None:
    both = card(llama, ("rotate", 0.03), ("first-4", 0.02), recomputed=0.0)
    rows = [msgspec.structs.replace(m, recomputed=0.05 if m.repair == "first-4" else 0.0) for m in both.measured]
    measured = Gate(llama.space, msgspec.structs.replace(both, measured=tuple(rows)))
    runtime = Runtime(llama, store, gate=measured, repair=budget)
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    usage = prefill(runtime, pool.ask(BACKWARD)).usage
    assert usage.gate.endswith(f"by {chosen}")
    assert usage.mended == (0 if chosen == "rotate" else 4 * 4)


def test_a_budget_of_time_pays_for_nothing_until_computing_is_known(
    llama: TorchEngine, store: TieredStore, pool: Any
) -> None:
    rows = [msgspec.structs.replace(m, recomputed=0.05) for m in card(llama, ("first-4", 0.02)).measured]
    measured = Gate(llama.space, msgspec.structs.replace(card(llama), measured=tuple(rows)))
    runtime = Runtime(llama, store, gate=measured, repair="10s")
    assert runtime.cost is not None
    assert runtime.cost.prefill.seconds(100) is None
    moving = runtime.anywhere
    prefill(runtime, pool.ask(FORWARD))  # by which it learns
    S.forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.gate.endswith("by first-4")
    S.forget_memory(runtime, store)
    moving.budget = "1us"
    usage = prefill(runtime, pool.ask((2, 0, 3, 1))).usage
    assert usage.gate.startswith("refused: no repair in the budget: first-4")
    assert usage.moved == 0


@pytest.mark.parametrize("wrong", ["much", "10 %", "-1", "120%"])
def test_no_budget(llama: TorchEngine, wrong: str) -> None:
    with pytest.raises(ConfigError, match="is no budget"):
        Runtime(llama, repair=wrong)


def test_an_exact_session_moves_nothing(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama), metrics=(metrics := Metrics()))
    prefill(runtime, pool.ask(FORWARD), None)
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD), None)
    assert (done.usage.moved, done.usage.gate, done.usage.approx) == (0, "", False)
    np.testing.assert_allclose(done.logits, full(llama, done.live.tokens), atol=2e-5)
    # What a lossy one leaves behind is of no use to an exact one.
    S.forget_memory(runtime, store)
    prefill(runtime, pool.ask((2, 0, 3, 1)))
    again = prefill(runtime, pool.ask((2, 0, 3, 1)), None)
    assert not again.usage.approx
    np.testing.assert_allclose(again.logits, full(llama, again.live.tokens), atol=2e-5)
    assert metrics.read("ctxreuse_gated_requests_total", "allowed") == 1


def test_a_run_that_deviates_too_much_is_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    strict = Runtime(llama, store, gate=gate(llama, limit=0.0), metrics=(metrics := Metrics()))
    prefill(strict, pool.ask(FORWARD))
    S.forget_memory(strict, store)
    done = prefill(strict, pool.ask(BACKWARD))
    assert done.usage.moved == 0
    assert done.usage.mended > 200
    assert "runs computed, as their probes deviate too much" in done.usage.gate
    assert done.usage.missed == "probe"
    assert metrics.read("ctxreuse_gated_requests_total", "exceeded") == 1
    why = strict.why()
    assert why.reason == "probe"
    assert "deviated there by more than" in why.text
    np.testing.assert_allclose(done.logits, full(llama, done.live.tokens), atol=2e-4)


def test_a_repair_computes_its_share(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama, ("first-4+v-10%", 0.01)))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate == "kl-0.010 by first-4+v-10%"
    assert done.usage.moved > 4 * done.usage.mended > 100
    why = runtime.why()
    assert (why.moved, why.mended, why.gate) == (done.usage.moved, done.usage.mended, done.usage.gate)
    assert f"Moved {done.usage.moved:,} of these from other positions" in why.text
    assert f"computed {done.usage.mended:,} more of them again (kl-0.010 by first-4+v-10%)" in why.text


@pytest.mark.parametrize("repair", ["ask-10%", "first-4+every-12+ask*v-5%+drift"])
def test_a_repair_that_looks_where_the_question_looks(
    llama: TorchEngine, store: TieredStore, pool: Any, repair: str
) -> None:
    runtime = Runtime(llama, store, gate=gate(llama, (repair, 0.01)))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate == f"kl-0.010 by {repair}"
    assert done.usage.moved > 3 * done.usage.mended > 60


def test_another_question_has_other_rows_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama, ("ask-10%", 0.01)))
    prefill(runtime, pool.ask(FORWARD))
    left = []
    for seed in (50, 51, 50):
        ids, parts = pool.ask(BACKWARD, seed=seed)
        S.forget_memory(runtime, store)
        done = runtime.prefill(ids, parts=parts, lossy=S.LOSSY)
        left.append(done.live.moved)  # type: ignore[attr-defined]
    assert left[0] == left[2] != left[1]


def test_all_rows_repaired_are_a_full_prefill(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama, ("first-500", 0.001)))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert (done.usage.moved, done.usage.why) == (0, "new")
    assert done.usage.mended > 200
    np.testing.assert_allclose(done.logits, full(llama, done.live.tokens), atol=2e-4)


@pytest.mark.parametrize(
    ("repairs", "more", "said"),
    [
        ([("rotate", 0.2)], {}, "refused: not good enough"),
        ([("rotate", 0.01)], {"kinds": ("head",)}, "refused: the chunk card says nothing of behind"),
    ],
)
def test_the_gate_refuses_by_what_was_measured(
    llama: TorchEngine, store: TieredStore, pool: Any, repairs: Any, more: Any, said: str
) -> None:
    runtime = Runtime(llama, store, gate=gate(llama, *repairs, **more), metrics=(metrics := Metrics()))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate.startswith(said)
    assert (done.usage.moved, done.usage.mended, done.usage.missed) == (0, 0, "gate")
    assert runtime.why().reason == "gate"
    assert "None were moved (refused: " in runtime.why().text
    assert "calibrate" in runtime.why().advice
    assert metrics.read("ctxreuse_gated_requests_total", "refused") == 1
    np.testing.assert_allclose(done.logits, full(llama, done.live.tokens), atol=2e-5)


def test_without_a_card_the_answer_says_what_to_do(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=Gate(llama.space, None))
    with pytest.raises(ConfigError, match="ctxreuse calibrate NAME --chunks"):
        runtime.prefill(pool.ask(FORWARD)[0], lossy=LOSSY)


def test_a_card_on_the_shelf_is_found_as_soon_as_it_is_there(
    llama: TorchEngine, store: TieredStore, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime = Runtime(llama, store)
    prefill(runtime, pool.ask(FORWARD), None)
    assert runtime.anywhere.gate.card is None
    with pytest.raises(ConfigError, match="card"):
        runtime.permit(LOSSY)
    path = ChunkShelf().add(card(llama))
    assert tmp_path in path.parents
    S.forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.moved
    path.unlink()
    assert runtime.anywhere.gate.card is None


def test_what_is_predicted_not_to_pay_is_computed(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    cost = CostModel()
    for n in (16, 64, 300):
        cost.prefill.observe(n, 0, 1e-5 * n)
        cost.move.observe(n * llama.space.token_nbytes, 1e-3 * n)
    runtime = Runtime(llama, store, gate=gate(llama), cost=cost)
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate == "refused: computing them is predicted to be quicker"
    assert (done.usage.moved, done.usage.missed) == (0, "slow")


def test_an_engine_that_moves_nothing_is_asked_for_nothing(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    class Plain:
        """The engine without what reuse at other positions needs."""

        def __getattr__(self, name: str) -> Any:
            if name in ("place", "deviations", "mend"):
                raise AttributeError(name)
            return getattr(llama, name)

    plain: Any = Plain()
    runtime = Runtime(plain, store, gate=gate(llama))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    assert prefill(runtime, pool.ask(BACKWARD)).usage.gate == ""


def test_reuse_does_not_decay(llama: TorchEngine, tmp_path: Path) -> None:
    """Every order of a pool, each prompt after the others: what was stored once is found from all of them."""
    pool = Pool(5, sizes=(48, 64, 80))
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(llama, store, gate=gate(llama), live_bytes=0)
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
    runtime = Runtime(llama, store, gate=gate(llama), live_bytes=0)
    prefill(runtime, pool.ask((0, 1)))
    assert prefill(runtime, pool.ask((1, 0, 2))).usage.moved > 150
    done = prefill(runtime, pool.ask((2, 3)))
    assert done.usage.moved >= 80
    assert done.live.moved[0][0] <= len(pool.head) + BLOCK


def test_rows_that_were_moved_are_no_source(llama: TorchEngine, store: TieredStore) -> None:
    pool = Pool(3, sizes=(96,))
    runtime = Runtime(llama, store, gate=gate(llama), live_bytes=0)
    prefill(runtime, pool.ask((0, 1)))
    homes = dict(_homes(store, llama, pool))
    prefill(runtime, pool.ask((1, 0, 2)))  # stored, as the third is new
    after = dict(_homes(store, llama, pool))
    assert after[0] == homes[0]
    assert after[1] == homes[1]
    assert not homes[2]
    assert after[2]


def _homes(store: TieredStore, engine: TorchEngine, pool: Any) -> Iterator[tuple[int, Any]]:
    from ctxreuse.keys import chunk_key, tenant_salt
    from ctxreuse.reuse import chunks

    for i, document in enumerate(pool.documents):
        keys = [chunk_key(engine.space.digest, tenant_salt("default"), document[a:b]) for a, b in chunks(document)]
        yield i, [store.chunks.homes(key) for key in keys if store.chunks.homes(key)]


def test_a_conversation_goes_on_from_moved_rows(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, gate=gate(llama))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    ids, parts = pool.ask(BACKWARD)
    prefill(runtime, (ids, parts))
    more = np.concatenate([ids, tokens(20, 7)])
    done = prefill(runtime, (more, (*parts, len(ids))))
    assert done.usage.by_source == {"device": len(ids)}
    assert done.usage.moved == 0
    assert done.usage.approx


def test_a_model_of_states_computes_what_it_cannot_move(gemma: TorchEngine, store: TieredStore, pool: Any) -> None:
    # A card that claims it could: the engine says that it cannot, and nothing is lost.
    runtime = Runtime(gemma, store, gate=gate(gemma))
    prefill(runtime, pool.ask(FORWARD))
    S.forget_memory(runtime, store)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.gate.startswith("refused: a model that keeps states")
    assert done.usage.moved == 0
    np.testing.assert_allclose(done.logits, full(gemma, done.live.tokens), atol=2e-5)


def test_sources_of_any_level_are_moved(
    llama: TorchEngine, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as they were computed, packed and lossy, side by side; what is worse than a request allows is computed."""
    with open_store(None, host_bytes=1 << 27) as plain, open_store(None, host_bytes=1 << 27) as store:
        prefill(Runtime(llama, plain, gate=gate(llama)), pool.ask(FORWARD))
        with plain.read() as reader:
            found = [reader.peek(entry.key) for entry in plain.walk()]
            raw = [parse(bytes(view.buffer)) for view in found if view is not None]
            found.clear()
        codec = shelved(llama.space, raw, tmp_path / "cards")
        monkeypatch.setattr(llama, "_codec", codec)
        for i, view in enumerate(raw):
            assert store.put(
                view.header.key, codec.encode(view, ("kl-0.01", "exact+rans", "exact")[i % 3]), lossy=LOSSY
            )
        ids, parts = pool.ask(FORWARD)
        keys, salt = [view.header.key for view in raw], tenant_salt("default")
        record(store.chunks, salt, llama.space, ids, keys, [(0, len(ids))], parts)
        runtime = Runtime(llama, store, gate=gate(llama, ("rotate", 0.005)), live_bytes=0)
        done = prefill(runtime, pool.ask(BACKWARD), "kl-0.02")
        assert done.usage.moved > 300
        # What moving does comes on top of what the code of the source does.
        assert {run.level for run in done.live.levels if run.end > 40} == {"approx~kl-0.015"}
        refused = prefill(runtime, pool.ask((3, 1, 0, 2), seed=5), "kl-0.01")
        assert refused.usage.moved == 0
        assert "its sources another 0.01" in refused.usage.gate
        strict = prefill(runtime, pool.ask((1, 0, 2, 3), seed=3), "kl-0.005")
        assert 0 < strict.usage.moved < 200
        assert {run.level for run in strict.live.levels} <= {"exact", "exact+rans", "approx~kl-0.005"}
        store.check()


orders = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None)
@given(
    asked=st.lists(st.tuples(orders, st.sampled_from([LOSSY, None, "kl-0.01"])), min_size=2, max_size=6),
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
        runtime = Runtime(llama, store, gate=gate(llama, repair, limit=limit), live_bytes=(1 << 26) * memory)
        for order, lossy in asked:
            done = prefill(runtime, pool.ask(order), lossy)
            runtime.pool.check()
            if lossy is None or repair[1] > float(lossy[3:]):
                assert not done.usage.moved
            if lossy is None:
                np.testing.assert_allclose(done.logits, full(llama, done.live.tokens), atol=3e-5)
        store.check()
