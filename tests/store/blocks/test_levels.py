"""Blocks at rest: kept at the level that was configured, encoded smaller when room is short, and only as allowed."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT, PACKED, family
from ctxreuse.codec import Codec, profile_digest, write_profile
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.store.lmdb.records import Record, footprint
from ctxreuse.testing.profiles import plain_profile
from ctxreuse.testing.store_levels import SPACE, CodedContext, codec
from support.waiting import patient

BLOCK = footprint(CodedContext(1).block(0).nbytes)


def opened(folder: Path, capacity: int = 64 * BLOCK, **options: object) -> BlockStore:
    store = BlockStore.open(folder, capacity=capacity, **options)  # type: ignore[arg-type]
    store.register_codec(codec())
    return store


def kept(store: BlockStore) -> Counter[str]:
    return Counter(family(entry.level) for entry in store.walk())


def intact(store: BlockStore, context: CodedContext, max_kl: float | None = None) -> int:
    """How many leading blocks can be read, each of them what was put as far as its level promises."""
    with store.read(max_kl) as reader:
        for i in range(len(context)):
            view = context.get(reader, i)
            if view is None:
                return i
            raw = parse(codec().decode(view))
            for role in "kv":
                real = parse(context.block(i)).array(0, role)
                assert np.abs(raw.array(0, role) - real).max() <= {EXACT: 0.0}.get(raw.header.level, 0.5)
    return len(context)


def put(store: BlockStore, context: CodedContext, max_kl: float | None = None) -> None:
    for i in range(len(context)):
        assert store.put(context.keys[i], context.block(i), max_kl=max_kl)
    store.flush(60)


def test_blocks_are_kept_at_the_level_that_is_configured(tmp_path: Path) -> None:
    one, two = CodedContext(4), CodedContext(4, seed=1)
    for level, with_permission, without in (
        (EXACT, EXACT, EXACT),
        (PACKED, PACKED, PACKED),
        ("kl-0.05", "kl-0.05", PACKED),
        ("kl-0.01", "kl-0.01", PACKED),
        ("kl-0.2", PACKED, PACKED),  # of which no card knows
    ):
        with opened(tmp_path / level, level=level) as store:
            put(store, one, max_kl=0.05)
            put(store, two)
            assert kept(store) == Counter([with_permission] * 4) + Counter([without] * 4)
            assert intact(store, two) == intact(store, one, 0.05) == 4
            assert intact(store, one) == (4 if with_permission in (EXACT, PACKED) else 0)
            # What is held at that level already is not encoded again.
            before = store.stats()
            put(store, one, max_kl=0.05)
            assert (store.stats().puts, store.stats().duplicates) == (before.puts, before.duplicates + 4)
            store.check()
        with BlockStore.open(tmp_path / level) as again:
            assert kept(again) == Counter([with_permission] * 4) + Counter([without] * 4)
            again.check()


def test_unknown_text_is_kept_at_the_next_stricter_level(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(codec().profile, seen=bytes(8), unseen=0.5)
    strange = Codec(SPACE, (profile_digest(write_profile(profile)).hex(), profile))
    with BlockStore.open(tmp_path, capacity=64 * BLOCK, level="kl-0.05") as store:
        store.register_codec(strange)
        put(store, CodedContext(3), max_kl=0.05)
        assert kept(store) == {"kl-0.01": 3}
        put(store, CodedContext(3), max_kl=0.05)
        assert store.stats().duplicates == 3
        store.check()


def test_a_session_that_allows_less_has_it_kept_better(tmp_path: Path) -> None:
    context = CodedContext(3)
    with opened(tmp_path, level="kl-0.05") as store:
        put(store, context, max_kl=0.05)
        put(store, context, max_kl=0.01)  # better than kl-0.05: written anew
        assert kept(store) == {PACKED: 3}
        put(store, context)
        assert kept(store) == {PACKED: 3}


def test_without_a_coder_blocks_stay_as_they_came(tmp_path: Path) -> None:
    context = CodedContext(3)
    with BlockStore.open(tmp_path, level="kl-0.05", capacity=2 * BLOCK) as store:
        put(store, context, max_kl=0.05)
        assert kept(store) == {EXACT: 2}
        assert not store.stats().recompressed


def test_an_unknown_level_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    for level in ("q8", "approx", "kl-0.05@" + "0" * 16, "kl-0.05>kl-0.01"):
        with pytest.raises(ConfigError, match="no such level"):
            BlockStore.open(tmp_path / "none", level=level)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("max_kl", [None, 0.05])
def test_a_third_of_the_room_keeps_more_than_a_third(tmp_path: Path, max_kl: float | None) -> None:
    contexts = [CodedContext(6, seed=seed) for seed in range(10)]
    room = 60 * BLOCK // 3
    held = {}
    for demote in (False, True):
        with opened(tmp_path / str(demote), capacity=room, recompress=demote) as store:
            for context in contexts:
                put(store, context, max_kl)
                assert store.stats().nbytes <= room
            store.check()
            held[demote] = store.stats().tokens
            assert bool(store.stats().recompressed) is demote
            found = [intact(store, context, max_kl) for context in contexts]
            assert sum(found) * SPACE.block_tokens == held[demote]
            if max_kl is None:
                assert set(kept(store)) <= {EXACT, PACKED}
    assert held[False] == 20 * SPACE.block_tokens
    # Packed blocks of random numbers take 9 pages of 10; lossily coded ones 1 of 5 or less.
    assert held[True] > held[False] * (1 if max_kl is None else 2)


def test_of_levels_that_promise_the_same_the_smallest_is_taken(tmp_path: Path) -> None:
    contexts = [CodedContext(6, seed=seed) for seed in range(10)]
    profile = plain_profile(SPACE, [parse(contexts[0].block(i)) for i in range(2)], joint=True)
    joint = Codec(SPACE, (profile_digest(write_profile(profile)).hex(), profile))
    with BlockStore.open(tmp_path, capacity=20 * BLOCK) as store:
        store.register_codec(joint)
        for context in contexts:
            put(store, context, max_kl=0.05)
        assert kept(store)["kl-0.05-joint"] > 6
        assert kept(store)["kl-0.05"] == 0
        with store.read(0.05) as reader:
            for context in contexts:
                for i in range(len(context)):
                    view = context.get(reader, i)
                    if view is not None and family(view.header.level) == "kl-0.05-joint":
                        near = parse(joint.decode(view)).array(0, "v")
                        assert np.abs(near - parse(context.block(i)).array(0, "v")).max() < 2
        store.check()


def test_the_newest_stay_exact(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=16 * BLOCK) as store:
        contexts = [CodedContext(4, seed=seed) for seed in range(8)]
        for context in contexts:
            put(store, context, 0.05)
        levels = {entry.key: family(entry.level) for entry in store.walk()}
        assert all(levels[key] in (EXACT, PACKED) for key in contexts[-1].keys[:3])
        assert levels[contexts[0].keys[-1]] == "kl-0.05"
        store.check()


def test_a_reader_that_wants_it_exact_keeps_it_so(tmp_path: Path) -> None:
    wanted = CodedContext(4)
    with opened(tmp_path, capacity=16 * BLOCK) as store:
        put(store, wanted, 0.05)
        assert intact(store, wanted) == 4
        for seed in range(1, 6):
            put(store, CodedContext(4, seed=seed), 0.05)
            assert intact(store, wanted) == 4
        assert store.stats().recompressed
        store.check()
    with BlockStore.open(tmp_path, capacity=16 * BLOCK) as store:
        for entry in store.walk():
            if entry.key in wanted.keys:
                assert family(entry.level) in (EXACT, PACKED)
        store.check()


def test_pinned_blocks_are_left_alone(tmp_path: Path) -> None:
    pinned = CodedContext(4)
    with opened(tmp_path, capacity=12 * BLOCK) as store:
        put(store, pinned, 0.05)
        assert store.pin(pinned.keys) == 4
        for seed in range(1, 6):
            put(store, CodedContext(4, seed=seed), 0.05)
        assert [family(entry.level) for entry in store.entries(pinned.keys) if entry] == [EXACT] * 4
        store.check()


def test_states_shrink_too(tmp_path: Path) -> None:
    contexts = [CodedContext(2, seed=seed) for seed in range(6)]
    with opened(tmp_path, capacity=10 * BLOCK) as store:
        for context in contexts:
            put(store, context, 0.05)
            store.put(context.keys[1], context.state(1), kind="state", max_kl=0.05)
            store.flush()
        entries = [entry for entry in store.walk() if entry.has_state]
        assert "kl-0.05" in {family(entry.state_level) for entry in entries}
        with store.read(0.05) as reader:
            for context in contexts:
                view = reader.state(context.keys[1], context.run(1), context.space)
                if view is not None:
                    raw = parse(codec().decode(view))
                    assert np.abs(raw.array(0, "k") - parse(context.state(1)).array(0, "k")).max() <= 0.5
        store.check()


def test_a_coder_that_fails_costs_room_and_nothing_else(tmp_path: Path) -> None:
    class Failing:
        space, levels, level_for = SPACE, codec().levels, codec().level_for

        def nbytes(self, level: str) -> int:
            return codec().nbytes(level)

        def encode(self, view: object, level: str) -> np.ndarray:
            raise FormatError("no")

        decode = encode  # type: ignore[assignment]

    with BlockStore.open(tmp_path, capacity=6 * BLOCK, level="kl-0.05") as store:
        store.register_codec(Failing())  # type: ignore[arg-type]
        for seed in range(3):
            put(store, CodedContext(4, seed=seed), 0.05)
        assert kept(store) == {EXACT: 6}
        assert not store.stats().recompressed
        store.check()
        store.register_codec(codec())  # a better one is tried again
        put(store, CodedContext(4, seed=9), 0.05)
        assert store.stats().recompressed
        store.check()


def test_encoding_stands_in_nobodys_way(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow:
        space, levels, nbytes, decode = SPACE, codec().levels, codec().nbytes, codec().decode
        level_for = codec().level_for

        def encode(self, view: object, level: str) -> np.ndarray:
            begun.set()
            assert go.wait(patient(30))
            return codec().encode(view, level)  # type: ignore[arg-type]

    context = CodedContext(4)
    disk = BlockStore.open(tmp_path, capacity=64 * BLOCK, level="kl-0.05")
    with TieredStore(1 << 20, disk) as store:
        store.register_codec(Slow())  # type: ignore[arg-type]
        assert store.put(context.keys[0], context.block(0), max_kl=0.05)
        assert begun.wait(patient(30))
        for i in range(1, 4):  # accepted and read while the encoder is at work
            assert store.put(context.keys[i], context.block(i), max_kl=0.05)
        assert store.match(context.keys).blocks == 4
        with store.read() as reader:
            assert all(context.get(reader, i) is not None for i in range(4))
            assert reader.served == {"host": 4 * SPACE.block_tokens}
        go.set()
        store.flush(60)
        assert store.match(context.keys).blocks == 0
        assert store.match(context.keys, 0.05).blocks == 4
        store.check()


def test_a_store_of_before_levels_is_read(tmp_path: Path) -> None:
    context = CodedContext(3)
    with opened(tmp_path) as store:
        put(store, context)
        env = store._env
        env.write(lambda txn: txn.put(b"format", msgspec.msgpack.encode(1), db=env.tables["info"]))
    for _ in range(2):
        with opened(tmp_path) as store:
            assert store.stats().recovered == ""
            assert intact(store, context) == 3


def test_records_of_before_levels_are_exact() -> None:
    old = Record(bytes(range(32)), 4, 8, 4096, 0, 7)
    assert len(old.pack()) == 68
    assert Record.unpack(old.pack()) == old
    new = old._replace(level="kl-0.01@" + "0" * 16, state_level=PACKED, max_kl=0.05)
    assert Record.unpack(new.pack()) == new
    for raw in (old.pack() + b"x", old.pack() + b"a\nb", new.pack() + b"x" * 200, old.pack() + b"\xff\n\n"):
        with pytest.raises(ValueError, match=r"unpack|ascii|record of"):
            Record.unpack(raw)


def test_a_block_that_is_encoded_keeps_its_giver(tmp_path: Path) -> None:
    context = CodedContext(3)
    with opened(tmp_path, level=PACKED) as store:
        for i in range(3):
            assert store.put(context.keys[i], context.block(i), giver=b"somebody")
        store.flush(20)
        assert kept(store) == {PACKED: 3}
    with opened(tmp_path) as store:
        assert store.givers() == dict.fromkeys(context.keys, b"somebody")
