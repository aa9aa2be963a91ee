"""Tenants of one node: what one floods, another still finds, is audited and is computed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.identity.keys import ROOT
from ctxreuse.peer.serve import service as service_module
from ctxreuse.peer.serve.owners import fair_level
from ctxreuse.store import open_store
from support.tenant_service import Gate, Given, service

CAPACITY = 2 << 20


def salt(node: Any, user: str = "ann") -> bytes:
    return node.admit(user, bytes(16), ()).salt


def put_all(node: Any, tenant: str, user: str, seeds: range) -> list[Given]:
    own = [Given(salt(node, user), 4, seed=seed, floats=1000) for seed in seeds]
    for one in own:
        one.put(node, tenant, user)
        node.store.flush()
    return own


def found(node: Any, tenant: str, own: list[Given]) -> float:
    return sum(node.match(tenant, one.space, one.keys).blocks for one in own) / sum(len(one.keys) for one in own)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_flood_evicts_its_own_blocks_first(tmp_path: Path, policy: str) -> None:
    with (
        open_store(tmp_path / "store", capacity=CAPACITY, host_bytes=1 << 16, policy=policy) as store,
        service(tmp_path, store) as node,
    ):
        mine = put_all(node, "a", "ann", range(16))
        share = store.stats().nbytes / CAPACITY
        assert 0.2 < share < 0.45  # within the half of one of two
        theirs = put_all(node, "b", "bob", range(100, 300))
        assert sum(map(sum, (one.sizes for one in theirs))) > 4 * CAPACITY
        assert found(node, "a", mine) == 1
        assert store.stats().nbytes > 0.8 * CAPACITY  # the rest is the other's
        # One that comes later gets its part of what the flood has.
        late = put_all(node, "a", "ann", range(16, 20))
        assert found(node, "a", [*mine, *late]) == 1


def test_a_tenant_alone_may_fill_the_store_and_one_beside_it_gets_its_half(tmp_path: Path) -> None:
    with (
        open_store(tmp_path / "store", capacity=CAPACITY, host_bytes=1 << 16, policy="lru") as store,
        service(tmp_path, store) as node,
    ):
        put_all(node, "b", "bob", range(100, 240))
        assert store.stats().nbytes > 0.9 * CAPACITY
        put_all(node, "a", "ann", range(140))
        sizes = [len(node.snapshot(tenant)[1]) for tenant in ("a", "b")]
        assert 0.8 < sizes[0] / sizes[1] < 1.25


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 3000))
def test_the_largest_are_cut_to_one_level(sizes: list[int], need: int) -> None:
    level = fair_level(sizes, need)
    assert sum(max(0.0, size - level) for size in sizes) == pytest.approx(need, abs=1e-6)
    # Who has no more than its part of what stays is spared.
    part = (sum(sizes) - need) / len(sizes)
    assert all(size <= level or size > part for size in sizes)


def test_a_tenant_that_floods_the_audit_is_refused_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(service_module, "_AUDIT_BYTES", 40_000)
    with service(tmp_path, audit=gate) as node:
        mine, theirs = Given(salt(node), 2), Given(salt(node, "bob"), 8, seed=1)
        results = theirs.put(node, "b", "bob")
        assert results[0] == ""
        assert results[-1] == "busy"
        assert mine.put(node) == ["", ""]
        assert Given(salt(node, "bob"), 1, seed=2).put(node, "b", "bob") == ["busy"]
        gate.open.set()
        assert node.wait_audits(20)
        assert node.match("a", mine.space, mine.keys).blocks == 2


def test_audits_are_made_for_tenants_in_turn(tmp_path: Path) -> None:
    gate, order = Gate(), list[Any]()

    def audit(space: bytes, views: Any) -> bool:
        order.append(views[0].header.key)
        return gate(space, views)

    with service(tmp_path, audit=audit) as node:
        mine, flood = Given(salt(node), 1), [Given(salt(node, "bob"), 40, seed=seed) for seed in range(1, 4)]
        for one in flood:  # 120 blocks, in batches of 32
            one.put(node, "b", "bob")
        mine.put(node)
        gate.open.set()
        assert node.wait_audits(20)
        assert mine.keys[0] in order[:2]
        assert len(order) >= 4


def test_a_put_may_offer_half_of_the_tenant_s_part(tmp_path: Path) -> None:
    with (
        open_store(tmp_path / "store", capacity=CAPACITY, host_bytes=1 << 16, policy="lru") as store,
        service(tmp_path, store) as node,
    ):
        put_all(node, "b", "bob", range(100, 160))
        large = Given(salt(node), 200, seed=1, floats=1000)
        wanted = node.open_put("a", PutRequest(large.space, large.keys, large.sizes, ROOT), user="ann").wanted
        assert 0.2 * CAPACITY < sum(large.sizes[i] for i in wanted) < 0.3 * CAPACITY
