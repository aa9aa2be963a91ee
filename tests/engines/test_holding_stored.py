"""Runs attended to as a store keeps them: in its memory map, and in the code of lossy and packed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.block import BlockView, parse
from ctxreuse.codec import Codec
from ctxreuse.engines.moving import MoveError, Rows
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.keys import Tokens
from ctxreuse.reuse.attend import Coded, Held, HeldMove, Slab
from ctxreuse.store import open_store
from ctxreuse.testing.engine import continuation, random_tokens, seal
from ctxreuse.testing.engine_holding import rows_of
from ctxreuse.testing.moving import moves_of
from ctxreuse.testing.plain_card import shelved

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
    llama.codec = shelved(llama.space, blocks, tmp_path_factory.mktemp("cards"))
    return llama.codec


def answered(engine: TorchEngine, held: Held) -> list[Any]:
    """Logits of an answer over a held run behind some computed tokens."""
    live = engine.start()
    engine.prefill(live, random_tokens(engine, HEAD, seed=1))
    engine.show(live, held.tokens, [HeldMove(HEAD, held, 0, len(held))], LEVEL)
    said = continuation(engine, live, engine.prefill(live, random_tokens(engine, 6, seed=2)), 4)
    live.check()
    return said


def copied(engine: TorchEngine, ids: Tokens, blocks: list[BlockView]) -> list[Any]:
    """The same over rows that were copied, and decoded once."""
    live = engine.start()
    engine.prefill(live, random_tokens(engine, HEAD, seed=1))
    engine.place(live, ids[FIRST : FIRST + COUNT], list(moves_of(blocks, FIRST, COUNT, HEAD)), LEVEL)
    return continuation(engine, live, engine.prefill(live, random_tokens(engine, 6, seed=2)), 4)


def close(a: list[Any], b: list[Any]) -> bool:
    return all(np.abs(x - y).max() <= 1e-5 * np.abs(y).max() for x, y in zip(a, b, strict=True))


def of_level(codec: Codec, blocks: list[BlockView], level: str) -> list[BlockView]:
    return [parse(codec.encode(block, level)) for block in blocks]


@pytest.mark.parametrize("level", ["exact+rans", "kl-0.05"])
def test_coded_blocks_stay_in_their_code(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], codec: Codec, level: str
) -> None:
    coded = of_level(codec, blocks, level)
    held = llama.hold(rows_of(coded, FIRST, COUNT), "stored")
    assert close(answered(llama, held), copied(llama, ids, coded))
    raw = llama.hold(rows_of(blocks, FIRST, COUNT), "stored")
    assert held.nbytes < (0.95 if level == "exact+rans" else 0.5) * raw.nbytes
    # All in one slab, so that one call decodes a layer; and nothing that was decoded is kept.
    for (slab,) in held.layers.values():
        assert isinstance(slab, Coded)
        assert (slab.first, slab.rows) == (FIRST, COUNT)
        assert slab.k.data is not slab.k.data


def test_coded_and_raw_blocks_in_one_run(
    llama: TorchEngine, ids: Tokens, blocks: list[BlockView], codec: Codec
) -> None:
    mixed = [*of_level(codec, blocks[:2], "kl-0.05"), blocks[2], *of_level(codec, blocks[3:], "exact+rans")]
    held = llama.hold(rows_of(mixed, FIRST, COUNT), "stored")
    assert [type(slab) for slab in held.layers[0]] == [Coded, Slab, Coded]
    assert close(answered(llama, held), copied(llama, ids, mixed))
    assert close(answered(llama, llama.hold(rows_of(mixed, FIRST, COUNT), "int8")), answered(llama, held)) is False


def test_pieces_of_one_coded_block(llama: TorchEngine, blocks: list[BlockView], codec: Codec) -> None:
    coded = of_level(codec, blocks, "kl-0.05")
    size = llama.space.block_tokens
    whole = llama.hold(rows_of(coded, 0, 2 * size), "stored")
    cut = [Rows(coded[0], 0, 5), Rows(coded[0], 5, size - 5), Rows(coded[1], 0, size)]
    pieces = llama.hold(cut, "stored")
    assert [(slab.first, slab.rows) for slab in pieces.layers[0]] == [(0, 5), (5, 2 * size - 5)]
    assert close(answered(llama, pieces), answered(llama, whole))


def test_damaged_code_is_found_before_it_is_shown(llama: TorchEngine, blocks: list[BlockView], codec: Codec) -> None:
    coded = of_level(codec, blocks, "kl-0.05")
    data = bytearray(coded[2].buffer)
    data[coded[2].offset(1, "v") + 40] ^= 1
    coded[2] = parse(data)
    with pytest.raises(MoveError) as error:
        llama.hold(rows_of(coded, FIRST, COUNT), "stored")
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
        held = llama.hold(rows_of(views, FIRST, COUNT), "stored")
        assert _mapped(held, tmp_path)
        assert close(answered(llama, held), copied(llama, ids, blocks))
        del views, held


def _mapped(held: Held, folder: Path) -> bool:
    """True if all of its planes lie in maps of files in the folder."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, name = line.split()
        if name.startswith(str(folder)):
            maps.append([int(end, 16) for end in where.split("-")])
    planes = [plane for slabs in held.layers.values() for slab in slabs for plane in (slab.k, slab.v)]
    places = [plane.data.__array_interface__["data"][0] for plane in planes]
    return bool(maps) and all(any(low <= at < high for low, high in maps) for at in places)
