"""Peers that lie, and bytes that are corrupt: what is caught, what is not, and that nothing is computed with them."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.nearby import Held
from ctxreuse.block.format import parse
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime.fetch.audit import first_k_matches, rows_match, span_matches
from support.fetch_scene import BLOCK, Scene, Timed, both, right, tokens, ways
from support.lies import Lie, forged, lies
from support.tiny_models import engine_of


def scale(layer: int) -> Lie:
    def change(number: int, planes: Any) -> None:
        planes[layer, "k"] *= 1.5

    return change


@ways
def test_a_peer_that_lies_about_the_first_layer_is_caught(llama: TorchEngine, way: str) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], way=way)
    held = scene.remote.held
    held.blocks = [forged(data, scale(0)) for data in held.blocks]
    done, _ = scene.prefill(ids)
    right(llama, done, ids)
    assert scene.remote.rejected == ["audit"]
    assert done.usage.miss_reason == "audit"
    assert done.usage.tokens.by_source == {}
    again, _ = scene.prefill(ids)
    assert again.usage.tokens.by_source == {}


@ways
def test_a_peer_that_sends_what_was_not_asked_for_is_told_on(llama: TorchEngine, way: str) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], lambda began, now: "foreign", way=way)  # as an `FetchBuffer` ends then
    done, _ = scene.prefill(ids)
    right(llama, done, ids)
    assert scene.remote.rejected == ["foreign"]
    scene.prefill(ids)
    assert len(scene.remote.fetches) == 1


@ways
@pytest.mark.parametrize("lie", lies(2, 10, BLOCK, 0))
def test_a_peer_that_lies_about_any_layer_is_caught(llama: TorchEngine, way: str, lie: str) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], way=way)
    held, change = scene.remote.held, lies(len(llama.space.layers), 10, BLOCK, 3)[lie]
    held.blocks = [forged(data, change, number) for number, data in enumerate(held.blocks)]
    done, _ = scene.prefill(ids)
    right(llama, done, ids)
    assert scene.remote.rejected == ["audit"]
    assert (done.usage.miss_reason, done.usage.tokens.by_source) == ("audit", {})


@ways
def test_an_audit_that_cannot_run_uses_nothing_and_blames_nobody(llama: TorchEngine, way: str) -> None:
    class Away(Timed):
        def row_errors(self, live: Any, rows: Tokens) -> Any:
            raise EngineError("out of memory")

    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], way=way)
    done, _ = scene.prefill(ids, scene.runtime(engine=Away(llama, scene.clock)))
    right(llama, done, ids)
    assert scene.remote.rejected == []
    assert (done.usage.miss_reason, done.usage.tokens.by_source) == ("unaudited", {})


@both
@ways
@pytest.mark.parametrize("where", ["first", "last", "state"])
def test_corrupt_bytes_are_never_computed_with(engine: TorchEngine, way: str, where: str) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(engine, ids[: 10 * BLOCK], way=way)
    held = scene.remote.held
    target = held.state if where == "state" else held.blocks[4]
    if target is None:
        assert not engine.space.needs_state
        return
    view = parse(target)
    plane = view.layout.planes[0 if where == "first" else -1]
    target[view.offset(plane.layer, plane.role) + 3] ^= 1
    done, _ = scene.prefill(ids)
    right(engine, done, ids)
    assert scene.remote.rejected == ["corrupt"]
    assert done.usage.miss_reason == "corrupt"
    assert done.usage.tokens.by_source == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_audit_knows_rounding_from_lies(dtype: torch.dtype, llama: TorchEngine) -> None:
    torch.manual_seed(3)
    config = llama.model.config
    engine = TorchEngine(type(llama.model)(config).to(dtype), block_tokens=BLOCK)
    ids = tokens(8 * BLOCK)
    views = [parse(data) for data in Held(engine, ids).blocks]
    for seed in range(5):
        assert first_k_matches(engine, views, Random(seed)) is True
        assert first_k_matches(engine, views[5:], Random(seed)) is True
    other = [parse(data) for data in Held(engine, ids[::-1].copy()).blocks]
    # Planes of other tokens under these ids, as a peer would send that mixes up what it holds.
    mixed = []
    for view, foreign in zip(views, other):
        data = np.frombuffer(foreign.buffer, np.uint8).copy()
        mixed.append(parse(forged(data, tokens=view.tokens)))
    assert first_k_matches(engine, mixed, Random(1)) is False
    assert first_k_matches(engine, [], Random(1)) is None


def test_an_audit_says_nothing_where_the_first_layer_is_a_window(gemma: TorchEngine) -> None:
    views = [parse(data) for data in Held(gemma, tokens(2 * BLOCK)).blocks]
    assert first_k_matches(gemma, views, Random(1)) is None


#: Engines that compute rows out of order, and of those that keep states some with windows, convolutions, recurrences.
ROWS = ("llama", "qwen2", "full-gemma3")
SPANS = ("gemma3", "mistral", "qwen3next", "lfm2", "falconh1", "mamba2", "zaya")


def loaded(engine: TorchEngine, blocks: list[Any], state: Any = None) -> Any:
    live = engine.new_context()
    engine.load(live, [parse(data) for data in blocks], parse(state) if state is not None else None).wait()
    return live


def opened(name: str) -> TorchEngine:
    kind = name.removeprefix("full-")
    return engine_of(kind, full_kv_for_windows=True) if kind != name else engine_of(kind)


@pytest.mark.parametrize("name", ROWS)
def test_lies_about_rows_are_caught_and_honest_ones_pass(name: str) -> None:
    engine = opened(name)
    size, count = engine.space.block_tokens, 12
    start = 2 * size  # what is here already is in front
    for seed in range(20):
        honest = list(Held(engine, tokens(count * size, seed)).blocks)
        assert rows_match(engine, loaded(engine, honest), start, count * size, Random(seed)) is True
        for lie, change in lies(len(engine.space.layers), count - 2, size, seed).items():
            told = [data if n < 2 else forged(data, change, n - 2) for n, data in enumerate(honest)]
            assert rows_match(engine, loaded(engine, told), start, count * size, Random(seed)) is False, (seed, lie)


@pytest.mark.parametrize("name", SPANS)
def test_lies_about_spans_and_states_are_caught_and_honest_ones_pass(name: str) -> None:
    engine = opened(name)
    size = engine.space.block_tokens
    for seed in range(20):
        ids = tokens(6 * size, seed)
        front, whole = Held(engine, ids[: 4 * size]), Held(engine, ids)
        assert rows_match(engine, loaded(engine, front.blocks, front.state), 0, 4 * size, Random(seed)) is None

        def audit(blocks: list[Any], state: Any, front: Held = front) -> bool:
            views = [parse(data) for data in blocks]
            return span_matches(engine, loaded(engine, front.blocks, front.state), views, parse(state))

        assert audit(whole.blocks[4:], whole.state)
        layers = sum(spec.blocked for spec in engine.space.layers)
        for lie, change in lies(layers, 2, size, seed).items() if layers else ():
            told = [forged(data, change, n) for n, data in enumerate(whole.blocks[4:])]
            assert not audit(told, whole.state), (seed, lie)

        def louder(number: int, held: Any, seed: int = seed) -> None:
            told = [place for place in sorted(held) if held[place].any()]
            held[told[seed % len(told)]] *= 1.5

        assert not audit(whole.blocks[4:], forged(whole.state, louder))
