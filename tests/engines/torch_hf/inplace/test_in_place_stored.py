"""Runs attended to as a store keeps them: in its memory map, and in the code of lossy and packed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import BlockView, parse
from ctxreuse.codec import Codec
from ctxreuse.engines.chunks import BlockRows, RelocationError
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse.inplace import AttachedRun, CodedSlab, PinnedRun, Slab
from ctxreuse.store import open_store
from ctxreuse.testing.engine import continuation, random_tokens, seal
from ctxreuse.testing.engine.chunk_contexts import relocations_of
from ctxreuse.testing.engine.in_place import rows_of
from ctxreuse.testing.profiles import plain_codec

LEVEL = "approx~kl-0.05"
HEAD, FIRST, COUNT = 5, 3, 64


@pytest.fixture(scope="module")
def llama(engine_of: Callable[..., TorchEngine]) -> TorchEngine:
    return engine_of("llama")


@pytest.fixture(scope="module")
def ids(llama: TorchEngine) -> Tokens:
    return random_tokens(llama, 80)


@pytest.fixture(scope="module")
def blocks(llama: TorchEngine, ids: Tokens) -> list[BlockView]:
    return [parse(data) for data in seal(llama, ids).blocks]


@pytest.fixture(scope="module")
def codec(llama: TorchEngine, blocks: list[BlockView], tmp_path_factory: pytest.TempPathFactory) -> Codec:
    llama.codec = plain_codec(llama.space, blocks, tmp_path_factory.mktemp("cards"))
    return llama.codec


def answered(engine: TorchEngine, pinned: PinnedRun) -> list[Any]:
    """Logits of an answer over an attached run behind some computed tokens."""
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, HEAD, seed=1))
    engine.chunks.attach(context, pinned.tokens, [AttachedRun(HEAD, pinned, 0, len(pinned))], LEVEL)
    said = continuation(engine, context, engine.prefill(context, random_tokens(engine, 6, seed=2)), 4)
    context.check()
    return said


def copied(engine: TorchEngine, ids: Tokens, blocks: list[BlockView]) -> list[Any]:
    """The same over rows that were copied, and decoded once."""
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, HEAD, seed=1))
    engine.chunks.insert_rows(
        context, ids[FIRST : FIRST + COUNT], list(relocations_of(blocks, FIRST, COUNT, HEAD)), LEVEL
    )
    return continuation(engine, context, engine.prefill(context, random_tokens(engine, 6, seed=2)), 4)


def close(a: list[Any], b: list[Any]) -> bool:
    return all(np.abs(x - y).max() <= 1e-5 * np.abs(y).max() for x, y in zip(a, b, strict=True))


def of_level(codec: Codec, blocks: list[BlockView], level: str) -> list[BlockView]:
    return [parse(codec.encode(block, level)) for block in blocks]


@pytest.mark.parametrize("level", ["exact+rans", "kl-0.05"])
def test_coded_blocks_stay_in_their_code(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], codec: Codec, level: str
) -> None:
    coded = of_level(codec, blocks, level)
    pinned = llama.chunks.pin_run(rows_of(coded, FIRST, COUNT), "stored")
    assert close(answered(llama, pinned), copied(llama, ids, coded))
    raw = llama.chunks.pin_run(rows_of(blocks, FIRST, COUNT), "stored")
    assert pinned.nbytes < (0.95 if level == "exact+rans" else 0.5) * raw.nbytes
    # All in one slab, so that one call decodes a layer; and nothing that was decoded is kept.
    for (slab,) in pinned.layers.values():
        assert isinstance(slab, CodedSlab)
        assert (slab.first, slab.rows) == (FIRST, COUNT)
        assert slab.k.data is not slab.k.data


def test_coded_and_raw_blocks_in_one_run(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], codec: Codec
) -> None:
    mixed = [*of_level(codec, blocks[:2], "kl-0.05"), blocks[2], *of_level(codec, blocks[3:], "exact+rans")]
    pinned = llama.chunks.pin_run(rows_of(mixed, FIRST, COUNT), "stored")
    assert [type(slab) for slab in pinned.layers[0]] == [CodedSlab, Slab, CodedSlab]
    assert close(answered(llama, pinned), copied(llama, ids, mixed))
    assert (
        close(answered(llama, llama.chunks.pin_run(rows_of(mixed, FIRST, COUNT), "int8")), answered(llama, pinned))
        is False
    )


def test_pieces_of_one_coded_block(llama: TorchEngine, blocks: list[BlockView], codec: Codec) -> None:
    coded = of_level(codec, blocks, "kl-0.05")
    size = llama.space.block_tokens
    whole = llama.chunks.pin_run(rows_of(coded, 0, 2 * size), "stored")
    cut = [BlockRows(coded[0], 0, 5), BlockRows(coded[0], 5, size - 5), BlockRows(coded[1], 0, size)]
    pieces = llama.chunks.pin_run(cut, "stored")
    assert [(slab.first, slab.rows) for slab in pieces.layers[0]] == [(0, 5), (5, 2 * size - 5)]
    assert close(answered(llama, pieces), answered(llama, whole))


def test_damaged_code_is_found_before_it_is_shown(llama: TorchEngine, blocks: list[BlockView], codec: Codec) -> None:
    coded = of_level(codec, blocks, "kl-0.05")
    data = bytearray(coded[2].buffer)
    data[coded[2].offset(1, "v") + 40] ^= 1
    coded[2] = parse(data)
    with pytest.raises(RelocationError) as error:
        llama.chunks.pin_run(rows_of(coded, FIRST, COUNT), "stored")
    assert error.value.index == 2


def test_a_store_is_read_where_it_is_mapped(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], tmp_path: Path
) -> None:
    sealed = seal(llama, ids)
    with open_store(tmp_path / "kv", capacity=1 << 26) as store:
        for key, data in zip(sealed.keys, sealed.blocks):
            assert store.put(key, data)
        store.flush()
    with open_store(tmp_path / "kv", capacity=1 << 26) as store, store.read() as reader:
        views = [reader.block(key, ids[at * 16 : at * 16 + 16], llama.space.digest)
                 for at, key in enumerate(sealed.keys)]  # fmt: skip
        pinned = llama.chunks.pin_run(rows_of(views, FIRST, COUNT), "stored")
        assert _mapped(pinned, tmp_path)
        assert close(answered(llama, pinned), copied(llama, ids, blocks))
        del views, pinned


def test_blocks_that_leave_the_store_are_still_read_where_they_are_attended_to(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], tmp_path: Path
) -> None:
    """Pages of the map are not used again while a reader is open, whatever is evicted, put and flushed meanwhile."""
    sealed, others = seal(llama, ids), seal(llama, random_tokens(llama, 80, seed=7))
    size = max(len(data) for data in sealed.blocks)
    with open_store(tmp_path / "kv", capacity=len(ids) // 16 * 2 * size) as store:
        for key, data in zip(sealed.keys, sealed.blocks):
            assert store.put(key, data)
        store.flush()
        with store.read() as reader:
            views = [reader.block(key, ids[at * 16 : at * 16 + 16], llama.space.digest)
                     for at, key in enumerate(sealed.keys)]  # fmt: skip
            pinned = llama.chunks.pin_run(rows_of(views, FIRST, COUNT), "stored")
            store.drop(sealed.keys[0], "refused")
            for key, data in zip(others.keys, others.blocks):
                assert store.put(key, data)
            store.flush()
            assert store.stats().blocks == len(others.keys)
            assert close(answered(llama, pinned), copied(llama, ids, blocks))
            del views, pinned


def test_runs_of_an_old_profile_are_read_by_it_after_a_new_one_came(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], codec: Codec, tmp_path: Path
) -> None:
    coded = of_level(codec, blocks, "kl-0.05")
    wanted = copied(llama, ids, coded)
    pinned = llama.chunks.pin_run(rows_of(coded, FIRST, COUNT), "stored")
    try:
        others = [parse(data) for data in seal(llama, random_tokens(llama, 80, seed=7)).blocks]
        llama.codec = plain_codec(llama.space, others, tmp_path)
        assert close(answered(llama, pinned), wanted)
    finally:
        llama.codec = codec


def _mapped(pinned: PinnedRun, folder: Path) -> bool:
    """True if all of its planes lie in maps of files in the folder."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, name = line.split()
        if name.startswith(str(folder)):
            maps.append([int(end, 16) for end in where.split("-")])
    planes = [plane for slabs in pinned.layers.values() for slab in slabs for plane in (slab.k, slab.v)]
    places = [plane.data.__array_interface__["data"][0] for plane in planes]
    return bool(maps) and all(any(low <= at < high for low, high in maps) for at in places)
