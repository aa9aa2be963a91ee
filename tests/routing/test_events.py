"""KV events of engines: read in every form, kept exactly; what is lost, late or hostile never claims too much."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ctxreuse.errors import FormatError
from ctxreuse.routing import EventFeed, PromptTokens, Reported, ReportedBlocks
from ctxreuse.routing.events import BlocksRemoved, BlocksStored, Cleared, parse_batch
from support.examples import examples

SIZE = 4
pack = msgspec.msgpack.encode


def prompt(*tokens: int, model: str = "", salt: str = "") -> PromptTokens:
    return PromptTokens.of(tokens, model, salt)


def stored(
    names: list[bytes | int], tokens: list[int], parent: bytes | int | None = None, **others: Any
) -> dict[str, Any]:
    """An event as vLLM has it."""
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": len(tokens) // len(names), "lora_id": None, "medium": "GPU", "lora_name": None, **others,
    }  # fmt: skip


def batch(*events: Any, time: float = 1.0, more: tuple[Any, ...] = (0,)) -> bytes:
    return pack([time, list(events), *more])


def taken(*events: Any) -> ReportedBlocks:
    blocks = ReportedBlocks()
    for event in parse_batch(batch(*events)).events:
        blocks.apply(event)
    blocks.check()
    return blocks


def test_both_forms_of_events_are_the_same() -> None:
    as_map = stored([b"one", b"two"], [1, 2, 3, 4], None, session_id="new", locality="LOCAL")
    as_list = ["BlockStored", [b"one", b"two"], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, None, "new"]
    assert parse_batch(batch(as_map)) == parse_batch(batch(as_list, more=()))
    assert parse_batch(batch(["BlockRemoved", [-7, 8]], ["AllBlocksCleared"], {"type": "AllBlocksCleared"})).events == [
        BlocksRemoved((b"-7", b"8"), "GPU/0"),
        Cleared(),
        Cleared(),
    ]
    short = parse_batch(batch(["BlockStored", [5], None, [1, 2], 2, None])).events[0]
    assert isinstance(short, BlocksStored)
    assert short.ids == (b"5",)


def test_what_is_not_known_is_passed_over() -> None:
    odd = [{"type": "BlockWarmed", "block_hashes": [1]}, ["BlockWarmed", 7], stored([1], [1, 2], None, kind={"a": [1]})]
    assert len(parse_batch(batch(*odd, more=(0, "new", {}))).events) == 1
    assert parse_batch(batch(stored([1], [1, 2], kv_cache_spec_kind="sliding_window"))).events == []
    assert len(parse_batch(batch(stored([1], [1, 2], kv_cache_spec_kind="full_attention"))).events) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91\x01",
        pack([1.0, 7]),
        batch(stored([1, 2], [1, 2, 3])),
        batch(stored([1], [-1, 2])),
        batch(stored([1], [1 << 40, 2])),
        batch(stored([1], [1, 2], extra_keys=[None, None])),
        batch({"type": "BlockRemoved", "block_hashes": 3}),
        batch(["BlockStored"]),
        batch(stored([1], [1, 2], block_size=0)),
        b"\x00" * ((8 << 20) + 1),
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_batch(data)


@given(st.binary(max_size=200))
@examples()
def test_any_bytes_are_a_batch_or_refused(data: bytes) -> None:
    for candidate in (data, b"\x92\x01\x91" + data):
        try:
            parse_batch(candidate)
        except FormatError:
            pass


def test_blocks_are_found_by_their_tokens() -> None:
    blocks = taken(stored([1, 2], [*range(8)]), stored([3], [8, 9, 10, 11], 2), stored([4], [7, 7, 7, 7], 1))
    assert blocks.match(prompt(*range(20))) == 12
    assert blocks.match(prompt(*range(11))) == 8
    assert blocks.match(prompt(0, 1, 2, 3, 7, 7, 7, 7)) == 8
    assert blocks.match(prompt(1, 2, 3)) == 0
    for event in parse_batch(batch({"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"})).events:
        blocks.apply(event)
    assert blocks.match(prompt(*range(20))) == 4


def test_a_block_in_two_places_is_there_until_it_left_both() -> None:
    blocks = taken(
        stored([1], [1, 2, 3, 4]),
        stored([1], [1, 2, 3, 4], medium="CPU"),
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
    )
    assert blocks.match(prompt(1, 2, 3, 4)) == 4
    blocks.apply(BlocksRemoved((b"1",), "CPU/0"))
    assert blocks.match(prompt(1, 2, 3, 4)) == 0
    blocks.check()


def test_salts_and_adapters_are_apart() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = taken(
        stored([1, 2], tokens, extra_keys=[("mine",), None]),
        stored([3, 4], tokens, lora_name="poet", extra_keys=[("poet", "mine"), ("poet",)]),
        stored([5], tokens[:4], extra_keys=[(("image", 0),)]),
    )
    assert blocks.match(prompt(*tokens)) == 0
    assert blocks.match(prompt(*tokens, salt="other")) == 0
    assert blocks.match(prompt(*tokens, salt="mine")) == 8
    assert blocks.match(prompt(*tokens, salt="mine", model="poet")) == 8
    assert blocks.match(prompt(*tokens, model="poet")) == 0
    assert taken(["BlockStored", [1], None, tokens, 8, None, "GPU", "poet"]).match(prompt(*tokens)) == 0


def test_100_000_prefixes_take_bounded_memory() -> None:
    blocks = ReportedBlocks(most=50_000)
    tracemalloc.start()  # slows it down
    try:
        for n in range(100_000):
            name = n.to_bytes(32, "big")
            blocks.apply(BlocksStored((name,), None, (n.to_bytes(64, "big"),), (b"",), 16, "GPU/0"))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(blocks) == 50_000
    assert used < 50_000 * 700
    assert not blocks.complete, "what was left out is not known to be missing"
    blocks.check()
    blocks.clear()
    assert blocks.complete


# ---- In order, or not -----------------------------------------------------------------------------------------------


class Engine:
    """An engine that stores and removes blocks of sequences, and its numbered batches."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.batches: list[bytes] = []
        self.has: dict[tuple[int, ...], bytes] = {}
        self.time = 0.0

    def step(self) -> bytes:
        self.time += 1
        removed = self._random.random() < 0.4 and bool(self.has)
        if removed:  # the end of a sequence first, as engines evict
            tokens = self._leaf()
            event: Any = {"type": "BlockRemoved", "block_hashes": [self.has.pop(tokens)], "medium": "GPU"}
        else:
            parent: tuple[int, ...] = self._random.choice([(), *self.has])
            tokens = (*parent, *(self._random.randrange(3) for _ in range(SIZE)))
            name = self.has.setdefault(tokens, self._random.randbytes(8))
            event = stored([name], list(tokens[-SIZE:]), self.has[parent] if parent else None)
        self.batches.append(batch(event, time=self.time))
        return self.batches[-1]

    def _leaf(self) -> tuple[int, ...]:
        leaves = [t for t in self.has if not any(other[: len(t)] == t and len(other) > len(t) for other in self.has)]
        return self._random.choice(sorted(leaves))

    def match(self, tokens: tuple[int, ...]) -> int:
        found = 0
        while found + SIZE <= len(tokens) and tokens[: found + SIZE] in self.has:
            found += SIZE
        return found


def connected(feed: EventFeed, engine: Engine, first: int = 0) -> None:
    for number, data in enumerate(engine.batches[first:], first):
        assert feed.receive(number, data) is None


def agree(feed: EventFeed, engine: Engine) -> None:
    for tokens in [*engine.has, (1,) * 12, (0, 1, 2, 0, 1, 2, 0, 1)]:
        assert feed.match(prompt(*tokens)) == Reported(engine.match(tokens), True)


def test_a_gap_is_replayed_and_late_batches_change_nothing() -> None:
    engine, feed = Engine(), EventFeed()
    for _ in range(30):
        engine.step()
    connected(feed, engine)
    for _ in range(10):
        engine.step()
    assert feed.receive(33, engine.batches[33]) == 30
    assert feed.receive(35, engine.batches[35]) == 30
    for number in range(30, 36):
        feed.replay(number, engine.batches[number])
    feed.replayed()
    for number in (35, 31, 0):
        assert feed.receive(number, engine.batches[number]) is None
    connected(feed, engine, 36)
    agree(feed, engine)
    assert (feed.source, feed.lost) == ("events", 0)
    feed.check()


@pytest.mark.parametrize("replayed", [(), (7, 8)])
def test_what_is_lost_for_good_leaves_what_came_after(replayed: tuple[int, ...]) -> None:
    feed = EventFeed()
    feed.receive(0, batch(stored([1], [1, 1, 1, 1])))
    assert feed.match(prompt(1, 1, 1, 1)) == Reported(4, True)
    assert feed.receive(9, batch(stored([9], [9, 9, 9, 9]), time=9.0)) == 1
    for number in replayed:
        feed.replay(number, batch(stored([number], [number] * 4)))
    feed.replayed()
    assert feed.source == "both"
    assert feed.lost
    assert feed.match(prompt(1, 1, 1, 1)) == Reported(0, False), "it may have been removed"
    assert feed.match(prompt(9, 9, 9, 9)) == Reported(4, False)
    feed.receive(10, batch({"type": "AllBlocksCleared"}, time=10.0))
    assert feed.source == "events", "nothing is there: that is all of it"


def test_an_engine_that_starts_again_has_nothing() -> None:
    engine, feed = Engine(1), EventFeed()
    assert feed.source == "text"
    assert feed.match(prompt(1, 2, 3, 4)) is None
    for _ in range(20):
        engine.step()
    connected(feed, engine)
    again = Engine(2)
    again.time = engine.time
    again.step()
    connected(feed, again)
    agree(feed, again)
    # The first batches of the next one are lost before this end is connected to it.
    third = Engine(3)
    third.time = again.time
    for _ in range(3):
        third.step()
    assert feed.receive(0, third.batches[0]) is None
    feed.disconnected()
    assert feed.source == "text"
    assert feed.receive(2, third.batches[2]) == 0
    for number in range(3):
        feed.replay(number, third.batches[number])
    feed.replayed()
    agree(feed, third)


def test_a_batch_that_cannot_be_read_is_a_lost_one() -> None:
    feed = EventFeed()
    feed.receive(0, batch(stored([1], [1, 1, 1, 1])))
    feed.receive(1, b"\xff\xff")
    assert (feed.source, feed.lost) == ("both", 1)
    assert feed.match(prompt(1, 1, 1, 1)) == Reported(0, False)


def test_what_outlives_the_engine_is_not_all_in_its_events() -> None:
    feed = EventFeed()
    feed.receive(0, batch(stored([1], [1, 1, 1, 1], medium="STORAGE")))
    assert feed.match(prompt(1, 1, 1, 1)) == Reported(4, False)
    assert feed.match(prompt(2, 2, 2, 2)) == Reported(0, False)


class LossyLink(RuleBasedStateMachine):
    """Batches between an engine and a feed are lost, doubled and swapped; replays may be cut, or not be there."""

    @initialize(seed=st.integers(0, 1000), kept=st.sampled_from([0, 3, 1000]))
    def begin(self, seed: int, kept: int) -> None:
        self.engine, self.feed, self.kept = Engine(seed), EventFeed(), kept
        self.on_the_way: list[int] = []

    @rule()
    def publish(self) -> None:
        self.engine.step()
        self.on_the_way.append(len(self.engine.batches) - 1)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.on_the_way:
            self.on_the_way.pop(data.draw(st.integers(0, len(self.on_the_way) - 1)))

    @rule(data=st.data())
    def double(self, data: st.DataObject) -> None:
        if self.engine.batches:
            self.on_the_way.append(data.draw(st.integers(0, len(self.engine.batches) - 1)))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.on_the_way:
            at = data.draw(st.integers(0, min(2, len(self.on_the_way) - 1)))
            number = self.on_the_way.pop(at)
            missing = self.feed.receive(number, self.engine.batches[number])
            if missing is not None:
                oldest = max(missing, len(self.engine.batches) - self.kept)
                for replayed in range(oldest, len(self.engine.batches)):
                    self.feed.replay(replayed, self.engine.batches[replayed])
                self.feed.replayed()

    @rule()
    def cut(self) -> None:
        self.feed.disconnected()

    @invariant()
    def claims_no_more_than_was_so(self) -> None:
        if not hasattr(self, "feed"):
            return
        self.feed.check()
        following = self.feed._next
        if following is None:
            assert self.feed.source == "text"
            return
        # What the engine had after the last batch that was applied.
        then: dict[bytes, tuple[int, ...]] = {}
        for data in self.engine.batches[:following]:
            for event in parse_batch(data).events:
                if isinstance(event, BlocksStored):
                    (name,), (tokens,) = event.ids, event.tokens
                    ids = tuple(memoryview(tokens).cast("I"))
                    then[name] = (*(then[event.parent] if event.parent else ()), *ids)
                elif isinstance(event, BlocksRemoved):
                    del then[event.ids[0]]
        has = set(then.values())
        for tokens in [*has, *self.engine.has]:
            found = self.feed.match(prompt(*tokens))
            assert found is not None
            assert found.tokens == 0 or tokens[: found.tokens] in has
            if found.whole:
                count = 0
                while count + SIZE <= len(tokens) and tokens[: count + SIZE] in has:
                    count += SIZE
                assert found.tokens == count


LossyLink.TestCase.settings = examples()
test_lost_doubled_and_swapped_batches = LossyLink.TestCase
