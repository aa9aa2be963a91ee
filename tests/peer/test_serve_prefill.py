"""Computing for peers: once for all who want it, given up when nobody does, refused when it cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import block_layout, parse
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.errors import LinkRefusedError
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve import service as service_module
from ctxreuse.peer.serve.engine import EnginePrefiller, compute_blocks
from ctxreuse.peer.serve.prefill import PrefillSink
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from ctxreuse.testing.peer import until
from support.tenant_service import Gate, service
from support.tiny_models import engine_of

SALT = b"s" * 16


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of("llama")


class ByHand:
    """A `Prefiller` whose blocks come when the test says so."""

    def __init__(self, engine: Any, room: int = 8) -> None:
        self._engine, self.room = engine, room
        self.jobs: list[tuple[PrefillSink, list[Any], threading.Event]] = []

    @property
    def spaces(self) -> Mapping[bytes, ModelSpace]:
        return {self._engine.space.digest: self._engine.space}

    def submit(
        self, space: bytes, salt: bytes, tokens: Tokens, first: int, sink: PrefillSink, audited: int
    ) -> Callable[[], None] | None:
        if len(self.jobs) >= self.room:
            return None
        given_up = threading.Event()
        self.jobs.append((sink, list(compute_blocks(self._engine, salt, tokens, first)), given_up))
        self.audited = audited
        return given_up.set

    def make(self, job: int, count: int) -> None:
        sink, made, _ = self.jobs[job]
        for _ in range(count):
            item = made.pop(0)
            sink.block(item.number, item.data)
        if not made:
            sink.end()


def test_blocks_come_in_order_whatever_the_step(engine: Any) -> None:
    tokens = random_tokens(engine, 7 * 16)
    keys = prefix_keys(engine.space.digest, SALT, tokens, 16)
    whole = list(compute_blocks(engine, SALT, tokens, 0, step=100))
    assert [made.number for made in whole] == list(range(7))
    for step in (1, 3, 4):
        for first in (0, 2, 6):
            made = list(compute_blocks(engine, SALT, tokens, first, step=step))
            assert [item.number for item in made] == list(range(first, 7))
            for item in made:
                view, other = parse(item.data), parse(whole[item.number].data)
                assert view.header.key == keys[item.number]
                for layer in range(3):
                    got, want = (v.array(layer, "k") for v in (view, other))
                    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_what_a_store_holds_is_not_computed_again(engine: Any) -> None:
    tokens = random_tokens(engine, 6 * 16)
    keys = prefix_keys(engine.space.digest, SALT, tokens, 16)
    made = list(compute_blocks(engine, SALT, tokens, 0))
    with TieredStore(8 << 20) as store:
        for item in made[:4]:
            store.put(keys[item.number], item.data)
        again = list(compute_blocks(engine, SALT, tokens, 2, store=store))
        assert [item.number for item in again] == [2, 3, 4, 5]
        assert store.stats().hits == 4
        assert again[0].data.tobytes() == made[2].data.tobytes()
        for audited in (0, 3):  # the rest has not been audited: it may be false
            assert len(list(compute_blocks(engine, SALT, tokens, 0, store=store, audited=audited))) == 6
            assert store.stats().hits == 4 + audited
        for item in made[4:]:
            store.put(keys[item.number], item.data)
        assert [item.number for item in compute_blocks(engine, SALT, tokens, 0, store=store)] == list(range(6))


def test_two_who_want_the_same_wait_for_one_job(tmp_path: Path, engine: Any) -> None:
    prefiller = ByHand(engine)
    with service(tmp_path, prefiller=prefiller) as node:
        for user in ("ann", "bob"):
            assert node.admit(user, bytes(16), ()).spaces == (engine.space.digest,)
        tokens, digest = random_tokens(engine, 4 * 16 + 5), engine.space.digest
        one = node.open_prefill("a", digest, tokens, first=0, state=False)
        two = node.open_prefill("a", digest, tokens, first=1, state=False)
        theirs = node.open_prefill("b", digest, tokens, first=0, state=False)
        assert len(prefiller.jobs) == 2  # tenants share nothing
        assert (one.count, two.count, theirs.count) == (4, 3, 4)
        woken: list[str] = []
        one.watch(lambda: woken.append("one"))
        two.watch(lambda: woken.append("two"))
        assert one.parts(0) is None
        prefiller.make(0, 2)
        assert {"one", "two"} <= set(woken)
        assert one.parts(0) is not None
        assert one.parts(1) == two.parts(0)
        assert two.parts(1) is None
        assert one.read(1, 0, 64) == two.read(0, 0, 64)
        one.close()
        one.close()
        assert not prefiller.jobs[0][2].is_set()
        prefiller.make(0, 2)
        assert two.parts(2) is not None
        two.close()
        theirs.close()
        assert prefiller.jobs[1][2].is_set()
        until(lambda: len(node.snapshot("a")[1]) == 4, "made blocks are not stored")
        assert node.snapshot("b")[1] == []
        assert node.open_prefill("a", digest, tokens, first=0, state=False).parts(3) is not None
        assert len(prefiller.jobs) == 2


def test_who_comes_after_somebody_left_takes_nobodys_place(tmp_path: Path, engine: Any) -> None:
    prefiller = ByHand(engine)
    with service(tmp_path, prefiller=prefiller) as node:
        node.admit("ann", bytes(16), ())
        tokens, digest = random_tokens(engine, 4 * 16), engine.space.digest
        one, two = (node.open_prefill("a", digest, tokens, first=0, state=False) for _ in range(2))
        woken: list[str] = []
        two.watch(lambda: woken.append("two"))
        one.close()
        three = node.open_prefill("a", digest, tokens, first=0, state=False)
        three.watch(lambda: woken.append("three"))
        prefiller.make(0, 1)
        assert {"two", "three"} <= set(woken)
        three.close()
        woken.clear()
        prefiller.make(0, 1)
        assert "two" in woken
        two.close()


def test_nothing_is_computed_from_what_was_not_audited(tmp_path: Path, engine: Any) -> None:
    prefiller, gate = ByHand(engine), Gate()
    with service(tmp_path, prefiller=prefiller, audit=gate) as node:
        salt = node.admit("ann", bytes(16), ()).salt
        tokens, digest = random_tokens(engine, 4 * 16), engine.space.digest
        keys = prefix_keys(digest, salt, tokens, 16)
        for made in list(compute_blocks(engine, salt, tokens, 0))[:2]:
            parent = keys[made.number - 1] if made.number else ROOT
            receiver = node.open_put(
                "a", PutRequest(digest, [keys[made.number]], [made.data.nbytes], parent), user="ann"
            )
            assert receiver.put(0, made.data.data.toreadonly()) == ""
        assert node.store.match(keys).blocks == 2
        node.open_prefill("a", digest, tokens, first=0, state=False).close()
        assert prefiller.audited == 0
        gate.open.set()
        assert node.wait_audits(20)
        node.open_prefill("a", digest, tokens, first=0, state=False).close()
        assert prefiller.audited == 2


def test_contexts_that_wait_for_slow_peers_are_bounded(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller = ByHand(engine)
    monkeypatch.setattr(service_module, "_PREFILL_BYTES", 5 * block_layout(engine.space).nbytes)
    with service(tmp_path, prefiller=prefiller) as node:
        node.admit("ann", bytes(16), ())
        digest = engine.space.digest
        first, second = (random_tokens(engine, 4 * 16, seed=seed) for seed in (1, 2))
        one = node.open_prefill("a", digest, first, first=0, state=False)
        prefiller.make(0, 4)
        with pytest.raises(LinkRefusedError, match="wait for their peers"):
            node.open_prefill("a", digest, second, first=0, state=False)
        one.close()
        node.open_prefill("a", digest, second, first=0, state=False).close()


def test_memory_for_contexts_is_shared(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, digest = ByHand(engine), engine.space.digest
    monkeypatch.setattr(service_module, "_PREFILL_BYTES", 20 * block_layout(engine.space).nbytes)

    def ask(node: Any, tenant: str, seed: int) -> Any:
        return node.open_prefill(tenant, digest, random_tokens(engine, 4 * 16, seed=seed), first=0, state=False)

    with service(tmp_path, prefiller=prefiller) as node:
        node.admit("bob", bytes(16), ())
        alone = [ask(node, "b", seed) for seed in range(5)]
        with pytest.raises(LinkRefusedError, match="wait for their peers"):
            ask(node, "b", 9)
        for one in alone:
            one.close()
        node.admit("ann", bytes(16), ())
        sources = [ask(node, "b", 0), ask(node, "b", 1)]
        with pytest.raises(LinkRefusedError, match="wait for their peers"):
            ask(node, "b", 2)
        sources += [ask(node, "a", 3)]
        for one in sources:
            one.close()
        assert node._prefill_bytes.taken == 0


def test_a_job_that_fails_or_is_given_up_ends_those_who_wait(tmp_path: Path, engine: Any) -> None:
    prefiller = ByHand(engine)
    with service(tmp_path, prefiller=prefiller) as node:
        node.admit("ann", bytes(16), ())
        tokens, digest = random_tokens(engine, 4 * 16), engine.space.digest
        source = node.open_prefill("a", digest, tokens, first=0, state=False)
        prefiller.make(0, 1)
        prefiller.jobs[0][0].end("the worker died")
        assert source.parts(0) is not None
        with pytest.raises(LookupError, match="the worker died"):
            source.parts(1)
        # Whoever asks again gets a new job, also while others hold on to the old one.
        again = node.open_prefill("a", digest, tokens, first=0, state=False)
        assert len(prefiller.jobs) == 2
        source.close()
        prefiller.jobs[1][0].block(1, prefiller.jobs[1][1][0].data)  # the wrong one
        with pytest.raises(LookupError):
            again.parts(0)
        again.close()


def test_a_full_prefiller_says_busy(tmp_path: Path, engine: Any) -> None:
    with service(tmp_path, prefiller=ByHand(engine, room=1)) as node:
        node.admit("ann", bytes(16), ())
        digest = engine.space.digest
        node.open_prefill("a", digest, random_tokens(engine, 32), first=0, state=False)
        with pytest.raises(LinkRefusedError) as caught:
            node.open_prefill("a", digest, random_tokens(engine, 32, seed=1), first=0, state=False)
        assert caught.value.where == "busy"
        for tokens, first, space, where in (
            (random_tokens(engine, 15), 0, digest, "tokens"),
            (random_tokens(engine, 32), 2, digest, "tokens"),
            (np.full(32, engine.space.vocab_size, np.int32), 0, digest, "tokens"),
            (random_tokens(engine, engine.space.max_tokens + 16), 0, digest, "tokens"),
            (random_tokens(engine, 32), 0, bytes(32), "space"),
        ):
            with pytest.raises(LinkRefusedError) as caught:
                node.open_prefill("a", space, tokens, first=first, state=False)
            assert caught.value.where == where


class Collected:
    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.ended: list[str] = []

    def block(self, index: int, data: Any) -> None:
        self.blocks.append(index)

    def state(self, data: Any) -> None:
        raise AssertionError("this model has none")

    def end(self, reason: str = "") -> None:
        self.ended.append(reason)


class Waits:
    """An engine whose prefills begin when a lock is free."""

    def __init__(self, engine: Any, lock: threading.Lock) -> None:
        self._engine, self._lock = engine, lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, context: Any, ids: Any) -> Any:
        with self._lock:
            return self._engine.prefill(context, ids)


def test_the_engine_computes_jobs_one_after_another_until_it_is_closed(engine: Any) -> None:
    prefiller, lock = EnginePrefiller(engine, waiting=2), threading.Lock()
    sinks = [Collected() for _ in range(4)]
    tokens = random_tokens(engine, 6 * 16)
    digest = engine.space.digest
    assert prefiller.submit(bytes(32), SALT, tokens, 0, sinks[0], 0) is None
    assert prefiller.submit(digest, SALT, tokens, 2, sinks[0], 0) is not None
    until(lambda: bool(sinks[0].ended), "the job does not end")
    assert (sinks[0].blocks, sinks[0].ended) == ([2, 3, 4, 5], [""])
    prefiller.close()
    prefiller.close()
    assert prefiller.spaces == {}
    prefiller = EnginePrefiller(Waits(engine, lock), waiting=2)  # type: ignore[arg-type]
    with lock:
        assert prefiller.submit(digest, SALT, tokens, 0, sinks[1], 0) is not None
        until(lambda: not prefiller.waiting, "the job is not begun")
        give_up = prefiller.submit(digest, SALT, tokens, 0, sinks[2], 0)
        assert give_up is not None
        assert prefiller.submit(digest, SALT, tokens, 0, Collected(), 0) is not None
        assert prefiller.submit(digest, SALT, tokens, 0, sinks[3], 0) is None
        give_up()
    until(lambda: bool(sinks[2].ended), "the job does not end")
    assert sinks[1].ended == [""]
    assert (sinks[2].blocks, sinks[2].ended) == ([], ["given up"])
    prefiller.close()
