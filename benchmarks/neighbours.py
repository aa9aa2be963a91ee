"""What a tenant that floods a cloud costs another one: time to first token, and hits.

One cloud in this process: `BusServer` with keys over a `StoreService`, and one engine process for prefills. *Mine*
asks for a context of 512 tokens that was never computed, again and again, and waits until it is there; *the flood* has
three of 1,984 tokens under way at any time, and had two before. Then, on a store without an engine, *mine* fetches its
contexts, two fifths of the store, round after round, and gives again what it misses, while *the flood* gives twice what
the store holds in each round.

Baseline: the same load where both are one tenant, whose requests are served first come first served and whose blocks
the eviction policy alone orders: what tenants would be to each other without shares. Bound: *mine* alone. The three
take turns; on a machine that does other work only their ratios mean anything.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np
from ctxreuse_cloud.workers.pool import WorkerPool

from benchmarks.many import SPACE, MadeUp
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.remote import Fetch, FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import open_store

__all__ = ["ONE", "SHARED", "hits_of", "run"]

_MODEL = "smollm2"
_MINE, _FLOOD = "mine", "flood"
#: Who is whose tenant: with shares, and first come first served.
SHARED, ONE = {_MINE: "a", _FLOOD: "b"}, {_MINE: "a", _FLOOD: "a"}
_MY_TOKENS, _FLOOD_TOKENS, _DEPTH, _BEFORE = 512, 1984, 3, 2
_CAPACITY, _BLOCKS = 64 << 20, 8
_TTFT_BAR, _HITS_BAR = 2.0, 0.05
_WAIT, _LOOK = 600.0, 0.005


class _Cloud:
    """A cloud and a link of each user."""

    def __init__(self, folder: Path, tenants: Mapping[str, str], capacity: int, workers: WorkerPool | None) -> None:
        server, pairs = KeyPair.new(), {user: KeyPair.new() for user in tenants}
        allow = AllowList(folder / "allow.toml")
        for user, tenant in tenants.items():
            allow.allow(Allowed(user, pairs[user].public, tenant, datetime.now(UTC)))
        auth = ServerAuth(server, allow)
        self.store = open_store(folder / "store", capacity=capacity, host_bytes=16 << 20)
        options = ServeOptions(tenant_of=auth.tenant, tenants=set(tenants.values()), prefiller=workers)
        self.service = StoreService(self.store, folder, options)
        self.bus = BusServer(self.service, auth=auth)
        self.bus.start()
        self.links = {
            user: BusClient(
                self.bus.endpoint, ClientOptions(keys=pair, server_key=server.public, spaces=[SPACE.digest])
            )
            for user, pair in pairs.items()
        }
        _until(lambda: all(link.welcome is not None for link in self.links.values()))

    def salt(self, user: str) -> bytes:
        """The salt of a user's keys."""
        welcome = self.links[user].welcome
        assert welcome is not None
        return welcome.salt

    def fetch(self, user: str, space: ModelSpace, tokens: np.ndarray, *, compute: bool) -> Fetch:
        """Ask for the blocks of a context."""
        keys = prefix_keys(space.digest, self.salt(user), tokens, space.block_tokens)
        return self.links[user].fetch(FetchRequest(space, tokens), keys, compute=compute)

    def close(self) -> None:
        """Close all but the workers."""
        for link in self.links.values():
            link.close()
        self.bus.close()
        self.service.close()
        self.store.close()


@contextmanager
def _cloud(tenants: Mapping[str, str], capacity: int, workers: WorkerPool | None = None) -> Iterator[_Cloud]:
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        cloud = _Cloud(Path(folder), tenants, capacity, workers)
        try:
            yield cloud
        finally:
            cloud.close()


def _until(true: object) -> None:
    deadline = time.monotonic() + _WAIT
    while not true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise EngineError("the cloud of the bench does not answer")
        time.sleep(_LOOK)


class _Prefills:
    """Requests for contexts that are to be computed; each context is another."""

    _seeds = count()

    def __init__(self, cloud: _Cloud, space: ModelSpace) -> None:
        self._cloud, self._space = cloud, space
        self._flood: list[Fetch] = []
        self._had = 0

    def _ask(self, user: str, tokens: int) -> Fetch:
        ids = np.random.default_rng(next(self._seeds)).integers(0, self._space.vocab_size, tokens).astype("<i4")
        return self._cloud.fetch(user, self._space, ids, compute=True)

    def flood(self) -> None:
        """Keep so many under way."""
        running = [fetch for fetch in self._flood if fetch.ended is None]
        self._had += len(self._flood) - len(running)
        self._flood = running
        while len(self._flood) < _DEPTH:
            self._flood.append(self._ask(_FLOOD, _FLOOD_TOKENS))

    def mine(self, *, flooded: bool) -> float:
        """Seconds until one of mine is there, asked for in the midst of a flood, or alone."""
        while flooded and self._had < _BEFORE:
            self.flood()
            time.sleep(_LOOK)
        began = time.perf_counter()
        fetch = self._ask(_MINE, _MY_TOKENS)

        def done() -> bool:
            if flooded:
                self.flood()
            return fetch.ended is not None

        _until(done)
        if fetch.ended:
            raise EngineError(f"a context was not computed: {fetch.ended}")
        return time.perf_counter() - began

    def stop(self) -> None:
        """Give the flood up."""
        for fetch in self._flood:
            fetch.stop()
        self._flood = []


def _seconds(options: Options) -> tuple[list[float], list[float], list[float]]:
    """Seconds of mine: alone, beside the flood, and beside it as one tenant."""
    workers = WorkerPool(1, EngineConfig(model=_MODEL, threads=1), LogConfig(level="error"))
    workers.start()
    try:
        if not workers.settle(_WAIT) or not workers.spaces:
            raise EngineError("the engine of the bench did not start")
        (space,) = workers.spaces.values()
        alone, shared, one = list[float](), list[float](), list[float]()
        rounds = options.pick(1, 4)
        for _ in range(rounds):
            for tenants, flooded, into in ((SHARED, False, alone), (SHARED, True, shared), (ONE, True, one)):
                options.step("contexts are computed", len(alone) + len(shared) + len(one), 3 * rounds)
                with _cloud(tenants, 4_000_000_000, workers) as cloud:
                    prefills = _Prefills(cloud, space)
                    for _ in range(1 if tenants is ONE else options.pick(1, 3)):
                        into.append(prefills.mine(flooded=flooded))
                    prefills.stop()
                _until(lambda: not workers.waiting and workers.status()[0].state == "idle")
    finally:
        workers.close()
    return alone, shared, one


def hits_of(tenants: Mapping[str, str], *, flooded: bool, rounds: int, capacity: int = _CAPACITY) -> float:
    """The share of mine that is found, round after round."""
    rng = np.random.default_rng(5)
    with _cloud(tenants, capacity) as cloud:
        nbytes = sum(map(len, MadeUp(rng, cloud.salt(_MINE), _BLOCKS).blocks))
        mine = [MadeUp(rng, cloud.salt(_MINE), _BLOCKS) for _ in range(capacity * 2 // 5 // nbytes)]
        found = asked = 0
        for number in range(rounds + 1):
            for one in mine:
                fetch = cloud.fetch(_MINE, SPACE, one.tokens, compute=False)
                _until(lambda fetch=fetch: fetch.ended is not None)
                got = 0 if fetch.ended else len(one.keys)
                if number:  # in the first round nothing is there yet
                    found, asked = found + got, asked + len(one.keys)
                if not got:
                    _give(cloud, _MINE, one)
            for _ in range(capacity * 2 // nbytes if flooded else 0):
                _give(cloud, _FLOOD, MadeUp(rng, cloud.salt(_FLOOD), _BLOCKS))
            cloud.store.flush()
    return found / asked


def _give(cloud: _Cloud, user: str, context: MadeUp) -> None:
    request = PutRequest(SPACE.digest, context.keys, [len(block) for block in context.blocks])
    cloud.links[user].put(request, context.blocks.__getitem__, timeout=_WAIT)


def run(options: Options) -> list[Figure]:
    """One run; ``quick``: one round each."""
    alone, shared, one = map(statistics.median, _seconds(options))
    options.step("contexts are kept")
    rounds = options.pick(2, 8)
    hits = [
        hits_of(tenants, flooded=flooded, rounds=rounds)
        for tenants, flooded in ((SHARED, True), (ONE, True), (SHARED, False))
    ]
    return [
        Figure(metric="ttft", value=shared, unit="s", baseline=one, bound=alone, better="lower"),
        Figure(
            metric="ttft_cost",
            value=shared / alone,
            unit="x",
            baseline=one / alone,
            bound=1.0,
            better="lower",
            bar=_TTFT_BAR,
            note="beside a flood, as a multiple of alone; baseline: first come first served",
        ),
        Figure(metric="hits", value=hits[0], unit="share", baseline=hits[1], bound=hits[2]),
        Figure(
            metric="hits_cost",
            value=1 - hits[0] / hits[2],
            unit="share",
            baseline=1 - hits[1] / hits[2],
            better="lower",
            bar=_HITS_BAR,
            note="of the hits alone; baseline: one order of eviction for both",
        ),
    ]
