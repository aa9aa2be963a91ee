"""Peers that lie, and bytes that are corrupt: what is caught, what is not, and that nothing is computed with them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ctxreuse.bench.nearby import Held
from ctxreuse.block import BlockWriter, parse
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.keys import Tokens
from ctxreuse.runtime.audit import first_k_matches

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("scene.py"))))
BLOCK = S.BLOCK
both = S.both
ways = S.ways
tokens = S.tokens
Scene = S.Scene
right = S.right


def forged(data: Any, change: Callable[[BlockWriter], None], tokens: Tokens | None = None) -> Any:
    """A block with right checksums over wrong numbers: what a lying peer sends."""
    view = parse(data)
    header = view.header
    writer = BlockWriter(
        view.layout,
        kind=header.kind,
        space=header.space,
        key=header.key,
        parent=header.parent,
        end=header.end,
        tokens=view.tokens if tokens is None else tokens,
        rope_at=header.rope_at,
    )
    for plane in view.layout.planes:
        writer.plane(plane.layer, plane.role)[:] = np.frombuffer(view.plane(plane.layer, plane.role), np.uint8)
    change(writer)
    return writer.seal()


def scale(layer: int) -> Callable[[BlockWriter], None]:
    def change(writer: BlockWriter) -> None:
        writer.plane(layer, "k").view(np.float32)[:] *= 1.5

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
    assert done.usage.missed == "audit"
    assert done.usage.by_source == {}
    again, _ = scene.prefill(ids)
    assert again.usage.by_source == {}


@ways
def test_a_peer_that_sends_what_was_not_asked_for_is_told_on(llama: TorchEngine, way: str) -> None:
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], lambda began, now: "foreign", way=way)  # as an `Assembly` ends then
    done, _ = scene.prefill(ids)
    right(llama, done, ids)
    assert scene.remote.rejected == ["foreign"]
    scene.prefill(ids)
    assert len(scene.remote.fetches) == 1


@ways
def test_a_peer_that_lies_about_deeper_layers_only_is_not_caught(llama: TorchEngine, way: str) -> None:
    """What an audit of the first layer cannot see: such a peer must be trusted, or its blocks computed again."""
    ids = tokens(10 * BLOCK + 5)
    scene = Scene(llama, ids[: 10 * BLOCK], way=way)
    held = scene.remote.held
    held.blocks = [forged(data, scale(1)) for data in held.blocks]
    done, _ = scene.prefill(ids)
    assert scene.remote.rejected == []
    assert np.abs(done.logits - llama.prefill(llama.start(), ids)).max() > 2e-4


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
    assert done.usage.missed == "corrupt"
    assert done.usage.by_source == {}


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
        mixed.append(parse(forged(data, lambda _: None, tokens=view.tokens)))
    assert first_k_matches(engine, mixed, Random(1)) is False
    assert first_k_matches(engine, [], Random(1)) is None


def test_an_audit_says_nothing_where_the_first_layer_is_a_window(gemma: TorchEngine) -> None:
    views = [parse(data) for data in Held(gemma, tokens(2 * BLOCK)).blocks]
    assert first_k_matches(gemma, views, Random(1)) is None
