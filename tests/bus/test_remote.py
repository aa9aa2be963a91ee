"""Clouds as one remote: who is asked, who is chosen, who is not asked any more."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ctxreuse.bus.base import Matched
from ctxreuse.bus.remote import Clouds
from ctxreuse.bus.remote_fetch import Pace, TimedFetch
from ctxreuse.bus.serve import StoreService
from ctxreuse.bus.serve_engine import EnginePrefiller
from ctxreuse.cost.link import LinkEstimate
from ctxreuse.keys import prefix_keys
from ctxreuse.runtime import Runtime
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from ctxreuse.testing.memory_node import MemoryNode
from ctxreuse.testing.peer import Prompt, until

_GIVEN = runpy.run_path(str(Path(__file__).with_name("given.py")))
service = _GIVEN["service"]
tiny_llama = runpy.run_path(str(Path(__file__).with_name("tiny_llama.py")))["tiny_llama"]


@pytest.fixture(scope="module")
def engine() -> Any:
    return tiny_llama()


class Greeted(msgspec.Struct):
    salt: bytes = b"s" * 16
    epoch: int = 1
    spaces: tuple[bytes, ...] = ()


class Told:
    """A link of which the test says what it knows and answers; it counts what it is asked."""

    def __init__(self, name: str, *, announced: int | None = None, matched: Matched | None = None, **greeting: Any):
        self.name, self.state, self.welcome = name, "up", Greeted(**greeting)
        self._announced, self._matched = announced, matched
        self.asked: list[float] = []
        self.fetched: list[dict[str, Any]] = []

    def announced(self, keys: Any) -> int | None:
        return min(self._announced, len(keys)) if self._announced is not None else None

    def match(self, space: bytes, keys: Any, timeout: float) -> Matched | None:
        self.asked.append(timeout)
        return self._matched

    def fetch(self, space: Any, keys: Any, tokens: Any, **options: Any) -> str:
        self.fetched.append({"keys": keys, "tokens": tokens, **options})
        return "fetch"


def clouds(*links: Any, bandwidth: float = 0.0, rtt: float = 0.0, **options: Any) -> Clouds:
    return Clouds([(link, LinkEstimate(bandwidth, rtt)) for link in links], **options)


def test_announcements_answer_without_asking(engine: Any) -> None:
    tokens = random_tokens(engine, 8 * 16)
    link = Told("one", announced=5)
    remote = clouds(link, bandwidth=1e6, rtt=0.04)
    offer = remote.offer(engine.space, tokens, after=2, timeout=1.0)
    assert offer is not None
    assert (offer.peer, offer.source, offer.blocks, offer.state_blocks) == ("one", "cloud", 5, 5)
    assert (offer.bandwidth, offer.rtt, offer.computes) == (1e6, 0.04, False)
    assert remote.offer(engine.space, tokens, after=5, timeout=1.0) is None
    assert remote.offer(engine.space, tokens[:10], after=0, timeout=1.0) is None
    assert link.asked == []


def test_who_has_not_announced_is_asked_within_the_time(engine: Any) -> None:
    tokens = random_tokens(engine, 8 * 16)
    silent = Told("silent")
    knows = Told("knows", matched=Matched(6, 0))
    offer = clouds(silent, knows, clock=lambda: 0.0).offer(engine.space, tokens, after=0, timeout=1.0)
    assert offer is not None
    assert (offer.peer, offer.blocks) == ("knows", 6)
    assert silent.asked == [0.5]  # leaves time for the other
    assert knows.asked == [1.0]
    assert clouds(silent).offer(engine.space, tokens, after=0, timeout=1.0) is None
    assert clouds(knows).offer(engine.space, tokens, after=0, timeout=0.0) is None


def test_the_best_is_who_saves_most_time(engine: Any) -> None:
    tokens = random_tokens(engine, 8 * 16)
    far, near = Told("far", announced=8), Told("near", announced=7)
    links = [(far, LinkEstimate(1e4, 0.3)), (near, LinkEstimate(1e8, 0.001))]
    more = Clouds(links).offer(engine.space, tokens, after=0, timeout=1)
    assert more is not None
    assert more.peer == "far"  # nothing says what a block is worth
    fast = Clouds(links, seconds=lambda first, last: (last - first) * 0.001).offer(
        engine.space, tokens, after=0, timeout=1
    )
    assert fast is not None
    assert fast.peer == "near"
    unknown = Clouds(links, seconds=lambda first, last: None).offer(engine.space, tokens, after=0, timeout=1)
    assert unknown is not None
    assert unknown.peer == "far"


def test_a_cloud_that_computes_is_an_offer_of_its_own(engine: Any) -> None:
    tokens, digest = random_tokens(engine, 8 * 16), engine.space.digest
    computes, holds = Told("computes", announced=0, spaces=(digest,)), Told("holds", announced=2)
    offer = clouds(computes).offer(engine.space, tokens, after=1, timeout=1)
    assert offer is not None
    assert (offer.blocks, offer.state_blocks, offer.computes, offer.bandwidth) == (8, 8, True, 0.0)
    # Where nothing says how fast this device is, held blocks go before computed ones.
    either = clouds(computes, holds, bandwidth=1e8).offer(engine.space, tokens, after=1, timeout=1)
    assert either is not None
    assert either.peer == "holds"
    slow = clouds(computes, holds, bandwidth=1e8, seconds=lambda first, last: (last - first) * 0.1)
    best = slow.offer(engine.space, tokens, after=1, timeout=1)
    assert best is not None
    assert best.peer == "computes"
    assert best.bandwidth < 1e8  # as fast as it is believed to compute
    assert clouds(computes).offer(engine.space, tokens, after=5, timeout=1) is None  # too little
    assert (
        clouds(Told("other", announced=0, spaces=(bytes(32),))).offer(engine.space, tokens, after=0, timeout=1) is None
    )


def test_the_wrong_and_the_absent_are_not_asked(engine: Any) -> None:
    tokens = random_tokens(engine, 8 * 16)
    away, never, link = Told("away", announced=8), Told("never", announced=8), Told("one", announced=5)
    away.state = "down"
    never.welcome = None
    remote = clouds(away, never, link)
    offer = remote.offer(engine.space, tokens, after=0, timeout=1)
    assert offer is not None
    assert offer.peer == "one"
    remote.reject(offer, "audit")
    assert remote.quarantine.reason("one") == "audit"
    assert remote.offer(engine.space, tokens, after=0, timeout=1) is None
    for gone in (offer, msgspec.structs.replace(offer, peer="never"), msgspec.structs.replace(offer, peer="unknown")):
        fetch = remote.fetch(gone, engine.space, tokens, first=1, last=5, order="layers", state=False)
        assert (fetch.ended, fetch.count, fetch.tail()) == ("down", 4, 0)
    assert link.fetched == []


def test_keys_and_window_follow_the_link(engine: Any) -> None:
    tokens, space = random_tokens(engine, 8 * 16 + 3), engine.space
    one, two = Told("one", announced=8), Told("two", announced=0, salt=b"t" * 16)
    for bandwidth, rtt, most in ((0.0, 0.0, 1 << 20), (2.5e6, 0.04, 1 << 18), (1e9, 0.1, 1 << 20)):
        remote = clouds(one, two, bandwidth=bandwidth, rtt=rtt)
        offer = remote.offer(space, tokens, after=0, timeout=1)
        assert offer is not None
        assert remote.fetch(offer, space, tokens, first=2, last=6, order="tail", state=True) == "fetch"  # type: ignore[comparison-overlap]
        asked = one.fetched[-1]
        assert asked["keys"] == prefix_keys(space.digest, b"s" * 16, tokens[: 6 * 16], 16)
        assert np.array_equal(asked["tokens"], tokens[: 6 * 16])
        assert (asked["first"], asked["order"], asked["state"]) == (2, "tail", True)
        assert 64 << 10 <= asked["payload"] <= most
        assert asked["payload"] * asked["window"] > bandwidth * rtt


def test_the_pace_of_a_cloud_is_learned_from_what_it_computes() -> None:
    now = [0.0]

    class Coming:
        count, received, ended = 4, 0, None

        def tail(self, least: int = 0, timeout: float = 0.0) -> int:
            return 0

    coming, pace = Coming(), Pace()
    fetch = TimedFetch(coming, pace, 1000, lambda: now[0])  # type: ignore[arg-type]
    now[0], coming.received = 1.0, 10
    fetch.tail()
    now[0], coming.received, coming.ended = 3.0, 4000, ""  # type: ignore[assignment]
    fetch.tail()
    assert (pace.tokens_per_second, pace.delay) == (500.0, 1.0)
    now[0] = 9.0
    assert fetch.received == 4000  # is told once
    assert pace.tokens_per_second == 500.0


@contextmanager
def cloud(folder: Path, engine: Any) -> Iterator[tuple[StoreService, Any]]:
    prefiller = EnginePrefiller(engine)
    try:
        with service(folder, prefiller=prefiller) as node:
            memory = MemoryNode(node)
            try:
                link = memory.link("ann", (engine.space.digest,))
                until(lambda: link.state == "up", "the link does not come up")
                yield node, link
            finally:
                memory.close()
    finally:
        prefiller.close()


def test_a_runtime_goes_on_from_what_a_cloud_holds(tmp_path: Path, engine: Any) -> None:
    with cloud(tmp_path, engine) as (_, link):
        prompt = Prompt(engine, link.welcome.salt, 12)
        prompt.give(link)
        until(lambda: link.announced(prompt.keys) == 12, "nothing is announced")
        with TieredStore(8 << 20) as store:
            remote = clouds(link, bandwidth=1e9, rtt=1e-4)
            runtime = Runtime(engine, store, remote=remote)
            tokens = np.append(prompt.tokens, np.arange(5, dtype=np.int32))
            done = runtime.prefill(tokens)
            expected = engine.prefill(engine.start(), tokens)
            np.testing.assert_allclose(done.logits, expected, rtol=1e-3, atol=1e-4)
            assert done.usage.by_source.get("cloud", 0) > 0
            runtime.release(done.live)
            # Kept under the device's own keys, so that it needs no cloud next time.
            assert store.match(runtime.keys(tokens)).blocks == 12
            assert store.match(prompt.keys).blocks == 0
            runtime.close()


def test_a_cloud_computes_for_a_device(tmp_path: Path, engine: Any) -> None:
    with cloud(tmp_path, engine) as (node, link):
        until(lambda: link.announced([b"?" * 32]) == 0, "nothing is announced")
        tokens = random_tokens(engine, 8 * 16, seed=3)
        remote = clouds(link, bandwidth=1e9, rtt=1e-4, seconds=lambda first, last: 60.0)
        offer = remote.offer(engine.space, tokens, after=0, timeout=5)
        assert offer is not None
        assert offer.computes
        fetch = remote.fetch(offer, engine.space, tokens, first=0, last=8, order="layers", state=False)
        assert len(fetch.heads(20)) == 8
        fetch.wait_layer(2, 20)
        assert fetch.tail(8, 20) == 8
        for view in fetch.views(8):
            view.verify()
        assert fetch.state(0) is None
        until(lambda: fetch.ended == "", "the fetch does not end")
        fetch.stop()
        assert node.counts["computed"] == 1
        until(lambda: link.announced(prefix_keys(engine.space.digest, link.welcome.salt, tokens, 16)) == 8, "not held")
        held = remote.offer(engine.space, tokens, after=0, timeout=5)
        assert held is not None
        assert not held.computes
