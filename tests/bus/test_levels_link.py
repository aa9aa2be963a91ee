"""Over real sockets: cards are fetched by digest, blocks come at the levels that were allowed, and nothing else is."""

from __future__ import annotations

import hashlib
import runpy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.block import parse
from ctxreuse.bus.cards import Cards
from ctxreuse.bus.remote import Clouds
from ctxreuse.bus.serve import StoreService
from ctxreuse.bus.serve_engine import compute_blocks
from ctxreuse.bus.serve_pack import Packer
from ctxreuse.bus.wire import Wish
from ctxreuse.bus.zmqio import BusClient, BusServer
from ctxreuse.codec import Codec, Shelf, card_digest, write_card
from ctxreuse.cost import CostModel, LinkEstimate
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import FormatError
from ctxreuse.keys import prefix_keys
from ctxreuse.levels import damage
from ctxreuse.runtime import Runtime
from ctxreuse.runtime.remote import Ask
from ctxreuse.store import TieredStore
from ctxreuse.testing.plain_cards import plain_card
from ctxreuse.testing.relay import Relay

BLOCK, BLOCKS = 64, 8
tiny_llama = runpy.run_path(str(Path(__file__).with_name("tiny_llama.py")))["tiny_llama"]


def until(true: Any, seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def given() -> Any:
    """An engine, a context of it, and the bytes of a card."""
    engine = TorchEngine(tiny_llama().model, block_tokens=BLOCK)  # of 16 tokens, padding would be most of a block
    ids = np.random.default_rng(0).integers(3, 512, BLOCKS * BLOCK).astype("<i4")
    views = [parse(made.data) for made in compute_blocks(engine, b"s" * 16, ids, 0)]
    card = write_card(plain_card(engine.space, views, theta=lambda _: 10000.0))
    return SimpleNamespace(engine=engine, space=engine.space, ids=ids, card=card, name=card_digest(card).hex()[:16])


@contextmanager
def cloud(folder: Path, given: Any, *, card: bool = True, **options: Any) -> Iterator[Any]:
    """A cloud that holds the context; ``card``: and can encode it."""
    shelf = Shelf(folder / "cards")
    if card:
        shelf.add(given.card)
    packer = Packer(shelf, **options)
    with TieredStore(64 << 20) as store:
        service = StoreService(store, folder, tenant_of=lambda _: "a", packer=packer)
        with BusServer(service) as server:
            with client(server, given) as link:
                keys = prefix_keys(given.space.digest, link.welcome.salt, given.ids, BLOCK)
                made = [made.data for made in compute_blocks(given.engine, link.welcome.salt, given.ids, 0)]
                link.put(given.space.digest, keys, [data.nbytes for data in made], made.__getitem__)
            yield SimpleNamespace(server=server, service=service, store=store, packer=packer, keys=keys, made=made)
        service.close()
    packer.close()
    packer.check()


@contextmanager
def client(server: Any, given: Any, **options: Any) -> Iterator[BusClient]:
    with BusClient(server.endpoint, **({"models": [given.space], "name": "cloud"} | options)) as link:
        until(lambda: link.state == "up" and link.welcome is not None)
        yield link


def fetch(link: BusClient, node: Any, given: Any, order: str = "tail", **wish: Any) -> Any:
    payload = wish.pop("payload", 0)
    found = link.fetch(given.space, node.keys, given.ids, order=order, payload=payload, wish=Wish(**wish))  # type: ignore[arg-type]
    until(lambda: found.ended is not None)
    found.check()
    return found


def test_a_card_is_fetched_by_its_digest_and_then_lossy_blocks_are(tmp_path: Path, given: Any) -> None:
    mine = Shelf(tmp_path / "mine")
    lies: list[Any] = []
    with cloud(tmp_path, given) as node, client(node.server, given, estimate=(estimate := LinkEstimate())) as link:
        assert link.welcome is not None
        digest = hashlib.sha256(given.card).digest()
        assert link.welcome.packs == ("exact+rans",)
        assert link.welcome.cards == ((given.space.digest, digest),)
        clouds = Clouds([(link, estimate)], shelf=mine)
        offer = clouds.offer(given.space, given.ids, after=0, timeout=5)
        assert offer is not None
        assert [level.name for level in offer.levels] == ["exact+rans"]
        cards = Cards([link], given.space, mine, on_lie=lambda *lie: lies.append(lie))
        try:
            until(lambda: cards.taken == 1)
        finally:
            cards.close()
        assert mine.data(given.space, given.name) == given.card
        assert lies == []
        offer = clouds.offer(given.space, given.ids, after=0, timeout=5)
        assert offer is not None
        names = [f"{name}@{given.name}" for name in ("kl-0.008", "kl-0.01", "kl-0.05")]
        assert [level.name for level in offer.levels] == ["exact+rans", *names]
        ask = Ask(("exact+rans", names[1]), within=1e-3)
        found = clouds.fetch(offer, given.space, given.ids, first=2, last=BLOCKS, order="layers", state=False, ask=ask)
        assert found.tail(BLOCKS - 2, 20) == BLOCKS - 2
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
        assert sum(items for items, _ in node.packer.counts.values()) == BLOCKS
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
        codec = Codec.open(given.space, node.packer.shelf)
        more = found.refinements(BLOCKS)
        for view, refinement, made in zip(found.views(BLOCKS), more, node.made):
            assert view.header.level == base
            assert bytes(codec.merge(view, refinement)) == bytes(codec.encode(parse(made), "kl-0.008"))
        # Of an exact block there is nothing to refine.
        exact = fetch(link, node, given, order, levels=(fine, base), bandwidth=1 << 60, refine=True)
        assert exact.ended == ""
        assert exact.refinements(BLOCKS) == [None] * BLOCKS


class Slow(Packer):
    """An encoder that takes its time."""

    def encode(self, codec: Any, view: Any, level: str) -> Any:
        time.sleep(0.05)
        return super().encode(codec, view, level)


def test_a_slow_encoder_is_no_slow_link(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node, client(node.server, given, estimate=(estimate := LinkEstimate())) as link:
        fetch(link, node, given, payload=64 << 10, levels=(), bandwidth=1 << 40)  # as they are held
        quick, guessed = estimate.bandwidth, estimate.encoding
        assert quick > 0
        node.service.packer = slow = Slow(node.packer.shelf)
        at = time.monotonic()
        found = fetch(link, node, given, levels=(f"kl-0.05@{given.name}",), bandwidth=1000, deadline_ms=1)
        seconds = time.monotonic() - at
        assert seconds > BLOCKS * 0.05
        # Bytes over those seconds would be far below what the link gives.
        assert estimate.bandwidth > found.received / seconds * 5
        assert estimate.encoding != guessed
        slow.close()


def test_refinements_that_come_after_the_answer_are_kept(tmp_path: Path, given: Any) -> None:
    shelf = Shelf(tmp_path / "mine")
    shelf.add(given.card)
    engine = TorchEngine(tiny_llama().model, block_tokens=BLOCK)
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
        remote = Clouds([(link, estimate)], shelf=shelf, seconds=cost.prefill.seconds)
        runtime = Runtime(engine, store, remote=remote, cost=cost)
        stack.callback(runtime.close)
        ids = np.append(given.ids, np.arange(3, 8, dtype="<i4"))
        until(lambda: link.announced(prefix_keys(given.space.digest, link.welcome.salt, given.ids, BLOCK)) == BLOCKS)
        usage = runtime.warm(ids, lossy="kl-0.05")
        assert usage.by_source == {"cloud": BLOCKS * BLOCK}
        came = {name for name in usage.by_level if damage(name)}
        assert came, "something lossy"

        def kept() -> list[str]:
            store.flush()
            entries = store.entries(runtime.keys(given.ids))
            return [entry.level.partition("@")[0] for entry in entries if entry is not None]

        finer = {"kl-0.05": "kl-0.008"}
        assert set(kept()) <= came | {finer.get(name, name) for name in came}
        until(lambda: not {"kl-0.05"} & set(kept()))
        runtime.remote = None
        runtime.pool.clear()
        again = runtime.prefill(ids, lossy="kl-0.008")
        assert again.usage.cached_tokens == BLOCKS * BLOCK


def test_a_peer_without_the_extension_is_served_as_before(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node:
        with client(node.server, given, models=[], spaces=[given.space.digest]) as old:
            assert old.welcome is not None
            assert old.welcome.cards == ()
            # What it would not understand is not sent to it, whatever it asks for.
            found = fetch(old, node, given, levels=(f"kl-0.05@{given.name}",), bandwidth=1000, deadline_ms=1)
            assert {view.header.level for view in found.views(BLOCKS)} == {"exact"}
        node.service.packer = None
        with client(node.server, given) as link:
            assert link.welcome is not None
            assert (link.welcome.packs, link.welcome.cards) == ((), ())
            found = fetch(link, node, given, levels=("exact+rans",), bandwidth=1000, deadline_ms=1, refine=True)
            assert {view.header.level for view in found.views(BLOCKS)} == {"exact"}


class Liar(Packer):
    """Sends another level than was allowed, and another card than it names."""

    def encode(self, codec: Any, view: Any, level: str) -> Any:
        return super().encode(codec, view, f"kl-0.05@{codec.digest[:16]}" if damage(level) else level)

    def card(self, model: Any, digest: bytes) -> Any:
        supply = super().card(model, digest)
        supply._data = memoryview(bytes(supply._data)[:-1] + b"?")
        return supply


def test_more_damage_than_allowed_is_refused(tmp_path: Path, given: Any) -> None:
    with cloud(tmp_path, given) as node:
        liar = node.service.packer = Liar(node.packer.shelf)
        with client(node.server, given) as link:
            found = fetch(link, node, given, levels=(f"kl-0.01@{given.name}",), bandwidth=1000, deadline_ms=1)
            assert found.ended == "level"
            assert found.tail() == 0
            until(lambda: link.state == "up")
            with pytest.raises(FormatError, match="another card"):
                link.card(given.space.digest, hashlib.sha256(given.card).digest(), 20)
            lies: list[Any] = []
            cards = Cards([link], given.space, Shelf(tmp_path / "mine"), on_lie=lambda *lie: lies.append(lie))
            until(lambda: lies)
            cards.close()
            assert lies == [("cloud", "card")]
            assert (cards.taken, cards.refused) == (0, 1)
        liar.close()
