"""Over real sockets: cards are fetched by digest, blocks come at the levels that were allowed, and nothing else is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from demo.relay import Relay

from ctxreuse.block.format import parse
from ctxreuse.block.levels import expected_kl
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.messages import LevelRequest
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.codec import Codec, ProfileStore, profile_digest, read_profile, write_profile
from ctxreuse.cost import CostModel, LinkEstimate
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.fetch.clouds import CloudPool
from ctxreuse.peer.fetch.profiles import ProfileFetcher
from ctxreuse.peer.serve.encoder import BlockEncoder
from ctxreuse.peer.serve.engine import compute_blocks
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore
from ctxreuse.testing.profiles import plain_profile
from support.tiny_models import engine_of
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

BLOCK, BLOCKS = 64, 8


@pytest.fixture(scope="module")
def given() -> Any:
    """An engine, a context of it, and the bytes of a card."""
    engine = engine_of("llama", block_tokens=BLOCK)  # of 16 tokens, padding would be most of a block
    ids = np.random.default_rng(0).integers(3, 512, BLOCKS * BLOCK).astype("<i4")
    views = [parse(made.data) for made in compute_blocks(engine, b"s" * 16, ids, 0)]
    card = write_profile(plain_profile(engine.space, views, theta=lambda _: 10000.0))
    return SimpleNamespace(engine=engine, space=engine.space, ids=ids, card=card, name=profile_digest(card).hex()[:16])


@contextmanager
def cloud(folder: Path, given: Any, *, card: bool = True, **options: Any) -> Iterator[Any]:
    """A cloud that holds the context; ``card``: and can encode it."""
    shelf = ProfileStore(folder / "cards")
    if card:
        shelf.add(given.card)
    encoder = BlockEncoder(shelf, **options)
    with TieredStore(64 << 20) as store:
        service = StoreService(store, folder, ServeOptions(tenant_of=lambda _: "a", encoder=encoder))
        with BusServer(service) as server:
            with client(server, given) as link:
                keys = prefix_keys(given.space.digest, link.welcome.salt, given.ids, BLOCK)
                made = [made.data for made in compute_blocks(given.engine, link.welcome.salt, given.ids, 0)]
                link.put(PutRequest(given.space.digest, keys, [data.nbytes for data in made]), made.__getitem__)
            yield SimpleNamespace(server=server, service=service, store=store, encoder=encoder, keys=keys, made=made)
        service.close()
    encoder.close()
    encoder.check()


@contextmanager
def client(server: Any, given: Any, **options: Any) -> Iterator[BusClient]:
    with BusClient(server.endpoint, ClientOptions(**{"models": [given.space], "name": "cloud"} | options)) as link:
        until(lambda: link.state == "up" and link.welcome is not None)
        yield link


def fetch(link: BusClient, node: Any, given: Any, order: str = "tail", **request: Any) -> Any:
    payload = request.pop("payload", 0)
    found = link.fetch(
        FetchRequest(given.space, given.ids, order=order, levels=LevelRequest(**request)), node.keys, payload=payload
    )  # type: ignore[arg-type]
    until(lambda: found.ended is not None)
    found.check()
    return found


def test_a_card_is_fetched_by_its_digest_and_then_lossy_blocks_are(tmp_path: Path, given: Any) -> None:
    mine = ProfileStore(tmp_path / "mine")
    lies: list[Any] = []
    with cloud(tmp_path, given) as node, client(node.server, given, estimate=(estimate := LinkEstimate())) as link:
        assert link.welcome is not None
        digest = hashlib.sha256(given.card).digest()
        assert link.welcome.packs == ("exact+rans",)
        assert link.welcome.cards == ((given.space.digest, digest),)
        clouds = CloudPool([(link, estimate)], profiles=mine)
        offer = clouds.offer(given.space, given.ids, after=0, timeout=patient(5))
        assert offer is not None
        assert [level.name for level in offer.levels] == ["exact+rans"]
        cards = ProfileFetcher([link], given.space, mine, on_forged=lambda *lie: lies.append(lie))
        try:
            until(lambda: cards.taken == 1)
        finally:
            cards.close()
        assert mine.data(given.space, given.name) == given.card
        assert lies == []
        offer = clouds.offer(given.space, given.ids, after=0, timeout=patient(5))
        assert offer is not None
        names = [f"{name}@{given.name}" for name in ("kl-0.008", "kl-0.01", "kl-0.05")]
        assert [level.name for level in offer.levels] == ["exact+rans", *names]
        request = LevelRequest(("exact+rans", names[1]), deadline_ms=1)
        ids = given.ids[: BLOCKS * given.space.block_tokens]
        found = clouds.fetch(offer, FetchRequest(given.space, ids, first=2, levels=request))
        assert found.tail(BLOCKS - 2, patient(20)) == BLOCKS - 2
        codec = Codec.open(given.space, mine)
        for view, made in zip(found.views(BLOCKS - 2), node.made[2:]):
            assert view.header.level == names[1]
            assert bytes(view.buffer) == bytes(codec.encode(parse(made), "kl-0.01"))


@pytest.mark.parametrize("order", ["tail", "layers", "front"])
@pytest.mark.parametrize("name", ["exact+rans", "kl-0.05", "kl-0.01"])
def test_blocks_come_at_the_allowed_level(tmp_path: Path, given: Any, order: str, name: str) -> None:
    level = name if name == "exact+rans" else f"{name}@{given.name}"
    with cloud(tmp_path, given) as node, client(node.server, given) as link:
        found = fetch(link, node, given, order, levels=(level,), bandwidth=1000, deadline_ms=1)
        assert found.ended == ""
        came = [view.header.level for view in found.views(BLOCKS)]
        # Numbers at random do not pack: then they come as they are.
        assert set(came) == {level} or (name == "exact+rans" and level in came and set(came) == {level, "exact"})
        for view in found.views(BLOCKS):
            view.verify()
        assert sum(items for items, _ in node.encoder.counts.values()) == BLOCKS
        # A link that is faster than any coder, and no hurry: as they are held.
        again = fetch(link, node, given, order, levels=(level,), bandwidth=1 << 60)
        assert {view.header.level for view in again.views(BLOCKS)} == {"exact"}
        assert [bytes(view.buffer) for view in again.views(BLOCKS)] == [data.tobytes() for data in node.made]


@pytest.mark.parametrize("order", ["tail", "layers"])
def test_refinements_follow_and_lead_to_the_finer_level(tmp_path: Path, given: Any, order: str) -> None:
    base, fine = f"kl-0.05@{given.name}", f"kl-0.008@{given.name}"
    with cloud(tmp_path, given) as node, client(node.server, given) as link:
        found = fetch(link, node, given, order, levels=(fine, base), bandwidth=1000, deadline_ms=1, refine=True)
        assert found.ended == ""
        codec = Codec.open(given.space, node.encoder.profiles)
        more = found.refinements(BLOCKS)
        for view, refinement, made in zip(found.views(BLOCKS), more, node.made):
            assert view.header.level == base
            assert bytes(codec.merge(view, refinement)) == bytes(codec.encode(parse(made), "kl-0.008"))
        # Of an exact block there is nothing to refine.
        exact = fetch(link, node, given, order, levels=(fine, base), bandwidth=1 << 60, refine=True)
        assert exact.ended == ""
        assert exact.refinements(BLOCKS) == [None] * BLOCKS


def test_unknown_text_comes_at_the_next_stricter_level_that_is_allowed(tmp_path: Path, given: Any) -> None:
    card = write_profile(msgspec.structs.replace(read_profile(given.card), seen=bytes(64), unseen=0.5))
    name = profile_digest(card).hex()[:16]
    strange = SimpleNamespace(**vars(given) | {"card": card, "name": name})
    with cloud(tmp_path, strange) as node, client(node.server, strange) as link:
        coarse, fine = f"kl-0.05@{name}", f"kl-0.01@{name}"
        found = fetch(link, node, strange, levels=(fine, coarse), bandwidth=1000, deadline_ms=1)
        assert {view.header.level for view in found.views(BLOCKS)} == {fine}
        found = fetch(link, node, strange, levels=(coarse,), bandwidth=1000, deadline_ms=1)
        assert {view.header.level for view in found.views(BLOCKS)} == {"exact"}


class Slow(BlockEncoder):
    """An encoder that takes its time."""

    def encode(self, codec: Any, view: Any, level: str) -> Any:
        time.sleep(0.05)
        return super().encode(codec, view, level)


def test_a_slow_encoder_is_no_slow_link(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node, client(node.server, given, estimate=(estimate := LinkEstimate())) as link:
        fetch(link, node, given, payload=64 << 10, levels=(), bandwidth=1 << 40)  # as they are held
        quick, guessed = estimate.bandwidth, estimate.encoding
        assert quick > 0
        node.service.encoder = slow = Slow(node.encoder.profiles)
        at = time.monotonic()
        found = fetch(link, node, given, levels=(f"kl-0.05@{given.name}",), bandwidth=1000, deadline_ms=1)
        seconds = time.monotonic() - at
        assert seconds > BLOCKS * 0.05
        # Bytes over those seconds would be far below what the link gives.
        assert estimate.bandwidth > found.received / seconds * 5
        assert estimate.encoding != guessed
        slow.close()


def test_refinements_that_come_after_the_answer_are_kept(tmp_path: Path, given: Any) -> None:
    shelf = ProfileStore(tmp_path / "mine")
    shelf.add(given.card)
    engine = engine_of("llama", block_tokens=BLOCK)
    engine.codec = Codec.open(engine.space, shelf)
    cost = CostModel()
    for n in (1, 16, 64, 256):
        cost.prefill.observe(n, 0, n * 0.05)
    with ExitStack() as stack:
        node = stack.enter_context(cloud(tmp_path, given))
        port = int(node.server.endpoint.rpartition(":")[2])
        relay = stack.enter_context(Relay(("127.0.0.1", port), rate=200e3))
        estimate = LinkEstimate(200e3, 0.001)
        link = stack.enter_context(client(relay, given, estimate=estimate))
        store = stack.enter_context(TieredStore(64 << 20))
        remote = CloudPool([(link, estimate)], profiles=shelf, seconds=cost.prefill.seconds)
        runtime = Runtime(engine, store, RuntimeOptions(remote=remote, cost=cost))
        stack.callback(runtime.close)
        ids = np.append(given.ids, np.arange(3, 8, dtype="<i4"))
        until(lambda: link.announced(prefix_keys(given.space.digest, link.welcome.salt, given.ids, BLOCK)) == BLOCKS)
        usage = runtime.warm(runtime.request(ids, max_kl=0.05))
        assert usage.tokens.by_source == {"cloud": BLOCKS * BLOCK}
        came = {name for name in usage.tokens.by_level if expected_kl(name)}
        assert came, "something lossy"

        def kept() -> list[str]:
            store.flush()
            entries = store.entries(runtime.keys(given.ids))
            return [entry.level.partition("@")[0] for entry in entries if entry is not None]

        finer = {"kl-0.05": "kl-0.008"}
        assert set(kept()) <= came | {finer.get(name, name) for name in came}
        until(lambda: not {"kl-0.05"} & set(kept()), 60)
        runtime.connect(None)
        runtime.context_cache.clear()
        again = runtime.prefill(runtime.request(ids, max_kl=0.008))
        assert again.usage.cached_tokens == BLOCKS * BLOCK


def test_a_peer_without_the_extension_is_served_as_before(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node:
        with client(node.server, given, models=[], spaces=[given.space.digest]) as old:
            assert old.welcome is not None
            assert old.welcome.cards == ()
            # What it would not understand is not sent to it, whatever it asks for.
            found = fetch(old, node, given, levels=(f"kl-0.05@{given.name}",), bandwidth=1000, deadline_ms=1)
            assert {view.header.level for view in found.views(BLOCKS)} == {"exact"}
        node.service.encoder = None
        with client(node.server, given) as link:
            assert link.welcome is not None
            assert (link.welcome.packs, link.welcome.cards) == ((), ())
            found = fetch(link, node, given, levels=("exact+rans",), bandwidth=1000, deadline_ms=1, refine=True)
            assert {view.header.level for view in found.views(BLOCKS)} == {"exact"}


class Liar(BlockEncoder):
    """Sends another level than was allowed, and another card than it names."""

    def encode(self, codec: Any, view: Any, level: str) -> Any:
        return super().encode(codec, view, f"kl-0.05@{codec.digest[:16]}" if expected_kl(level) else level)

    def profile_source(self, model: Any, digest: bytes) -> Any:
        source = super().profile_source(model, digest)
        source._data = memoryview(bytes(source._data)[:-1] + b"?")
        return source


def test_more_damage_than_allowed_is_refused(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node:
        liar = node.service.encoder = Liar(node.encoder.profiles)
        with client(node.server, given) as link:
            found = fetch(link, node, given, levels=(f"kl-0.01@{given.name}",), bandwidth=1000, deadline_ms=1)
            assert found.ended == "level"
            assert found.tail() == 0
            until(lambda: link.state == "up")
            with pytest.raises(FormatError, match="another profile"):
                link.fetch_profile(given.space.digest, hashlib.sha256(given.card).digest(), 20)
            lies: list[Any] = []
            cards = ProfileFetcher(
                [link], given.space, ProfileStore(tmp_path / "mine"), on_forged=lambda *lie: lies.append(lie)
            )
            until(lambda: lies)
            cards.close()
            assert lies == [("cloud", "card")]
            assert (cards.taken, cards.refused) == (0, 1)
        liar.close()


class Counting(ProfileStore):
    """Counts how often a profile's file is read."""

    reads = 0

    def find(self, space: Any, digest16: str) -> Any:
        self.reads += 1
        return super().find(space, digest16)


def test_a_profile_that_is_there_is_not_read_again_at_each_look(tmp_path: Path, given: Any) -> None:
    mine = Counting(tmp_path / "mine")
    with cloud(tmp_path, given) as node, client(node.server, given) as link:
        until(lambda: link.state == "up")
        cards = ProfileFetcher([link], given.space, mine, on_forged=lambda *lie: None)
        until(lambda: cards.taken == 1)
        for _ in range(3):
            assert cards.fetch_missing() == 0
        before = mine.reads
        for _ in range(5):
            cards.fetch_missing()
        assert mine.reads == before
        mine.paths(given.space)[0].unlink()
        until(lambda: cards.fetch_missing() or cards.taken == 2)
        assert mine.newest(given.space) is not None
        cards.close()
