"""Clouds as one remote: who is asked, who is chosen, who is not asked any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ctxreuse.bus.protocol.base import MatchResult
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.cost.link import LinkEstimate
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.fetch.clouds import CloudPool, PrefillSpeed
from ctxreuse.peer.serve.engine import EnginePrefiller
from ctxreuse.peer.serve.service import StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from ctxreuse.testing.peer import Prompt, until
from support.memory_node import MemoryNode
from support.tenant_service import service
from support.tiny_models import engine_of
from support.waiting import patient


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of("llama")


class Greeted(msgspec.Struct):
    salt: bytes = b"s" * 16
    epoch: int = 1
    spaces: tuple[bytes, ...] = ()


class Told:
    """A link of which the test says what it knows and answers; it counts what it is asked."""

    def __init__(self, name: str, *, announced: int | None = None, matched: MatchResult | None = None, **greeting: Any):
        self.name, self.state, self.welcome = name, "up", Greeted(**greeting)
        self._announced, self._matched = announced, matched
        self.asked: list[float] = []
        self.fetched: list[dict[str, Any]] = []

    def announced(self, keys: Any) -> int | None:
        return min(self._announced, len(keys)) if self._announced is not None else None

    def match(self, space: bytes, keys: Any, timeout: float) -> MatchResult | None:
        self.asked.append(timeout)
        return self._matched

    def fetch(self, request: Any, keys: Any, **options: Any) -> str:
        self.fetched.append({"request": request, "keys": keys, **options})
        return "fetch"


def clouds(*links: Any, bandwidth: float = 0.0, rtt: float = 0.0, **options: Any) -> CloudPool:
    return CloudPool([(link, LinkEstimate(bandwidth, rtt)) for link in links], **options)


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
    knows = Told("knows", matched=MatchResult(6, 0))
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
    more = CloudPool(links).offer(engine.space, tokens, after=0, timeout=1)
    assert more is not None
    assert more.peer == "far"  # nothing says what a block is worth
    fast = CloudPool(links, seconds=lambda first, last: (last - first) * 0.001).offer(
        engine.space, tokens, after=0, timeout=1
    )
    assert fast is not None
    assert fast.peer == "near"
    unknown = CloudPool(links, seconds=lambda first, last: None).offer(engine.space, tokens, after=0, timeout=1)
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
        fetch = remote.fetch(gone, FetchRequest(engine.space, tokens[: 5 * 16], first=1))
        assert (fetch.ended, fetch.count, fetch.tail()) == ("down", 4, 0)
    assert link.fetched == []


def test_keys_and_window_follow_the_link(engine: Any) -> None:
    tokens, space = random_tokens(engine, 8 * 16 + 3), engine.space
    one, two = Told("one", announced=8), Told("two", announced=0, salt=b"t" * 16)
    for bandwidth, rtt, most in ((0.0, 0.0, 1 << 20), (2.5e6, 0.04, 1 << 18), (1e9, 0.1, 4 << 20)):
        remote = clouds(one, two, bandwidth=bandwidth, rtt=rtt)
        offer = remote.offer(space, tokens, after=0, timeout=1)
        assert offer is not None
        wanted = FetchRequest(space, tokens[: 6 * 16], first=2, order="tail", state=True)
        assert remote.fetch(offer, wanted) == "fetch"  # type: ignore[comparison-overlap]
        asked = one.fetched[-1]
        request = asked["request"]
        assert asked["keys"] == prefix_keys(space.digest, b"s" * 16, tokens[: 6 * 16], 16)
        assert np.array_equal(request.tokens, tokens[: 6 * 16])
        assert (request.first, request.order, request.state) == (2, "tail", True)
        assert 64 << 10 <= asked["payload"] <= most
        assert asked["payload"] * asked["window"] > bandwidth * rtt


def test_the_pace_of_a_cloud_is_learned_from_what_it_computes(engine: Any) -> None:
    link = Told("one", announced=0, spaces=(engine.space.digest,))
    remote, tokens = (
        clouds(link, bandwidth=1e9, rtt=0.01, seconds=lambda first, last: 60.0),
        random_tokens(engine, 8 * 16),
    )
    offer = remote.offer(engine.space, tokens, after=0, timeout=1)
    assert offer is not None
    assert (offer.computes, offer.delay) == (True, 0.0)
    remote.fetch(offer, FetchRequest(engine.space, tokens))
    link.fetched[-1]["on_done"](1.0, 3.0)
    offer = remote.offer(engine.space, tokens, after=0, timeout=1)
    assert offer is not None
    assert offer.delay == 1.0
    assert offer.bandwidth == pytest.approx(offer.block_nbytes * 64 / 16)
    pace = PrefillSpeed()
    pace.record(1000, 2.9, 3.0)  # all at once: half of the time is delay at most
    assert (pace.tokens_per_second, pace.delay) == (pytest.approx(1000 / 1.5), 1.5)


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
            runtime = Runtime(engine, store, RuntimeOptions(remote=remote))
            tokens = np.append(prompt.tokens, np.arange(5, dtype=np.int32))
            done = runtime.prefill(tokens)
            expected = engine.prefill(engine.new_context(), tokens)
            np.testing.assert_allclose(done.logits, expected, rtol=1e-3, atol=1e-4)
            assert done.usage.tokens.by_source.get("cloud", 0) > 0
            runtime.release(done)
            # Kept under the device's own keys, so that it needs no cloud next time.
            assert store.match(runtime.keys(tokens)).blocks == 12
            assert store.match(prompt.keys).blocks == 0
            runtime.close()


def test_a_cloud_computes_for_a_device(tmp_path: Path, engine: Any) -> None:
    with cloud(tmp_path, engine) as (node, link):
        until(lambda: link.announced([b"?" * 32]) == 0, "nothing is announced")
        tokens = random_tokens(engine, 8 * 16, seed=3)
        remote = clouds(link, bandwidth=1e9, rtt=1e-4, seconds=lambda first, last: 60.0)
        offer = remote.offer(engine.space, tokens, after=0, timeout=patient(5))
        assert offer is not None
        assert offer.computes
        fetch = remote.fetch(offer, FetchRequest(engine.space, tokens))
        assert len(fetch.heads(20)) == 8
        fetch.wait_layer(2, 20)
        assert fetch.tail(8, patient(20)) == 8
        for view in fetch.views(8):
            view.verify()
        assert fetch.state(0) is None
        until(lambda: fetch.ended == "", "the fetch does not end")
        fetch.stop()
        assert node.counts["computed"] == 1
        until(lambda: link.announced(prefix_keys(engine.space.digest, link.welcome.salt, tokens, 16)) == 8, "not held")
        held = remote.offer(engine.space, tokens, after=0, timeout=patient(5))
        assert held is not None
        assert not held.computes
