"""The node behind the bus: what it finds, hands out and takes, for whom."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.block.format import parse, rekey
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.transfer.receive import part_offsets
from ctxreuse.errors import ConfigError, LinkDownError, LinkRefusedError, StoreClosedError
from ctxreuse.identity.keys import ROOT, giver_id
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.serve import service as service_module
from ctxreuse.peer.serve.owners import node_secret
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import BlockStore, TieredStore, open_store
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context
from support.tenant_service import Gate, Given, service
from support.waiting import patient

Gate, Given, service = (Gate, Given, service)


def salt(node: Any, user: str = "ann") -> bytes:
    return node.admit(user, bytes(16), ()).salt


def test_the_secret_of_a_node_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    place = tmp_path / "new" / "node.secret"
    secret = node_secret(place)
    assert len(secret) == 32
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert node_secret(place) == secret
    assert node_secret(tmp_path / "other.secret") != secret
    assert [path.name for path in place.parent.iterdir()] == ["node.secret"]
    place.chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        node_secret(place)
    place.chmod(0o600)
    place.write_bytes(b"short")
    with pytest.raises(ConfigError, match="exactly 32 bytes"):
        node_secret(place)
    with pytest.raises(ConfigError, match="created or read"):
        node_secret(place / "below")


def test_the_tenant_comes_from_the_user_and_makes_the_salt(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        ann, other, bob = (node.admit(user, bytes(16), ()) for user in ("ann", "ann-2", "bob"))
        assert (ann.tenant, ann.salt) == (other.tenant, other.salt)
        assert bob.tenant == "b"
        assert bob.salt != ann.salt
        with pytest.raises(LinkRefusedError, match="not allowed"):
            node.admit("eve", bytes(16), ())
    with service(tmp_path) as again:
        assert salt(again) == ann.salt
    with service(tmp_path / "another") as another:
        assert salt(another) != ann.salt


def test_a_new_life_finds_what_each_tenant_gave_before(tmp_path: Path) -> None:
    with TieredStore(1 << 20, BlockStore.open(tmp_path / "store", capacity=8 << 20)) as store:
        with service(tmp_path, store) as node:
            mine = Given(salt(node), 4)
            assert mine.put(node) == [""] * 4
            theirs = Given(salt(node, "bob"), 3, seed=1)
            theirs.put(node, "b", "bob")
        Context(2, seed=9).fill(store)  # of nobody that connects
    store = TieredStore(1 << 20, BlockStore.open(tmp_path / "store", capacity=8 << 20))
    with store, service(tmp_path, store, tenants=["a"]) as node:
        assert node.match("a", mine.space, mine.keys).blocks == 4
        assert len(node.snapshot("a")[1]) == 4
        assert node.match("b", theirs.space, theirs.keys).blocks == 0
        assert node.snapshot("b")[1] == []
        salt(node, "bob")  # becomes known
        assert node.match("b", theirs.space, theirs.keys).blocks == 3
        assert node.match("a", theirs.space, theirs.keys).blocks == 0


def test_changes_are_told_from_any_version(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        mine, theirs = Given(salt(node), 4), Given(salt(node, "bob"), 2, seed=1)
        empty, held = node.snapshot("a")
        assert held == []
        assert node.changes("a", empty) == (empty, [], [])
        mine.put(node)
        version, came, went = node.changes("a", empty)
        assert (came, went) == (mine.keys, [])
        theirs.put(node, "b", "bob")
        assert node.changes("a", version) == (version, [], [])  # not even how much others change
        node.store.drop(mine.keys[2], "evicted")
        later, came, went = node.changes("a", version)
        assert (came, set(went)) == ([], set(mine.keys[2:]))
        assert node.changes("a", empty)[1] == mine.keys[:2]
        assert node.changes("a", later + 1) is None
        assert node.changes("nobody", later) is None
        assert node.snapshot("a")[1] == mine.keys[:2]


def test_what_the_store_evicts_is_not_found_any_more(tmp_path: Path) -> None:
    store = TieredStore(0, BlockStore.open(tmp_path / "store", capacity=64 * 4096))
    with store, service(tmp_path, store) as node:
        node_salt, seen = salt(node), set()
        version = node.snapshot("a")[0]
        for seed in range(8):
            mine = Given(node_salt, 12, seed=seed)
            mine.put(node)
            store.flush(20)
            told = node.changes("a", version)
            assert told is not None
            version, came, went = told
            seen = (seen | set(came)) - set(went)
            assert seen == set(node.snapshot("a")[1]) == {entry.key for entry in store.walk()}
        assert store.stats().evicted > 0


def test_a_source_hands_out_the_bytes_of_the_store(tmp_path: Path) -> None:
    store = TieredStore(0, BlockStore.open(tmp_path / "store", capacity=8 << 20))
    with store, service(tmp_path, store) as node:
        mine = Given(salt(node), 5, floats=1000)
        mine.put(node)
        store.put(mine.keys[4], mine.state(4), kind="state")
        store.flush(20)
        source = node.open_fetch("a", mine.space, mine.keys[1:], state=True)
        assert source.count == 5
        for item, data in enumerate([*mine.blocks[1:], mine.state(4)]):
            offsets = source.parts(item)
            assert offsets == part_offsets(parse(data))
            for start, stop in pairwise(offsets):
                assert bytes(source.read(item, start, stop)) == data[start:stop].tobytes()
            assert bytes(source.read(item, 24, offsets[1] + 8)) == data[24 : offsets[1] + 8].tobytes()
        offsets = source.parts(0)
        pieces = [(item, offsets[1] - 8, offsets[2] - offsets[1] + 8) for item in range(4)]
        together = source.gather([(0, 0, offsets[1]), *pieces], lambda nbytes: memoryview(bytearray(nbytes)))
        parts = [data[offsets[1] - 8 : offsets[2]] for data in mine.blocks[1:]]
        assert bytes(together) == b"".join(map(bytes, [mine.blocks[1][: offsets[1]], *parts]))
        source.close()
        source.close()
        with pytest.raises(LookupError):
            source.parts(0)


def test_a_block_that_goes_or_changes_during_a_fetch_is_a_lookup_error(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        mine = Given(salt(node), 4, floats=20_000)
        mine.put(node)
        source = node.open_fetch("a", mine.space, mine.keys, state=False)
        offsets = source.parts(0)
        for item in (1, 2, 3):
            source.parts(item)
        other = rekey(Context(4, floats=20_000).block(1, fill=3), mine.keys[1], mine.keys[0])
        node.store.put(mine.keys[1], other, replace=True)
        with pytest.raises(LookupError):
            source.read(1, offsets[1], offsets[2])
        node.store.drop(mine.keys[2], "evicted")
        source.read(0, offsets[1], offsets[2])
        for item in (1, 2):
            with pytest.raises(LookupError):
                source.gather([(0, 0, offsets[1]), (item, offsets[1], 8)], lambda nbytes: memoryview(bytearray(nbytes)))
        assert bytes(source.read(0, offsets[1], offsets[2])) == mine.blocks[0][offsets[1] : offsets[2]].tobytes()
        with pytest.raises(LookupError):
            node.open_fetch("a", mine.space, mine.keys, state=False)
        source.close()


@pytest.mark.parametrize("last_first", [False, True])
def test_small_blocks_are_copied_with_their_heads_as_they_were(tmp_path: Path, last_first: bool) -> None:
    with service(tmp_path) as node:
        mine = Given(salt(node), 6)
        mine.put(node)
        source = node.open_fetch("a", mine.space, mine.keys, state=False)
        source.prepare(1 << 20, lambda n: memoryview(bytearray(n)))
        order = [5, 4, 3, 2, 1, 0] if last_first else [0, 1, 2, 3, 4, 5]
        source.parts(order[0])
        for item in order[1:]:
            node.store.drop(mine.keys[item], "evicted")
        for item in order[:4]:  # the three after the first were copied with it
            size = source.parts(item)[-1]
            assert bytes(source.gather([(item, 0, size)], lambda n: memoryview(bytearray(n)))) == bytes(
                mine.blocks[item]
            )
        with pytest.raises(LookupError):
            source.parts(order[4])
        with pytest.raises(LookupError):  # a copy is good for one payload
            source.read(order[1], 0, size)
        source.close()


def test_the_store_learns_of_a_fetch_at_the_next_call_or_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TieredStore(16 << 20)
    seen: list[list[bytes]] = []
    store.on_lookup = lambda keys, tokens: seen.append(list(keys))  # type: ignore[method-assign]
    with service(tmp_path, store) as node:
        mine = Given(salt(node), 3)
        mine.put(node)
        source = node.open_fetch("a", mine.space, mine.keys, state=False)
        assert seen == []
        source.close()
        source.close()
        assert seen == [mine.keys]
        source = node.open_fetch("a", mine.space, mine.keys[:2], state=False)
        node.match("a", mine.space, mine.keys)
        assert seen == [mine.keys, mine.keys[:2]]
        source.close()
        assert len(seen) == 2
        source = node.open_fetch("a", mine.space, mine.keys, state=False)

        def closed(keys: Sequence[bytes]) -> Any:
            raise StoreClosedError("the store was closed")

        with monkeypatch.context() as patched:
            patched.setattr(store, "entries", closed)
            source.close()  # it learns no more, and that is all
        assert len(seen) == 2


def test_states_are_given_at_the_end_of_held_blocks(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        mine = Given(salt(node), 3)

        def give(parent: bytes) -> list[str]:
            data = mine.state(1)
            receiver = node.open_put(
                "a", PutRequest(mine.space, mine.keys[1:2], [data.nbytes], parent, state=True), user="ann"
            )
            return [receiver.put(item, data.data.toreadonly()) for item in receiver.wanted]

        assert give(mine.keys[0]) == []  # its block is not here
        mine.put(node)
        assert give(ROOT) == []
        assert give(mine.keys[0]) == [""]
        assert give(mine.keys[0]) == []
        assert node.match("a", mine.space, mine.keys).state_blocks == 2
        block = node.open_put("a", PutRequest(mine.space, mine.keys[2:3], [4096], mine.keys[1], state=True), user="ann")
        assert block.put(0, mine.blocks[2].data) == "foreign"


def test_only_consecutive_blocks_that_fit_are_wanted(tmp_path: Path) -> None:
    store = TieredStore(10 * 4096)
    with store, service(tmp_path, store) as node:
        mine = Given(salt(node), 8)
        assert (
            node.open_put("a", PutRequest(mine.space, mine.keys[3:], mine.sizes[3:], mine.keys[2]), user="ann").wanted
            == ()
        )
        wanted = node.open_put("a", PutRequest(mine.space, mine.keys, mine.sizes, ROOT), user="ann").wanted
        assert wanted == (0, 1, 2, 3, 4)  # half of the store, so that one context does not push itself out
        store.pin(mine.keys)
        assert mine.put(node) == [""] * 5
        store.pin(mine.keys)
        more = Given(salt(node), 8, seed=1)
        assert set(more.put(node)) <= {"", "full"}
    store.close()


def test_offering_a_key_tells_nothing_of_other_tenants(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        mine = Given(salt(node), 3)
        mine.put(node)
        salt(node, "bob")
        for user, tenant, wanted in (("ann-2", "a", ()), ("bob", "b", (0, 1, 2))):
            assert (
                node.open_put(tenant, PutRequest(mine.space, mine.keys, mine.sizes, ROOT), user=user).wanted == wanted
            )
        assert mine.put(node, "b", "bob")[0] == "foreign"  # even with the very bytes
        assert node.quarantine.reason("bob") == "token ids that do not hash to the key"
        assert len(node.snapshot("a")[1]) == 3


def test_blocks_of_a_space_look_alike(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        assert Given(salt(node), 1).put(node) == [""]
        odd = {"seed": 1, "floats": 65}
        assert Given(salt(node), 1, **odd).put(node, user="ann-2") == ["foreign"]
        # No engine of this model is here to say which of the two is right.
        assert node.quarantine.reason("ann-2") is None
        # What one tenant gives says nothing about what others may.
        assert Given(salt(node, "bob"), 1, **odd).put(node, "b", "bob") == [""]


def test_what_follows_a_block_that_went_is_not_wanted(tmp_path: Path) -> None:
    gate = Gate()
    with service(tmp_path, audit=gate) as node:
        mine = Given(salt(node), 3)
        first = node.open_put("a", PutRequest(mine.space, mine.keys[:1], mine.sizes[:1], ROOT), user="ann")
        assert first.put(0, mine.blocks[0].data.toreadonly()) == ""
        node.store.drop(mine.keys[0], "evicted")  # while it is still withheld
        rest = node.open_put("a", PutRequest(mine.space, mine.keys[1:], mine.sizes[1:], mine.keys[0]), user="ann")
        assert rest.wanted == ()
        gate.open.set()
        assert node.wait_audits(20)
        assert mine.put(node) == [""] * 3
        assert node.quarantine.reason("ann") is None


def test_damage_is_forgiven_a_few_times(tmp_path: Path) -> None:
    with service(tmp_path) as node:
        mine = Given(salt(node), 8)
        good = Given(salt(node), 1, seed=1)
        good.put(node)
        for data in mine.blocks:
            data[parse(data).start] ^= 1
        assert mine.put(node) == ["corrupt"] * 8
        assert node.quarantine.reason("ann") == "corrupt"
        assert node.match("a", good.space, good.keys).blocks == 0
        with pytest.raises(LinkRefusedError, match="quarantine"):
            node.admit("ann", bytes(16), ())
    with service(tmp_path) as again:
        with pytest.raises(LinkRefusedError):
            again.admit("ann", bytes(16), ())
        assert again.quarantine.clear("ann")
        assert again.admit("ann", bytes(16), ()).tenant == "a"


def test_nobody_finds_a_block_before_it_was_audited(tmp_path: Path) -> None:
    gate = Gate()
    with service(tmp_path, audit=gate) as node:
        mine = Given(salt(node), 3)
        first = node.open_put("a", PutRequest(mine.space, mine.keys[:1], mine.sizes[:1], ROOT), user="ann")
        assert first.put(0, mine.blocks[0].data.toreadonly()) == ""
        assert node.match("a", mine.space, mine.keys).blocks == 0
        assert node.snapshot("a")[1] == []
        with pytest.raises(LookupError):
            node.open_fetch("a", mine.space, mine.keys[:1], state=False)
        # What follows may be given meanwhile, and what is here is not wanted twice.
        assert mine.put(node) == ["", ""]
        gate.open.set()
        assert node.wait_audits(20)
        assert node.match("a", mine.space, mine.keys).blocks == 3
        assert sorted(node.snapshot("a")[1]) == sorted(mine.keys)


def test_blocks_that_wait_for_the_audit_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_AUDIT_BYTES", 10_000)
    gate = Gate(sound=False)
    with service(tmp_path, audit=gate) as node:
        mine = Given(salt(node), 4)
        assert mine.put(node) == ["", "", "busy", "busy"]
        gate.open.set()
        assert node.wait_audits(20)
        assert node.match("a", mine.space, mine.keys).blocks == 0
        assert list(node.store.walk()) == []
        assert node.quarantine.reason("ann") is not None


def test_an_audit_that_fails_keeps_nothing_and_blames_nobody(tmp_path: Path) -> None:
    def away(space: bytes, views: Any) -> bool:
        raise LinkDownError("no engine process answers an audit")

    with service(tmp_path, audit=away) as node:
        mine = Given(salt(node), 3)
        assert mine.put(node) == [""] * 3
        assert node.wait_audits(20)
        assert node.match("a", mine.space, mine.keys).blocks == 0
        assert list(node.store.walk()) == []
        assert node.quarantine.reason("ann") is None
        assert node.counts["audit:failed"] == 3
        assert mine.put(node) == [""] * 3  # they may be given again


def test_a_state_is_found_once_it_was_audited(tmp_path: Path) -> None:
    verdicts = {"block": True, "state": True}
    with service(tmp_path, audit=lambda _, views: verdicts[views[0].header.kind]) as node:
        mine = Given(salt(node), 2)
        assert mine.put(node) == [""] * 2

        def give(item: int) -> int:
            assert node.wait_audits(20)
            data, parent = mine.state(item), mine.parent(item)
            request = PutRequest(mine.space, [mine.keys[item]], [data.nbytes], parent, state=True)
            given = node.open_put("a", request, user="ann")
            assert given.put(0, data.data.toreadonly()) == ""
            assert node.wait_audits(20)
            return node.match("a", mine.space, mine.keys).state_blocks

        assert give(0) == 1
        verdicts["state"] = False
        assert give(1) == 0
        assert node.quarantine.reason("ann") is not None


def test_what_was_not_audited_before_the_end_is_not_kept(tmp_path: Path) -> None:
    gate, begun = Gate(), threading.Event()

    def audit(space: bytes, views: Any) -> bool:
        begun.set()
        return bool(gate(space, views))

    with TieredStore(1 << 20) as store:
        node = StoreService(store, tmp_path, ServeOptions(tenant_of={"ann": "a"}.get, audit=audit))
        mine = Given(salt(node), 3)
        first = node.open_put("a", PutRequest(mine.space, mine.keys[:1], mine.sizes[:1], ROOT), user="ann")
        assert first.put(0, mine.blocks[0].data.toreadonly()) == ""
        assert begun.wait(patient(20))
        assert mine.put(node) == ["", ""]
        opening = threading.Timer(0.3, gate.open.set)
        opening.start()
        node.close()
        opening.join()
        assert [entry.key for entry in store.walk()] == mine.keys[:1]


def test_quarantine_outlives_the_process_and_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(1000.0)
    place = tmp_path / "quarantine.json"

    def kept() -> Quarantine:
        return Quarantine(place, seconds=60, clock=clock)

    first = kept()
    first.add("eve", "audit")
    first.add("eve", "audit")
    assert len([line for line in caplog.messages if "eve" in line]) == 1
    clock.advance(59)
    assert kept().reason("eve") == "audit"
    assert list(kept().names()) == ["eve"]
    clock.jump(1e6)
    assert first.reason("eve") == "audit", "a clock that is set while it runs frees nobody"
    clock.jump(1059.0)
    clock.advance(2)
    assert first.reason("eve") is None
    clock.jump(10.0)  # nor does one that was set back between two runs, and it keeps nobody out for longer
    back = kept()
    assert back.reason("eve") == "audit"
    clock.advance(59)
    assert back.reason("eve") == "audit"
    clock.advance(2)
    assert back.reason("eve") is None
    clock.jump(5000.0)
    assert kept().reason("eve") is None
    assert not first.clear("mallory")
    for damage in (b"{", b'{"eve": 3}', b"\xff\xfe", b""):
        place.write_bytes(damage)
        assert kept().reason("eve") is None


def test_what_a_revoked_peer_gave_is_gone_over_restarts(tmp_path: Path) -> None:
    revoked: set[bytes] = set()

    @contextmanager
    def node() -> Iterator[Any]:
        with open_store(tmp_path / "store", capacity=8 << 20) as store:
            options = {"tenants": ["a"], "revoked": lambda: frozenset(revoked)}
            with service(tmp_path, store, **options) as one:
                yield one

    with node() as one:
        lies, honest = Given(salt(one), 3), Given(salt(one), 3, seed=1)
        lies.put(one)
        honest.put(one, user="ann-2")
    with node() as one:  # another process, which has seen nobody give anything
        assert one.match("a", lies.space, lies.keys).blocks == 3
        revoked.add(giver_id(b"ann"))
        assert one.match("a", lies.space, lies.keys).blocks == 0
        assert one.match("a", honest.space, honest.keys).blocks == 3
    with node() as one:
        assert one.match("a", lies.space, lies.keys).blocks == 0
        assert one.match("a", honest.space, honest.keys).blocks == 3
        told = one.withdrawn("a")
        assert {told[at : at + 8] for at in range(0, len(told), 8)} == {key[:8] for key in lies.keys}
        assert one.withdrawn("b") == b""
        lies.put(one, user="ann-2")  # the same keys, given by another
        assert one.match("a", lies.space, lies.keys).blocks == 3


def test_a_liar_loses_what_it_gave_before_the_last_start(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", capacity=8 << 20) as store:
        with service(tmp_path, store) as node:
            before = Given(salt(node), 3)
            before.put(node)
        with service(tmp_path, store, tenants=["a"], audit=lambda space, views: False) as node:
            assert node.match("a", before.space, before.keys).blocks == 3
            Given(salt(node), 2, seed=1).put(node)
            assert node.wait_audits(20)
            assert node.match("a", before.space, before.keys).blocks == 0
            assert len(node.withdrawn("a")) == 8 * 3
        store.flush(20)
        assert list(store.walk()) == []
        assert store.givers() == {}
