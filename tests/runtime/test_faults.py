"""Bad blocks are never used: corrupt, truncated, of another model, tenant or format; the answer stays the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from ctxreuse.block.format import BlockView, parse
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import ROOT
from ctxreuse.metrics import Metrics
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from support.examples import examples
from support.letters import Letters

BLOCK, VOCAB = 16, 256
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)


def context(seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, VOCAB, 6 * BLOCK + 5).astype("<i4")


def sealed(engine: TorchEngine, ids: Any) -> tuple[list[bytes], list[bytearray], list[tuple[int, bytearray]]]:
    """Keys, block bytes and (index, state bytes) of a context, as its runtime would store them."""
    runtime = Runtime(engine, None)
    keys = runtime.keys(ids)
    live = runtime.prefill(ids).context
    blocks = [bytearray(data.tobytes()) for data in engine.export(live, keys, ROOT, 0)]
    states = []
    for position in live.states:
        n = position // BLOCK
        parent = keys[n - 2] if n > 1 else ROOT
        states.append((n - 1, bytearray(engine.export_state(live, keys[n - 1], parent, position).tobytes())))
    return keys, blocks, states


def answer(engine: TorchEngine, store: BlockStore | None, ids: Any) -> Any:
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
    return runtime.prefill(ids)


def plane_bytes(view: BlockView) -> list[int]:
    """Offsets of all bytes of ``view`` that belong to a plane."""
    spans = [(view.offset(p.layer, p.role), p.nbytes) for p in view.layout.planes]
    return [at for start, n in spans for at in range(start, start + n)]


def fill(store: BlockStore, keys: list[bytes], blocks: list[bytearray], states: list[tuple[int, bytearray]]) -> None:
    for key, data in zip(keys, blocks):
        assert store.put(key, bytes(data))
    for index, data in states:
        assert store.put(keys[index], bytes(data), kind="state")
    store.flush()


@both
@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_in_any_plane(
    engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ids = context()
    keys, blocks, states = sealed(engine, ids)
    bad = data.draw(st.integers(0, len(blocks) - 1))
    target = blocks[bad]
    if states and data.draw(st.booleans()):
        target = states[0][1]
    at = data.draw(st.sampled_from(plane_bytes(parse(bytes(target)))))
    target[at] ^= 1 << data.draw(st.integers(0, 7))
    with BlockStore.open(tmp_path_factory.mktemp("store"), capacity=64 << 20) as store:
        fill(store, keys, blocks, states)
        done = answer(engine, store, ids)
        np.testing.assert_allclose(done.logits, engine.prefill(engine.new_context(), ids), atol=1e-5)
        store.flush()
        dropped = store.stats().dropped
        assert dropped.get("corrupt", 0) == 1, dropped
        if not engine.space.needs_state:
            assert done.usage.cached_tokens == bad * BLOCK


def reheader(data: bytearray, **changes: Any) -> bytes:
    """The block with other header fields and right checksums: what a foreign or lying writer would have stored."""
    view = parse(bytes(data))
    header = msgspec.msgpack.encode(msgspec.structs.replace(view.header, **changes))
    total = len(data)
    out = bytearray(data)
    length = struct.unpack_from("<I", data, 12)[0]
    assert len(header) == length, "the change must keep the header's length"
    struct.pack_into("<Q", out, 24, xxhash.xxh3_64_intdigest(header, total & 0xFFFFFFFF))
    out[32 : 32 + length] = header
    return bytes(out)


def versioned(data: bytearray, version: int) -> bytes:
    out = bytearray(data)
    struct.pack_into("<H", out, 8, version)
    return bytes(out)


@pytest.mark.parametrize("fault", ["space", "tokens", "key", "older", "newer", "truncated", "zeros", "empty"])
def test_a_foreign_block_under_a_right_key(llama: TorchEngine, tmp_path: Path, fault: str) -> None:
    """Whatever is filed under the third block's key, two blocks are reused and the rest is computed."""
    import lmdb

    ids = context()
    keys, blocks, states = sealed(llama, ids)
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        fill(store, keys, blocks, states)
    other = np.frombuffer(parse(bytes(blocks[2])).header.tokens, "<i4").copy()
    other[3] += 1
    data = {
        "space": lambda: reheader(blocks[2], space=bytes(range(32))),
        "tokens": lambda: reheader(blocks[2], tokens=other.tobytes()),
        "key": lambda: bytes(blocks[3]),
        "older": lambda: versioned(blocks[2], 0),
        "newer": lambda: versioned(blocks[2], 2),
        "truncated": lambda: bytes(blocks[2][: len(blocks[2]) // 2]),
        "zeros": lambda: bytes(len(blocks[2])),
        "empty": lambda: b"",
    }[fault]()
    # No writer of ours would store this, so it is written past the store.
    with lmdb.open(str(tmp_path / "blocks"), max_dbs=8, map_size=1 << 30) as env, env.begin(write=True) as txn:
        assert txn.put(keys[2], data, db=env.open_db(b"blocks", txn=txn))
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        done = answer(llama, store, ids)
        assert done.usage.cached_tokens == 2 * BLOCK
        assert done.usage.miss_reason not in ("", "absent")
        np.testing.assert_allclose(done.logits, llama.prefill(llama.new_context(), ids), atol=1e-5)
        assert sum(store.stats().misses.values()) == 1
        store.flush()
        assert store.match(keys).blocks == 2
        runtime = Runtime(llama, store, RuntimeOptions(context_cache_bytes=0))
        runtime.warm(ids)
        store.flush()
        assert answer(llama, store, ids).usage.cached_tokens == 6 * BLOCK


@both
def test_layers_of_another_shape_are_refused(engine: TorchEngine, tmp_path: Path) -> None:
    """A block that names our space but holds other planes (a lying peer) is dropped before the engine is touched."""
    ids = context()
    keys, blocks, states = sealed(engine, ids)
    layout = msgspec.msgpack.decode(parse(bytes(blocks[1])).header.planes)
    assert layout[0][3] != layout[0][3][::-1]
    layout[0][3] = layout[0][3][::-1]
    blocks[1] = bytearray(reheader(blocks[1], planes=msgspec.msgpack.encode(layout)))
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        fill(store, keys, blocks, states)
        done = answer(engine, store, ids)
        assert done.usage.cached_tokens == (0 if engine.space.needs_state else BLOCK)
        assert done.usage.miss_reason == "foreign"
        np.testing.assert_allclose(done.logits, engine.prefill(engine.new_context(), ids), atol=1e-5)


@both
@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3), seed=st.integers(0, 5))
@example(lengths=[40, 1, 33], seed=1)
def test_greedy_answers_are_token_identical(
    engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    """Turn after turn through the store: the tokens are those that an engine without a store generates."""

    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    with BlockStore.open(tmp_path_factory.mktemp("store"), capacity=64 << 20) as store:
        ids = context(seed)
        for turn, n in enumerate(lengths):
            ids = np.concatenate([ids, np.random.default_rng(turn).integers(3, VOCAB, n).astype("<i4")])
            metrics = Metrics()
            runtime = Runtime(engine, store, RuntimeOptions(text=Letters(), context_cache_bytes=0, metrics=metrics))
            with_store = runtime.complete(ids, greedy)
            with_store.drain()
            with_store.close()
            assert metrics.read("ctxreuse_requests_total", "length") == 1
            assert metrics.read("ctxreuse_completion_tokens_total") == 20
            sources = [metrics.read("ctxreuse_prompt_tokens_total", source) for source in ("disk", "compute")]
            assert sources == [with_store.usage.cached_tokens, len(ids) - with_store.usage.cached_tokens]
            nothing = runtime.complete(ids, SamplingParams(max_tokens=0))
            assert (nothing.drain(), nothing.tokens, nothing.finish) == ("", [], "length")
            without = Runtime(engine, None, RuntimeOptions(text=Letters(), context_cache_bytes=0)).complete(ids, greedy)
            without.drain()
            assert with_store.tokens == without.tokens
            assert len(with_store.tokens) == 20
            ids = np.concatenate([ids, np.asarray(with_store.tokens, "<i4")])
            store.flush()
            if turn:
                assert with_store.usage.cached_tokens > 0
