"""Fetching against recomputing: whatever a link or a peer does, the logits are those of a full prefill, and in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.nearby import Held, NearbyRemote, Pace, constant
from ctxreuse.bus.remote import Offer
from ctxreuse.cost import CostModel
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from support.examples import examples
from support.fetch_scene import BLOCK, EACH, Chosen, Scene, both, right, tokens, ways
from support.letters import Letters


@both
@ways
@pytest.mark.parametrize("rest", [1, 40])
def test_a_context_of_another_node_is_used(engine: TorchEngine, way: str, rest: int) -> None:
    ids = tokens(10 * BLOCK + rest)
    scene = Scene(engine, ids[: 10 * BLOCK], way=way)
    done, seconds = scene.prefill(ids)
    right(engine, done, ids)
    usage = done.usage
    assert usage.tokens.by_source == {"cloud": 10 * BLOCK}
    assert usage.miss_reason == ("" if rest <= BLOCK else "no store")
    assert usage.fetched_bytes >= 10 * scene.remote.held.blocks[0].nbytes
    assert usage.seconds.fetch > 0
    assert seconds < EACH * (rest + 10)
    assert scene.remote.fetches[0][1].ended == ""
    (record,) = scene.cost.log.records()
    assert (record.way, record.took, record.peer) == (way, way, "nearby")
    assert record.real == pytest.approx(seconds, abs=0.002)


@both
@ways
@pytest.mark.parametrize("held", ["store", "memory", "memory, inside a block"])
def test_a_local_prefix_and_the_rest_from_another_node(
    engine: TorchEngine, way: str, held: str, tmp_path: Path
) -> None:
    ids, local = tokens(12 * BLOCK + 5), 4 * BLOCK + (7 if "inside" in held else 0)
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        scene = Scene(engine, ids[: 12 * BLOCK], way=way)
        runtime = scene.runtime(store)
        if held == "store":
            Runtime(engine, store).warm(ids[:local])
            store.flush()
        else:
            runtime.context_cache.put(Runtime(engine).prefill(ids[:local]).context)
        done, _ = scene.prefill(ids, runtime)
        right(engine, done, ids)
        seam = done.usage.tokens.by_source["disk" if held == "store" else "device"]
        # A context that ends inside a block goes back to its start, or on to its end.
        assert seam in (local, local // BLOCK * BLOCK)
        assert done.usage.tokens.by_source["cloud"] >= 7 * BLOCK
        runtime.release(done)
        store.flush()
        store.check()
        # Kept under this node's own keys: the next request needs nobody.
        assert store.match(runtime.keys(ids)).blocks == 12
        again = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0)).prefill(np.concatenate([ids, ids[:20]]))
        assert again.usage.tokens.by_source == {"disk": 12 * BLOCK if engine.space.needs_state else done.context.n}
        right(engine, again, np.concatenate([ids, ids[:20]]))


@pytest.mark.parametrize(
    ("bandwidth", "least", "most"), [(0.0, 0, 0), (3e5, 1, 6), (1.5e6, 4, 10), (1e7, 9, 12), (1e12, 12, 12)]
)
@both
def test_both_ends_meet(engine: TorchEngine, bandwidth: float, least: int, most: int) -> None:
    """Gemma's blocks are smaller and a state comes first; either way a faster link brings more, and none costs time."""
    ids = tokens(12 * BLOCK + 3)
    scene = Scene(engine, ids[: 12 * BLOCK], constant(bandwidth, 0.001), way="tail", offered=bandwidth)
    done, seconds = scene.prefill(ids)
    right(engine, done, ids)
    blocks = done.usage.tokens.by_source.get("cloud", 0) // BLOCK
    assert least <= blocks <= most
    # Nothing but the tokens that were not fetched was computed, and hardly anything was waited for.
    assert seconds <= EACH * (len(ids) - blocks * BLOCK) + 2 * EACH * BLOCK
    assert seconds <= EACH * len(ids) + EACH * BLOCK


rates = st.sampled_from([0.0, 1e3, 3e4, 2e5, 1e6, 1e8])


@both
@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    way=st.sampled_from(["layers", "tail", None]),
    spells=st.lists(st.tuples(st.floats(0.001, 0.1), rates), max_size=5),
    last=rates,
    cut=st.none() | st.floats(0, 0.2),
    offered=rates,
    blocks=st.integers(1, 9),
    rest=st.integers(1, 2 * BLOCK),
)
def test_any_pattern_of_arrival(
    engine: TorchEngine,
    way: str | None,
    spells: list[tuple[float, float]],
    last: float,
    cut: float | None,
    offered: float,
    blocks: int,
    rest: int,
) -> None:
    def through(seconds: float) -> float:
        nbytes = 0.0
        for spell, rate in spells:
            nbytes += min(spell, seconds) * rate
            seconds = max(0.0, seconds - spell)
        return nbytes + seconds * last

    def pace(began: float, now: float) -> float | str:
        return "cut" if cut is not None and now >= cut else through(now) - through(began)

    ids = tokens(blocks * BLOCK + rest)
    scene = Scene(engine, ids[: blocks * BLOCK], pace, way=way, offered=offered)
    done, seconds = scene.prefill(ids)
    right(engine, done, ids)
    recompute = EACH * len(ids)
    if way == "tail":
        assert seconds <= recompute + 2 * EACH * BLOCK
    # A link that disappoints after all was staked on it: what was spent is lost, and no more than what it promised.
    assert seconds <= 2.2 * recompute + 0.08
    assert scene.remote.rejected == []
    assert all(fetch.ended is not None for _, fetch in scene.remote.fetches)


def falling(before: float, at: float, after: float) -> Pace:
    def through(seconds: float) -> float:
        return min(seconds, at) * before + max(0.0, seconds - at) * after

    return lambda began, now: through(now) - through(began)


@both
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_link_that_falls_to_a_hundredth_is_left_in_time(engine: TorchEngine, share: float) -> None:
    ids = tokens(24 * BLOCK + 5)
    recompute = EACH * len(ids)
    nbytes = 24 * Scene(engine, ids[:BLOCK]).remote.held.blocks[0].nbytes
    bandwidth = nbytes / (0.5 * recompute)
    at = share * 0.5 * recompute
    scene = Scene(engine, ids[: 24 * BLOCK], falling(bandwidth, at, bandwidth / 100), way="layers", offered=bandwidth)
    done, seconds = scene.prefill(ids)
    right(engine, done, ids)
    assert done.usage.miss_reason == "link"
    assert seconds <= at + 1.05 * recompute + 0.12  # a tenth of a second to notice
    (record,) = scene.cost.log.records()
    assert (record.way, record.took) in (("layers", "recompute"), ("layers", "tail"))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_link_that_goes_dead_is_not_waited_for_to_the_deadline(llama: TorchEngine, share: float) -> None:
    ids = tokens(24 * BLOCK + 5)
    recompute = EACH * len(ids)
    nbytes = 24 * Scene(llama, ids[:BLOCK]).remote.held.blocks[0].nbytes
    bandwidth = nbytes / (0.5 * recompute)
    at = share * 0.5 * recompute
    scene = Scene(llama, ids[: 24 * BLOCK], falling(bandwidth, at, 0.0), way="layers", offered=bandwidth)
    done, seconds = scene.prefill(ids)
    right(llama, done, ids)
    assert done.usage.miss_reason == "link"
    assert seconds <= at + (1.05 + 1 / (8 * (1 - share))) * recompute + 0.12


def test_a_link_that_gets_slower_but_not_useless_is_met_half_way(llama: TorchEngine) -> None:
    ids = tokens(24 * BLOCK + 5)
    recompute = EACH * len(ids)
    nbytes = 24 * Scene(llama, ids[:BLOCK]).remote.held.blocks[0].nbytes
    fast, slow = nbytes / (0.1 * recompute), nbytes / (1.5 * recompute)
    scene = Scene(llama, ids[: 24 * BLOCK], falling(fast, 0.01, slow), way="layers", offered=fast)
    done, seconds = scene.prefill(ids)
    right(llama, done, ids)
    assert [order for order, _ in scene.remote.fetches] == ["layers", "tail"]
    assert 0 < done.usage.tokens.by_source["cloud"] < 24 * BLOCK
    assert done.usage.miss_reason == "link"
    assert seconds < 0.95 * recompute + 0.1


def test_a_stalled_link_costs_nothing_when_both_ends_were_to_meet(llama: TorchEngine) -> None:
    ids = tokens(24 * BLOCK + 5)
    scene = Scene(llama, ids[: 24 * BLOCK], falling(1e6, 0.02, 0.0), way="tail", offered=1e9)
    done, seconds = scene.prefill(ids)
    right(llama, done, ids)
    assert seconds <= EACH * len(ids) + 1.5 * EACH * BLOCK


def test_decoding_teaches_its_line(llama: TorchEngine) -> None:
    text: Any = Letters()
    runtime = Runtime(llama, None, RuntimeOptions(text=text, cost=CostModel()))
    runtime.complete(tokens(40), SamplingParams(max_tokens=6, ignore_eos=True)).drain()
    assert runtime.cost is not None
    assert len(runtime.cost.decode) == 5
    assert runtime.cost.decode.seconds(45) > 0  # type: ignore[operator]


def test_nobody_is_asked_what_cannot_pay(llama: TorchEngine) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids)
    runtime = scene.runtime()
    runtime.prefill(ids[:BLOCK])  # no whole block lacks beside the last token
    assert scene.remote.asked == 0
    quick = Scene(llama, ids)
    for n in (16, 64, 160) * 30:
        quick.cost.prefill.observe(n, 0, n * 1e-5)
    quick.runtime().prefill(ids)  # two milliseconds of computing
    assert quick.remote.asked == 0


def test_a_peer_that_holds_no_more_than_is_here_changes_nothing(llama: TorchEngine) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 4 * BLOCK])
    runtime = scene.runtime()
    runtime.connect(None)
    runtime.release(runtime.prefill(ids[: 6 * BLOCK]))
    runtime.connect(scene.remote)
    done, _ = scene.prefill(ids, runtime)
    right(llama, done, ids)
    assert done.usage.tokens.by_source == {"device": 6 * BLOCK}
    assert (scene.remote.asked, scene.remote.fetches) == (1, [])


class Elsewhere(NearbyRemote):
    """While a peer is asked, another request of this node changes what is held, and computes."""

    meanwhile: Callable[[], None]

    def offer(self, *args: Any, **named: Any) -> Offer | None:
        found = super().offer(*args, **named)
        self.meanwhile()
        return found


@both
@ways
@pytest.mark.parametrize("comes", [True, False])
def test_what_is_held_here_changes_while_a_peer_is_asked(
    engine: TorchEngine, way: str, comes: bool, tmp_path: Path
) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(engine, ids[: 10 * BLOCK], way=way)
    scene.remote.__class__ = Elsewhere
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        other = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        runtime = scene.runtime(store)
        if not comes:
            other.warm(ids[: 3 * BLOCK])
            store.flush()

        def meanwhile() -> None:
            if comes:
                other.warm(ids[: 3 * BLOCK])
                store.flush()
            else:
                other.forget(ids[: 3 * BLOCK])

        scene.remote.meanwhile = meanwhile  # type: ignore[attr-defined]
        done, _ = scene.prefill(ids, runtime)
        right(engine, done, ids)
        assert done.usage.tokens.by_source["cloud"] >= 6 * BLOCK


def test_a_peer_that_would_compute_is_followed_layer_by_layer(llama: TorchEngine) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], constant(1e9, 0.02))
    offer = scene.remote.offer

    def computing(*args: Any, **named: Any) -> Offer | None:
        found = offer(*args, **named)
        assert found is not None
        return Offer(*(getattr(found, name) for name in found.__struct_fields__[:7]), computes=True, delay=0.02)

    scene.remote.offer = computing  # type: ignore[method-assign]
    scene.remote.offered = 1e9
    done, seconds = scene.prefill(ids)
    right(llama, done, ids)
    assert [order for order, _ in scene.remote.fetches] == ["layers"]
    assert done.usage.tokens.by_source == {"cloud": 10 * BLOCK}
    assert seconds < 0.05


def test_costs_are_learnt_on_the_way_and_by_calibration(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None, RuntimeOptions(cost=CostModel()))
    runtime.warm(tokens(100))
    assert runtime.cost is not None
    assert len(runtime.cost.prefill) == 1
    runtime.calibrate()
    assert len(runtime.cost.prefill) == 5
    runtime.cost.prefill.check()
    assert [record.way for record in runtime.cost.log.records()] == ["recompute"]
    Runtime(llama, None).calibrate()  # nothing to teach


def test_a_disk_that_is_slower_than_computing_is_not_read(llama: TorchEngine, tmp_path: Path) -> None:
    ids = tokens(100)
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        Runtime(llama, store).warm(ids)
        store.flush()
        cost = Chosen()
        runtime = Runtime(llama, store, RuntimeOptions(cost=cost, context_cache_bytes=0))
        assert runtime.prefill(ids).usage.tokens.by_source == {"disk": 96}
        cost.disk.observe(1 << 10, 10.0)
        done = runtime.prefill(ids)
        assert done.usage.tokens.by_source == {}
        assert done.usage.miss_reason == "slow"


@pytest.mark.model
def test_smollm2_fetched_goes_on_as_computed(smollm2: TorchEngine) -> None:
    engine = smollm2
    ids = np.random.default_rng(3).integers(100, 40_000, 6 * 64 + 9).astype("<i4")
    whole = engine.prefill(engine.new_context(), ids)
    held = Held(engine, ids[: 6 * 64])
    for way, bandwidth in (("layers", 2e9), ("tail", 2e9), ("tail", 1.5e7)):
        cost = Chosen(way)
        runtime = Runtime(
            engine,
            None,
            RuntimeOptions(remote=NearbyRemote(held, constant(bandwidth, 0.001), offered=bandwidth), cost=cost),
        )
        runtime.calibrate()
        done = runtime.prefill(ids)
        assert done.usage.tokens.by_source["cloud"] >= 64
        assert np.abs(done.logits - whole).max() < 1e-3
        assert done.logits.argmax() == whole.argmax()
