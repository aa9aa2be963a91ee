"""Fetching at levels: never more damage than was allowed, never wrong numbers, and less to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from benchmarks.nearby import Held, NearbyRemote, constant
from ctxreuse.block.format import BlockView, parse, rekey, reseal
from ctxreuse.codec import Codec, profile_digest, read_profile, write_profile
from ctxreuse.cost import CostModel
from ctxreuse.store import TieredStore
from ctxreuse.testing.profiles import LEVELS, plain_profile
from support.fetch_scene import BLOCK, Scene, right, tokens
from support.tiny_models import engine_of

IDS = tokens(10 * BLOCK + 5)
FINE = "kl-0.008"


@pytest.fixture(scope="module")
def engine() -> Any:
    """A Llama whose codec has a card."""
    made = engine_of("llama")
    views = [parse(data) for data in Held(made, tokens(40 * BLOCK)[: 20 * BLOCK]).blocks]
    data = write_profile(plain_profile(made.space, views, theta=lambda _: 10000.0))
    made.codec = Codec(made.space, (profile_digest(data).hex(), read_profile(data)))
    return made


def scene(engine: Any, *, level: str = "", bandwidth: float = 1e9, way: str | None = None, **options: Any) -> Any:
    made = Scene(engine, IDS[: 10 * BLOCK], constant(bandwidth, 0.001), way=way, offered=bandwidth)
    made.remote.codec, made.remote.level = engine.codec, level
    return made


def near(engine: Any, done: Any) -> float:
    """How far the logits are from the exact ones, as a share of these."""
    exact = engine.prefill(engine.new_context(), IDS)
    return float(np.abs(done.logits - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("way", ["layers", "tail"])
@pytest.mark.parametrize("level", ["exact+rans", *LEVELS])
def test_a_context_comes_at_an_allowed_level(engine: Any, way: str, level: str) -> None:
    made = scene(engine, level=level, way=way)
    done = made.runtime().prefill(made.runtime().request(IDS, max_kl=0.05))
    assert done.usage.tokens.by_source == {"cloud": 10 * BLOCK}
    assert done.usage.tokens.by_level == {level: 10 * BLOCK}
    assert done.usage.approximate == (level != "exact+rans")
    ask = made.remote.asks[0]
    card = engine.codec.digest[:16]
    assert set(ask.levels) == {"exact+rans", *(f"{name}@{card}" for name in LEVELS)}
    assert near(engine, done) < (1e-4 if level == "exact+rans" else 0.2)
    assert (near(engine, done) > 0) or level == "exact+rans"


def test_a_request_that_allows_nothing_lossy_asks_for_nothing_lossy(engine: Any) -> None:
    made = scene(engine, level="exact+rans")
    done = made.runtime().prefill(IDS)
    assert [ask.levels for ask in made.remote.asks] == [("exact+rans",)]
    assert not done.usage.approximate
    right(engine, done, IDS)


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_what_came_encoded_is_kept_as_it_came(engine: Any, way: str) -> None:
    made = scene(engine, level="kl-0.05", way=way)
    with TieredStore(64 << 20) as store:
        runtime = made.runtime(store)
        runtime.warm(runtime.request(IDS, max_kl=0.05))
        store.flush()
        levels = [entry.level.partition("@")[0] for entry in store.entries(runtime.keys(IDS)) if entry is not None]
        assert levels == ["kl-0.05"] * 10
        runtime.connect(None)
        runtime.context_cache.clear()
        done = runtime.prefill(runtime.request(IDS, max_kl=0.05))
        assert done.usage.tokens.by_level == {"kl-0.05": 10 * BLOCK}
        assert near(engine, done) < 0.2
        runtime.context_cache.clear()
        right(engine, runtime.prefill(IDS), IDS)


def test_only_levels_without_more_damage_are_allowed(engine: Any) -> None:
    made = scene(engine, level="kl-0.01")
    made.runtime().prefill(made.runtime().request(IDS, max_kl=0.01))
    names = {level.partition("@")[0] for level in made.remote.asks[0].levels}
    assert names == {"exact+rans", "kl-0.01", "kl-0.008"}


def spoiled(remote: NearbyRemote, engine: Any, change: Any) -> None:
    """Have the peer send its blocks at kl-0.05 with the planes of one changed, under checksums that are right."""
    encode = engine.codec.encode

    def lie(view: BlockView, level: str) -> Any:
        data = encode(view, level).copy()
        return change(data, parse(data))

    remote.codec = SimpleNamespace(encode=lie, levels=engine.codec.levels, digest=engine.codec.digest)  # type: ignore


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_a_damaged_stream_is_recomputed(engine: Any, way: str) -> None:
    made = scene(engine, level="kl-0.05", way=way)

    def flip(data: Any, view: BlockView) -> Any:
        data[view.offset(1, "v") + 30] ^= 0x10
        return data

    spoiled(made.remote, engine, flip)
    done = made.runtime().prefill(made.runtime().request(IDS, max_kl=0.05))
    right(engine, done, IDS)
    assert not done.usage.approximate
    assert made.remote.rejected == ["corrupt"]


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_a_stream_that_lies_under_a_right_checksum_is_recomputed(engine: Any, way: str) -> None:
    made = scene(engine, level="kl-0.05", way=way)

    def lie(data: Any, view: BlockView) -> Any:
        at = view.offset(1, "v")
        data[at + 24 : at + 40] = 255  # the first cell says that it has other bytes than it has
        i = view.layout.index[1, "v"]
        sums = np.frombuffer(view.header.checksums, "<u8").copy()
        sums[i] = xxhash.xxh3_64_intdigest(data[at : at + view.layout.planes[i].nbytes].data)
        start = bytes(data).index(view.header.checksums)
        data[start : start + sums.nbytes] = np.frombuffer(sums.tobytes(), np.uint8)
        head = int.from_bytes(bytes(data[12:16]), "little")
        check = xxhash.xxh3_64_intdigest(bytes(data[32 : 32 + head]), data.nbytes & 0xFFFFFFFF)
        data[24:32] = np.frombuffer(check.to_bytes(8, "little"), np.uint8)
        assert rekey(data, view.header.key, view.header.parent).nbytes == data.nbytes
        return data

    spoiled(made.remote, engine, lie)
    done = made.runtime().prefill(made.runtime().request(IDS, max_kl=0.05))
    right(engine, done, IDS)
    assert made.remote.rejected == ["corrupt"]


def test_the_wrong_models_numbers_fail_the_audit_at_a_lossy_level_too(engine: Any) -> None:
    made = scene(engine, level="kl-0.05", way="tail")
    other = Held(engine, tokens(10 * BLOCK, seed=9))
    mine = made.remote.held.blocks

    def swap(data: Any, view: BlockView) -> Any:
        """The right head over planes of another context."""
        number = view.header.end // BLOCK - 1
        foreign = parse(engine.codec.encode(parse(other.blocks[number]), "kl-0.05"))
        planes = {(plane.layer, plane.role): foreign.plane(plane.layer, plane.role) for plane in foreign.layout.planes}
        return reseal(view, planes, layout=foreign.layout)

    assert len(mine) == len(other.blocks)
    spoiled(made.remote, engine, swap)
    done = made.runtime().prefill(made.runtime().request(IDS, max_kl=0.05))
    right(engine, done, IDS)
    assert made.remote.rejected == ["audit"]


def test_a_slow_link_makes_the_difference_and_teaches_what_decoding_takes(engine: Any) -> None:
    """At 30 kB/s exact blocks are slower than computing; coded ones are not."""
    plain = scene(engine, bandwidth=2e5)
    exact, long = plain.prefill(IDS)
    made = scene(engine, level="kl-0.05", bandwidth=2e5)
    at = made.clock.monotonic()
    done = made.runtime().prefill(made.runtime().request(IDS, max_kl=0.05))
    seconds = made.clock.monotonic() - at
    assert seconds < 0.8 * long
    assert done.usage.tokens.by_level.get("kl-0.05", 0) > exact.usage.tokens.by_source.get("cloud", 0)


def test_what_decoding_takes_outlives_the_process() -> None:
    cost = CostModel()
    assert not cost.unpack.knows("kl-0.05@0123456789abcdef")
    cost.unpack.observe("kl-0.05@0123456789abcdef", 1_000_000, 0.01)
    cost.unpack.observe("kl-0.05", 2_000_000, 0.02)
    again = CostModel()
    assert again.restore(cost.dump())
    assert again.unpack.seconds("kl-0.05@fedcba9876543210", 4_000_000) == pytest.approx(0.04, rel=0.05)
    assert again.unpack.seconds("kl-0.01", 4_000_000) == pytest.approx(0.04, rel=0.05)
