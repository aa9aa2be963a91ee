"""Contract of any way to reach a node, as tests to inherit from.

::

    class TestMine(TenantContract):
        def serve(self, service): return MyNode(service)

Inherit, give a fixture ``engine`` (a small model whose first layer keeps K) and open nodes in ``serve``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np
import pytest

from ctxreuse.block.format import Buffer, parse, rekey, reseal
from ctxreuse.bus.protocol.base import Link, PutRequest, PutResult
from ctxreuse.bus.remote import Fetch, FetchRequest
from ctxreuse.engines.base import Engine
from ctxreuse.errors import LinkError
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.peer.serve.audit import StoreAudit
from ctxreuse.peer.serve.engine import EnginePrefiller, compute_blocks
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime.fetch.audit import SPAN_TOKENS, audit_stored
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine.contract import random_tokens

__all__ = ["Node", "PeerContract", "Prompt", "TenantContract", "until"]

_PATIENCE = 120.0


def until(true: Callable[[], bool], what: str, seconds: float = _PATIENCE) -> None:
    """Return when ``true()`` is; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class Node(Protocol):
    """A node that is served."""

    def link(self, user: str, spaces: Sequence[bytes]) -> Link:
        """A link of ``user``, up or soon to be. The node closes it."""

    def close(self) -> None: ...


class Prompt:
    """A context of whole blocks, computed by ``engine`` under the keys of one link."""

    def __init__(self, engine: Engine, salt: bytes, blocks: int, seed: int = 0) -> None:
        self.space = engine.space
        self.tokens = random_tokens(engine, blocks * engine.space.block_tokens, seed)
        self.keys = prefix_keys(self.space.digest, salt, self.tokens, self.space.block_tokens)
        made = list(compute_blocks(engine, salt, self.tokens, 0))
        self.blocks = [item.data for item in made if item.kind == "block"]
        self.states = [item.data for item in made if item.kind == "state"]
        self.sizes = [len(data) for data in self.blocks]

    def give(self, link: Link, blocks: Sequence[Buffer] | None = None) -> PutResult:
        """Put all blocks (or ``blocks`` instead) over a link."""
        mine = self.blocks if blocks is None else blocks
        return link.put(
            PutRequest(self.space.digest, self.keys, self.sizes, parent=ROOT), lambda i: mine[i], timeout=_PATIENCE
        )

    def arrived(self, fetch: Fetch, first: int = 0) -> bool:
        """Return True if a fetch brought exactly these blocks."""
        until(lambda: fetch.ended is not None, "the fetch does not end")
        if fetch.ended:
            return False
        views = fetch.views(fetch.count)
        return [bytes(view.buffer) for view in views] == [data.tobytes() for data in self.blocks[first:]]


def forged(data: Buffer, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a block with random numbers and valid checksums."""
    view = parse(data)
    made = {
        (plane.layer, plane.role): rng.standard_normal(plane.nbytes // 4).astype(np.float32).view(np.uint8)
        for plane in view.layout.planes
    }
    return reseal(view, made)


class PeerContract(ABC):
    """Inherit, give a fixture ``engine``, and open nodes in ``serve``. The users ``ann`` and ``ann-2`` are of one
    tenant; a node that does not know its peers apart may take them for ``local``."""

    TENANTS: Mapping[str, str] = MappingProxyType({"ann": "a", "ann-2": "a", "local": "a", "bob": "b"})

    @abstractmethod
    def serve(self, service: StoreService) -> Node:
        """A node that serves ``service``."""

    @contextmanager
    def cloud(self, folder: Path, engine: Engine, *, host_bytes: int = 64 << 20) -> Iterator[Cloud]:
        """A cloud with a store in memory, an engine and an audit."""
        store, prefiller = TieredStore(host_bytes), EnginePrefiller(engine)
        service = StoreService(
            store,
            folder,
            ServeOptions(
                tenant_of=self.TENANTS.get,
                prefiller=prefiller,
                audit=StoreAudit(
                    store,
                    lambda _, keys, first, state: audit_stored(engine, store, keys, first, state, Random(7)),
                    reach=SPAN_TOKENS,
                ),
            ),
        )
        node = self.serve(service)
        try:
            yield Cloud(node, service, store, engine)
        finally:
            node.close()
            prefiller.close()
            service.check()
            service.close()
            store.close()

    def test_blocks_put_by_one_device_are_fetched_by_another(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann, other = cloud.up("ann"), cloud.up("ann-2")
            prompt = cloud.prompt(ann, 6)
            assert prompt.give(ann).taken == (0, 1, 2, 3, 4, 5)
            cloud.audited()
            found = other.match(prompt.space.digest, prompt.keys, _PATIENCE)
            assert found is not None
            assert found.blocks == 6
            until(lambda: other.announced(prompt.keys) == 6, "nothing is announced")
            for order in ("layers", "tail"):
                assert prompt.arrived(other.fetch(FetchRequest(prompt.space, prompt.tokens, order=order), prompt.keys))
            assert prompt.arrived(
                other.fetch(FetchRequest(prompt.space, prompt.tokens, first=4), prompt.keys, payload=4096), 4
            )

    def test_states_follow_their_blocks(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann, other = cloud.up("ann"), cloud.up("ann-2")
            prompt = cloud.prompt(ann, 3)
            prompt.give(ann)
            for data in prompt.states:
                given = ann.put(
                    PutRequest(prompt.space.digest, prompt.keys[2:], [data.nbytes], parent=prompt.keys[1], state=True),
                    [data].__getitem__,
                )
                assert given.taken == (0,)
            cloud.audited()
            found = other.match(prompt.space.digest, prompt.keys, _PATIENCE)
            assert found is not None
            assert (found.blocks, found.state_blocks) == (3, 3 if prompt.states else 0)
            fetch = other.fetch(FetchRequest(prompt.space, prompt.tokens, state=bool(prompt.states)), prompt.keys)
            assert prompt.arrived(fetch)
            state = fetch.state(_PATIENCE)
            got = [bytes(state.buffer)] if state is not None else []
            assert got == [data.tobytes() for data in prompt.states]

    def test_putting_again_stores_nothing(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann = cloud.up("ann")
            prompt = cloud.prompt(ann, 3)
            assert prompt.give(ann).taken == (0, 1, 2)
            again = prompt.give(ann)
            assert (again.taken, again.present, dict(again.refused)) == ((), (0, 1, 2), {})
            assert cloud.store.stats().blocks == 3

    def test_another_model_space_is_a_miss(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann = cloud.up("ann")
            prompt = cloud.prompt(ann, 2)
            prompt.give(ann)
            cloud.audited()
            found = ann.match(bytes(32), prompt.keys, _PATIENCE)
            assert found is not None
            assert found.blocks == 0

    def test_evictions_are_reported(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann = cloud.up("ann")
            prompt = cloud.prompt(ann, 4)
            prompt.give(ann)
            cloud.audited()
            until(lambda: ann.announced(prompt.keys) == 4, "nothing is announced")
            cloud.store.drop(prompt.keys[2], "evicted")
            fetch = ann.fetch(FetchRequest(prompt.space, prompt.tokens), prompt.keys)
            until(lambda: fetch.ended is not None, "the fetch does not end")
            assert fetch.ended == "gone"
            until(lambda: ann.announced(prompt.keys) == 2, "the loss is not announced")
            assert ann.match(prompt.space.digest, prompt.keys, _PATIENCE).blocks == 2  # type: ignore[union-attr]

    def test_a_full_cloud_stores_what_fits(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine, host_bytes=300_000) as cloud:
            ann = cloud.up("ann")
            for seed in range(6):
                prompt = cloud.prompt(ann, 8, seed)
                given = prompt.give(ann)
                assert len(given.taken) + len(given.present) + len(given.refused) == 8
            cloud.audited()
            stats = cloud.store.stats()
            assert stats.nbytes <= stats.capacity
            assert cloud.store.stats().blocks > 0

    def test_damaged_blocks_are_refused(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann = cloud.up("ann")
            prompt = cloud.prompt(ann, 3)
            damaged = [data.copy() for data in prompt.blocks]
            start = parse(damaged[1]).start
            damaged[1][start] ^= 1
            given = prompt.give(ann, damaged)
            assert given.taken[0] == 0
            assert given.refused[1] == "corrupt"
            assert cloud.service.quarantine.reason("ann") is None
            assert prompt.give(ann).taken == (1, 2)

    def test_a_cloud_computes_the_same_blocks(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann, other = cloud.up("ann"), cloud.up("ann-2")
            prompt = cloud.prompt(ann, 5)
            state = bool(prompt.states)
            assert ann.welcome is not None
            assert prompt.space.digest in ann.welcome.spaces
            fetches = [
                link.fetch(FetchRequest(prompt.space, prompt.tokens, state=state), prompt.keys, compute=True)
                for link in (ann, other)
            ]
            for fetch in fetches:
                until(lambda fetch=fetch: fetch.ended is not None, "the fetch does not end")  # type: ignore[misc]
                assert fetch.ended == "", fetch.ended
                for view, mine in zip(fetch.views(5), prompt.blocks, strict=True):
                    view.verify()
                    local = parse(mine)
                    assert view.header == msgspec.structs.replace(local.header, checksums=view.header.checksums)
                    for plane in local.layout.planes:
                        got, want = (np.asarray(v.array(plane.layer, plane.role), np.float32) for v in (view, local))
                        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
                assert (fetch.state(_PATIENCE) is not None) == state
            until(lambda: other.announced(prompt.keys) == 5, "what was computed is not announced")
            # The second may have come when the first was done: then it was fetched.
            assert cloud.service.counts["computed"] == 1
            part = other.fetch(FetchRequest(prompt.space, prompt.tokens, first=2), prompt.keys, compute=True)
            until(lambda: part.ended is not None, "the fetch does not end")
            assert part.ended == ""
            assert cloud.service.counts["computed"] == 1

    def test_impossible_prefills_are_refused(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann = cloud.up("ann")
            prompt = cloud.prompt(ann, 2)
            tokens = prompt.tokens.copy()
            tokens[3] = prompt.space.vocab_size
            fetch = ann.fetch(FetchRequest(prompt.space, tokens), prompt.keys, compute=True)
            until(lambda: fetch.ended is not None, "the fetch does not end")
            assert fetch.ended == "tokens"


class TenantContract(PeerContract):
    """For nodes that know their peers apart: ``bob`` is of another tenant."""

    def test_tenants_are_isolated(self, tmp_path: Path, engine: Engine) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann, bob = cloud.up("ann"), cloud.up("bob")
            prompt = cloud.prompt(ann, 3)
            prompt.give(ann)
            cloud.audited()
            until(lambda: ann.announced(prompt.keys) == 3, "nothing is announced")
            # Bob has guessed all keys.
            found = bob.match(prompt.space.digest, prompt.keys, _PATIENCE)
            assert found is not None
            assert (found.blocks, found.nbytes) == (0, 0)
            fetch = bob.fetch(FetchRequest(prompt.space, prompt.tokens), prompt.keys)
            until(lambda: fetch.ended is not None, "the fetch does not end")
            assert fetch.ended == "gone"
            until(lambda: bob.announced(prompt.keys) is not None, "nothing is announced")
            assert bob.announced(prompt.keys) == 0
            # He can neither replace blocks nor put any below them.
            child = bob.put(
                PutRequest(prompt.space.digest, [b"c" * 32], [4096], parent=prompt.keys[2]), lambda _: b"", timeout=20
            )
            assert child.taken == ()
            assert prompt.give(bob).taken == ()
            assert prompt.arrived(ann.fetch(FetchRequest(prompt.space, prompt.tokens), prompt.keys))

    @pytest.mark.parametrize("forgery", ["tokens", "key", "numbers"])
    def test_forged_blocks_are_detected(self, tmp_path: Path, engine: Engine, forgery: str) -> None:
        with self.cloud(tmp_path, engine) as cloud:
            ann, other = cloud.up("ann"), cloud.up("ann-2")
            honest = cloud.prompt(ann, 2, seed=5)
            assert honest.give(other).taken == (0, 1)
            good, bad = cloud.prompt(ann, 2, seed=1), cloud.prompt(ann, 3, seed=2)
            assert good.give(ann).taken == (0, 1)
            blocks = list(bad.blocks)
            if forgery == "tokens":  # other token ids under the key
                blocks[0] = rekey(cloud.prompt(ann, 1, seed=3).blocks[0], bad.keys[0], ROOT)
            elif forgery == "key":
                blocks[0] = good.blocks[0]
            else:
                blocks[2] = forged(blocks[2], np.random.default_rng(1))
            bad.give(ann, blocks)
            cloud.audited()
            until(lambda: cloud.reason("ann") is not None, "the forgery is not detected")
            # All its blocks are dropped, those of others stay, and it can put no more.
            until(lambda: other.announced(honest.keys) == 2, "nothing is announced")
            for prompt in (good, bad):
                found = other.match(prompt.space.digest, prompt.keys, _PATIENCE)
                assert found is not None
                assert found.blocks == 0
            assert honest.arrived(other.fetch(FetchRequest(honest.space, honest.tokens), honest.keys))
            with pytest.raises(LinkError):
                good.give(ann)
            assert cloud.reason("ann-2") is None


class Cloud:
    """A node under test."""

    def __init__(self, node: Node, service: StoreService, store: TieredStore, engine: Engine) -> None:
        self.node, self.service, self.store, self.engine = node, service, store, engine

    def up(self, user: str) -> Link:
        """A link of ``user`` that is up."""
        link = self.node.link(user, (self.engine.space.digest,))
        until(lambda: link.state == "up", f"the link of {user} does not come up")
        return link

    def prompt(self, link: Link, blocks: int, seed: int = 0) -> Prompt:
        """A computed context under the keys of a link."""
        assert link.welcome is not None
        return Prompt(self.engine, link.welcome.salt, blocks, seed)

    def audited(self) -> None:
        """Wait until all blocks are audited."""
        assert self.service.wait_audits(_PATIENCE)

    def reason(self, user: str) -> str | None:
        """Return why a user is in quarantine."""
        return self.service.quarantine.reason(user)
