"""A link that is cut or becomes useless while a runtime fetches over it, on real sockets: the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from demo.relay import Relay

from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.cost import CostModel, LinkEstimate
from ctxreuse.identity.keys import Tokens
from ctxreuse.peer.fetch.clouds import CloudPool
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from ctxreuse.testing.peer import Prompt, until
from support.tiny_models import engine_of

pytestmark = pytest.mark.daemon

BLOCKS = 24  # of 16 tokens
LIMITS = Limits(
    terms=Terms(max_payload=4096, heartbeat_ms=500, silence_ms=5000), announce_every=0.02, backoff=(0.001, 0.02)
)


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of("llama")


@pytest.fixture
def cluster(tmp_path: Path, engine: Any) -> Iterator[Any]:
    """A cloud that holds a context, a relay, and a link to it that is up."""
    with ExitStack() as stack:
        store = stack.enter_context(TieredStore(16 << 20))
        node = StoreService(store, tmp_path, ServeOptions(tenant_of={"local": "local"}.get))
        stack.callback(node.close)
        server = stack.enter_context(BusServer(node, limits=LIMITS))
        relay = stack.enter_context(Relay(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))))
        options = {"limits": LIMITS, "name": "cloud"}
        link = stack.enter_context(BusClient(relay.endpoint, ClientOptions(spaces=[engine.space.digest], **options)))
        until(lambda: link.state == "up", "the link does not come up")
        prompt = Prompt(engine, link.welcome.salt, BLOCKS)
        prompt.give(link)
        until(lambda: link.announced(prompt.keys) == BLOCKS, "nothing is announced")
        yield SimpleNamespace(relay=relay, link=link, prompt=prompt)


def asked(engine: Any, cluster: Any, tokens: Tokens, each: float, bandwidth: float) -> tuple[Any, list[int]]:
    """What a fresh runtime makes of a prompt, which believes that a token takes ``each`` seconds to compute and that
    the link has ``bandwidth`` bytes/s; and the tokens that follow."""
    cost = CostModel()
    for n in (1, 16, 64, 256):
        cost.prefill.observe(n, 0, n * each)
    remote = CloudPool([(cluster.link, LinkEstimate(bandwidth, 0.001))], seconds=cost.prefill.seconds)
    done = Runtime(engine, None, RuntimeOptions(remote=remote, cost=cost)).prefill(tokens)
    return done, following(engine, done.context, done.logits)


def following(engine: Any, context: Any, logits: Any) -> list[int]:
    found: list[int] = []
    for _ in range(8):
        found.append(int(logits.argmax()))
        logits = engine.prefill(context, np.array(found[-1:], np.int32))
    return found


def expected(engine: Any, tokens: Tokens) -> list[int]:
    context = engine.new_context()
    return following(engine, context, engine.prefill(context, tokens))


def test_cuts_at_random_points_change_no_token(cluster: Any, engine: Any) -> None:
    rng = random.Random(7)
    total, tokens = sum(cluster.prompt.sizes), np.append(cluster.prompt.tokens, random_tokens(engine, 5))
    right, cloud = expected(engine, tokens), 0
    for _ in range(30):
        until(lambda: cluster.link.announced(cluster.prompt.keys) == BLOCKS, "the link does not come back")
        cluster.relay.cut_after(rng.randrange(1, total))
        done, found = asked(engine, cluster, tokens, 0.02, 1e6)
        assert found == right
        cloud += done.usage.tokens.by_source.get("cloud", 0)
    assert cluster.link.stats().resumes > 15
    assert cloud > 25 * BLOCKS * 16  # the link came back in time


def test_a_link_that_falls_to_a_hundredth_is_left_for_computing(cluster: Any, engine: Any) -> None:
    tokens, total = np.append(cluster.prompt.tokens, random_tokens(engine, 5)), sum(cluster.prompt.sizes)
    each, rate = 0.005, total / 0.4
    cluster.relay.replay([(0.2, rate), (0.0, rate / 100)], "down")
    done, found = asked(engine, cluster, tokens, each, rate)
    assert found == expected(engine, tokens)
    # Fetching the rest would take 20 s; the soft deadline is what computing was believed to take, about 2 s.
    assert 0 < done.usage.fetched_bytes < total
