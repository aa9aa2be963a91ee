"""A client and a server session over a link in memory: what each message does, and what a bad peer gets."""

from __future__ import annotations

import runpy
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.bus import wire
from ctxreuse.bus.session import Limits, Request
from ctxreuse.bus.session_client import ClientSession, Stored
from ctxreuse.bus.session_known import Known
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Assembly, Outlet
from ctxreuse.errors import LinkDownError, LinkRefusedError, ProtocolError

LINK = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("memory_link.py"))))
SPACE = LINK.space_of(heads=4, dim=32)
TOKENS = LINK.tokens_of(6 * 4)
BLOCKS = LINK.blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = [data for _, data in BLOCKS]
SIZES = [len(data) for data in DATA]
NODE = LINK.NODE


def node(**options: Any) -> Any:
    return LINK.DictNode(BLOCKS, **options)


def assembly(**options: Any) -> Assembly:
    return Assembly(SPACE, KEYS, TOKENS, **options)


def whole(fetch: Assembly) -> bool:
    return fetch.ended == "" and [bytes(view.buffer) for view in fetch.views(fetch.count)] == DATA[-fetch.count :]


def said(session: ServerSession | ClientSession) -> list[wire.Message]:
    """All messages that a session has to say now."""
    messages = []
    while (frames := session.next(0.0)) is not None:
        messages.append(wire.decode(frames)[0])
    return messages


def server_of(service: Any, **options: Any) -> ServerSession:
    """A server session that a peer has said hello to."""
    server = ServerSession(service, "edge", Outlet(), node=NODE, epoch=7, **options)
    server.opened(0.0)
    tell(server, wire.Hello(1, 1, NODE, max_payload=4096))
    assert isinstance(said(server)[0], wire.Welcome)
    return server


def tell(session: ServerSession | ClientSession, message: wire.Message, payload: bytes | None = None) -> None:
    session.receive(wire.encode(message, payload), 0.0)


def client_of(**options: Any) -> ClientSession:
    """A client session that a cloud has welcomed."""
    client = ClientSession(node=NODE, **options)
    client.opened(0.0)
    assert isinstance(said(client)[0], wire.Hello)
    tell(client, wire.Welcome(1, NODE, 7, LINK.SALT))
    return client


def test_match_and_announcements() -> None:
    wires = LINK.link(node())
    client = wires.client
    assert client.announced(KEYS) is None
    done: list[Request[Any]] = []
    request = client.match(SPACE.digest, [*KEYS, bytes(32)], Request(done.append))
    wires.run()
    assert request.wait(0).blocks == 6
    assert done == [request]
    wires.tick(1)
    wires.run()
    assert client.announced([*KEYS, bytes(32)]) == 6
    assert client.announced([bytes(32)]) == 0
    wires.server.service.evict(KEYS[2])
    wires.tick(1)
    wires.run()
    assert client.announced(KEYS) == 2
    wires.server.service.insert(*BLOCKS[2])
    wires.tick(1)
    wires.run()
    assert client.announced(KEYS) == 6


def test_announcements_go_on_after_a_cut_without_a_snapshot() -> None:
    service = node()
    wires = LINK.link(service)
    wires.tick(1)
    wires.run()
    wires.cut()
    assert wires.client.announced(KEYS) is None
    service.evict(KEYS[5])
    service.held = None  # a snapshot would call it
    wires.connect()
    wires.run()
    assert wires.client.announced(KEYS) == 6  # as last known, until the changes are told
    wires.tick(1)
    wires.run()
    assert wires.client.announced(KEYS) == 5


def test_changes_too_long_ago_mean_a_snapshot() -> None:
    service = node()
    wires = LINK.link(service)
    wires.tick(1)
    wires.run()
    service.evict(KEYS[5])
    service.forgotten = service.version + 1
    wires.tick(1)
    wires.run()
    assert wires.client.announced(KEYS) == 6  # snapshots do not follow one another closely
    wires.tick(1)
    wires.run()
    assert wires.client.announced(KEYS) == 5


def test_a_restarted_cloud_makes_announcements_void() -> None:
    epochs: list[int] = []
    wires = LINK.link(node())
    wires.client._on_epoch = lambda welcome: epochs.append(welcome.epoch)
    wires.tick(1)
    wires.run()
    wires.cut()
    wires.server = ServerSession(LINK.DictNode(), "edge", Outlet(), node=NODE, epoch=8, limits=wires.server.limits)
    fetch = assembly()
    wires.client.fetch(fetch)
    wires.connect()
    wires.run()
    assert epochs == [8]
    assert wires.client.announced(KEYS) is None
    assert fetch.ended == "gone"
    wires.tick(1)
    wires.run()
    assert wires.client.announced(KEYS) == 0


def announce(seq: int, base: int, version: int, part: int = 0, parts: int = 1, added: bytes = b"") -> wire.Announce:
    return wire.Announce(seq, base, version, part, parts, added)


def test_gaps_in_announcements_ask_for_a_snapshot_once() -> None:
    known, one, two = Known(10), b"a" * 8, b"b" * 8
    known.begin(1)
    assert known.apply(announce(1, 0, 5, 0, 2, one))
    assert known.leading([one]) is None
    assert known.apply(announce(2, 0, 5, 1, 2, two))
    assert known.leading([one, two, b"c" * 8]) == 2
    assert not known.apply(announce(4, 5, 7))  # 3 is lost
    assert known.leading([one]) is None
    assert known.apply(announce(5, 7, 8))  # asked already
    assert known.apply(announce(6, 0, 9, 0, 1, one))
    assert known.leading([one, two]) == 1
    assert not known.apply(announce(7, 3, 10))  # on another version
    assert known.apply(announce(8, 0, 9, 0, 3, one))
    assert not known.apply(announce(9, 0, 9, 2, 3, one))  # a part is missing
    known.begin(1)
    assert known.version == 0
    assert not known.apply(announce(1, 9, 10))
    assert known.apply(announce(2, 0, 11, 0, 1, bytes(range(88))))  # 11 prefixes: more than kept
    assert known.leading([one]) is None
    known.check()


def test_a_lost_announcement_is_made_up_for() -> None:
    service = node()
    wires = LINK.link(service)
    wires.tick(1)
    wires.run()
    service.evict(KEYS[5])
    wires.tick(1)
    assert wires.send(wires.server)
    wires.down.clear()
    service.evict(KEYS[4])
    for _ in range(4):
        wires.tick(1)
        wires.run()
    assert wires.client.announced(KEYS) == 4


def test_asking_for_snapshots_again_and_again_gives_few() -> None:
    service = node()
    server = server_of(service)
    held = service.held
    calls: list[str] = []
    service.held = lambda tenant: calls.append(tenant) or held(tenant)
    for step in range(100):
        server.receive(wire.encode(wire.Resync()), step * 0.1)
        server.tick(step * 0.1)
        while server.next(step * 0.1) is not None:
            pass
    assert 1 < len(calls) <= 6


def test_nothing_to_do_is_not_due() -> None:
    """Whoever polls by `due` must not spin: not beside a peer that does not read, not while draining."""
    service = node()
    wires = LINK.link(service)
    wires.tick(1)  # a snapshot is under way, and nobody takes it
    assert wires.server.talks
    assert wires.server.due(wires.now) == pytest.approx(2.0)
    wires.run()
    assert 0 < wires.server.due(wires.now) <= 0.25
    wires.server.drain()
    assert wires.server.due(wires.now + 1) == pytest.approx(1.0)
    for _ in range(3):
        wires.tick(2.0)
        assert wires.client.due(wires.now) > 0
        wires.run()


def test_a_large_snapshot_goes_in_parts_between_payloads() -> None:
    service = node()
    for i in range(10_000):
        service.blocks[i.to_bytes(32, "little")] = b""
    wires = LINK.link(service)
    fetch = assembly()
    wires.client.fetch(fetch)
    while wires.send(wires.client):
        pass
    while wires.deliver(wires.server):
        pass
    wires.tick(1)
    kinds = [type(wire.decode(wires.server.next(wires.now))[0]).__name__ for _ in range(6)]
    assert kinds in (["Announce", "Payload"] * 3, ["Payload", "Announce"] * 3)


@pytest.mark.parametrize("order", ["layers", "tail"])
@pytest.mark.parametrize("state", [False, True])
def test_fetch(order: str, state: bool) -> None:
    service = node()
    service.states[KEYS[-1]] = LINK.state_of(SPACE, TOKENS, KEYS)
    wires = LINK.link(service)
    fetch = assembly(order=order, state=state)
    wires.client.fetch(fetch, payload=5000, window=2)
    wires.run()
    assert whole(fetch)
    held = fetch.state(0)
    assert (held is not None) == state
    assert held is None or bytes(held.buffer) == service.states[KEYS[-1]]
    assert [supply.closed for supply in service.supplies] == [1]
    assert wires.broken == []
    assert wires.client.drained


def test_payloads_are_as_small_as_asked() -> None:
    service = node()
    wires = LINK.link(service, terms=wire.Terms(max_payload=1 << 20))
    for asked, most in ((8192, 8192), (0, 1 << 20), (1, 4096)):
        before = wires.client.counts["payloads_in"]
        fetch = assembly()
        wires.client.fetch(fetch, payload=asked)
        wires.run()
        assert whole(fetch)
        assert wires.client.counts["payloads_in"] - before >= sum(SIZES) / most
    assert wires.client.counts["payloads_in"] > 6 * SIZES[0] // 4096
    # What the other side takes at most counts as well, whoever of the two is more modest.
    small = ClientSession(node=NODE, limits=Limits(terms=wire.Terms(max_payload=4096)))
    large = ServerSession(service, "edge", Outlet(), node=NODE, epoch=7)
    modest = LINK.Wires(small, large)
    modest.connect()
    fetch = assembly()
    small.fetch(fetch)
    put = small.put(SPACE.digest, [bytes(32)], [SIZES[0]], lambda _: DATA[0], payload=1 << 20)
    modest.run()
    assert whole(fetch)
    assert put.wait(0).refused == {0: "foreign"}
    assert modest.broken == []
    assert large.counts["payloads_in"] >= SIZES[0] / 4096


@pytest.mark.parametrize("order", ["layers", "tail"])
def test_a_fetch_survives_a_cut_at_every_payload(order: str) -> None:
    wires = LINK.link(node())
    fetch = assembly(order=order)
    wires.client.fetch(fetch, window=3)
    while fetch.ended is None:
        before = fetch.received
        while fetch.received == before:
            wires.send(wires.client)
            wires.deliver(wires.server)
            wires.send(wires.server)
            wires.deliver(wires.client)
        wires.cut()
        wires.connect()
        wires.check()
    assert whole(fetch)
    assert fetch.duplicates == 0
    assert wires.client.counts["resumes"] > 20
    assert wires.client.counts["bytes_in"] == sum(SIZES)


def test_a_fetch_is_opened_again_by_the_next_round_naming_what_is_here() -> None:
    client = client_of()
    fetch, unwanted = assembly(), assembly()
    unwanted.stop()
    client.fetch(unwanted)
    assert said(client) == []
    client.fetch(fetch, window=3)
    (opened,) = said(client)
    tell(client, wire.Payload(1, 1, ((0, 0, 4000), (1, 0, 100))), DATA[0][:4000] + DATA[1][:100])
    client.lost(0.0)
    client.opened(0.0)
    tell(client, wire.Welcome(1, NODE, 7, LINK.SALT))
    _, again = said(client)
    assert isinstance(opened, wire.Fetch)
    assert isinstance(again, wire.Fetch)
    assert (opened.id, opened.round, opened.have, opened.credit) == (1, 1, (), 3)
    assert (again.id, again.round, again.credit, again.keys) == (1, 2, 3, opened.keys)
    assert again.have == ((0, 4000, DATA[0][24:32]), (1, 100, DATA[1][24:32]))
    tell(client, wire.Payload(1, 1, ((0, 4000, 10),)), DATA[0][4000:4010])  # of the connection before
    assert client.counts["ignored"] == 1
    assert fetch.received == 4100


def test_a_fetch_that_never_gets_anything_is_given_up() -> None:
    wires = LINK.link(node(), limits=Limits(rounds=5))
    fetch = assembly()
    wires.client.fetch(fetch)
    for _ in range(7):
        wires.send(wires.client)
        wires.cut()
        wires.connect()
        wires.send(wires.client)
        wires.deliver(wires.server)
        wires.send(wires.server)
        wires.deliver(wires.client)
    assert fetch.ended == "no progress"
    assert wires.client.drained


def test_a_block_made_anew_is_not_mixed_with_the_old_one() -> None:
    service = node()
    wires = LINK.link(service)
    fetch = assembly()
    wires.client.fetch(fetch, window=2)
    for _ in range(8):
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    assert 0 < fetch.received < sum(SIZES)
    wires.cut()
    service.blocks.update(LINK.blocks_of(SPACE, TOKENS, seed=99))
    wires.connect()
    wires.run()
    assert fetch.ended == "changed"


def test_a_lost_payload_breaks_the_link_and_is_sent_after_it() -> None:
    wires = LINK.link(node())
    fetch = assembly()
    wires.client.fetch(fetch)
    wires.send(wires.client), wires.deliver(wires.server)
    for _ in range(4):
        wires.send(wires.server)
    del wires.down[2]
    wires.run()
    assert len(wires.broken) == 1
    wires.connect()
    wires.run()
    assert whole(fetch)


def test_the_last_payload_lost_is_noticed() -> None:
    wires = LINK.link(node())
    fetch = Assembly(SPACE, KEYS[:1], TOKENS[:4])
    wires.client.fetch(fetch, window=99)
    wires.send(wires.client), wires.deliver(wires.server)
    while wires.send(wires.server):
        pass
    del wires.down[-2]
    wires.run()
    assert "1 of" in wires.broken[0].what
    wires.connect()
    wires.run()
    assert fetch.ended == ""


def test_more_fetches_than_the_terms_allow_wait_their_turn() -> None:
    wires = LINK.link(node(), terms=wire.Terms(max_payload=4096, transfers=2))
    fetches = [assembly() for _ in range(7)]
    for fetch in fetches:
        wires.client.fetch(fetch)
    wires.run()
    assert all(whole(fetch) for fetch in fetches)
    assert wires.client.counts["ignored"] == 0


def test_requests_made_while_the_link_is_down_wait_for_it() -> None:
    wires = LINK.link(node())
    wires.cut()
    fetch, request = assembly(), wires.client.match(SPACE.digest, KEYS)
    wires.client.fetch(fetch)
    with pytest.raises(LinkDownError, match="no answer within"):
        request.wait(0)
    wires.connect()
    wires.run()
    assert request.wait(0).blocks == 6
    assert whole(fetch)


def test_stop_and_cancel_free_the_server() -> None:
    service = node()
    wires = LINK.link(service)
    stopped, cancelled = assembly(), assembly()
    wires.client.fetch(stopped, window=1)
    wires.client.fetch(cancelled, window=1)
    request = wires.client.match(SPACE.digest, KEYS)
    for _ in range(4):
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    stopped.stop()
    wires.client.cancel(cancelled)
    wires.client.cancel(request)
    wires.tick(1)
    wires.run()
    assert stopped.ended == "stopped"
    assert cancelled.ended == "cancelled"
    assert isinstance(request.error, LinkDownError) or request.done
    assert [supply.closed for supply in service.supplies] == [1, 1]
    assert len(wires.server.outlet) == 0


def test_put() -> None:
    service = LINK.DictNode(BLOCKS[:2])
    wires = LINK.link(service)
    request = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    other = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    wires.run()
    assert request.wait(0) == Stored((2, 3, 4, 5), (0, 1), {})
    assert other.wait(0) == Stored((), (0, 1, 2, 3, 4, 5), {})
    assert service.blocks == dict(BLOCKS)
    assert [intake.closed for intake in service.intakes] == [1, 1]


def test_many_small_blocks_share_a_payload_of_a_put() -> None:
    service = LINK.DictNode()
    wires = LINK.link(service, terms=wire.Terms(max_payload=1 << 20))
    request = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    wires.run()
    assert request.wait(0).taken == (0, 1, 2, 3, 4, 5)
    assert wires.client.counts["payloads_out"] == 1
    assert service.blocks == dict(BLOCKS)


def test_a_put_keeps_few_blocks_in_memory() -> None:
    wires = LINK.link(LINK.DictNode())
    given: list[weakref.ref[Any]] = []

    def read(item: int) -> Any:
        block = np.frombuffer(DATA[item], np.uint8).copy()
        given.append(weakref.ref(block))
        return block

    request = wires.client.put(SPACE.digest, KEYS, SIZES, read)
    while wires.send(wires.client) or wires.send(wires.server):
        while wires.deliver(wires.client) or wires.deliver(wires.server):
            pass
        assert sum(block() is not None for block in given) <= 2
    assert request.done
    assert len(given) == 6


def test_a_state_is_put_alone() -> None:
    service, state = node(), LINK.state_of(SPACE, TOKENS, KEYS)
    wires = LINK.link(service)
    request = wires.client.put(SPACE.digest, KEYS[-1:], [len(state)], lambda _: state, parent=KEYS[-2], state=True)
    wires.run()
    assert request.wait(0).taken == (0,)
    assert service.states == {KEYS[-1]: state}


def test_a_put_survives_cuts_and_sends_no_whole_block_twice() -> None:
    service = LINK.DictNode()
    wires = LINK.link(service)
    request = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    for step in range(200):
        if step % 9 == 8:
            assert step > 20 or not request.done
            wires.cut()
            wires.connect()
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
        wires.check()
    wires.run()
    result = request.wait(0)
    assert not result.refused
    assert sorted(result.taken + result.present) == list(range(6))
    assert service.blocks == dict(BLOCKS)
    assert wires.server.counts["opened"] > 4
    assert wires.server.counts["bytes_in"] <= sum(SIZES) + wires.server.counts["opened"] * SIZES[0]


def test_what_the_cloud_does_not_take_is_said() -> None:
    wires = LINK.link(LINK.DictNode(capacity=3))
    flipped = bytearray(DATA[1])
    flipped[SIZES[1] // 2] ^= 1

    def read(item: int) -> bytes:
        if item == 4:
            raise KeyError(item)
        return {1: bytes(flipped), 5: b"short"}.get(item, DATA[item])

    request = wires.client.put(SPACE.digest, KEYS, SIZES, read)
    wires.run()
    assert request.wait(0) == Stored((0, 2, 3), (), {1: "corrupt", 4: "gone", 5: "gone"})
    request = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    wires.run()
    assert request.wait(0).refused == {1: "full", 4: "full", 5: "full"}


def test_prefill_streams_blocks_as_they_are_made() -> None:
    service = LINK.DictNode()
    wires = LINK.link(service)
    fetch = Assembly(SPACE, KEYS[2:], TOKENS[8:], first=2, parent=KEYS[1])
    wires.client.prefill(fetch, TOKENS)
    wires.run()
    (supply, tokens, first) = service.jobs[0]
    assert (list(tokens), first) == (list(TOKENS), 2)
    for i in range(4):
        assert fetch.received == sum(SIZES[2 : 2 + i])
        supply.make(i, DATA[2 + i])
        wires.run()
    assert whole(fetch)
    assert supply.closed == 1


def test_a_prefill_that_waits_is_not_stalled_and_may_fail() -> None:
    service = LINK.DictNode()
    wires = LINK.link(service)
    fetch = assembly()
    wires.client.prefill(fetch, TOKENS)
    wires.run()
    for _ in range(200):
        wires.tick(1)
        wires.run()
    assert fetch.ended is None
    service.jobs[0][0].make(0, DATA[0])
    service.jobs[0][0].make(1, b"")
    wires.run()
    assert fetch.received == SIZES[0]
    assert fetch.ended == "gone"


def test_refusals_name_their_reason() -> None:
    service = node()
    wires = LINK.link(service)
    gone = Assembly(SPACE, [bytes(32)], TOKENS[:4])
    wires.client.fetch(gone)
    service.refuse = "too many wait"
    full = assembly()
    wires.client.prefill(full, TOKENS)
    wires.run()
    assert gone.ended == "gone"
    assert full.ended == "busy"
    large = wires.client.put(SPACE.digest, KEYS[:1], [1 << 33], DATA.__getitem__)
    wires.run()
    with pytest.raises(LinkRefusedError, match="block of"):
        large.wait(0)
    nameless = assembly()
    wires.client.fetch(nameless)
    wires.client.receive(wire.encode(wire.Refused(4, "")), wires.now)
    assert nameless.ended == "failed"  # "" would say that all is here
    wires.client.check()


def test_an_unknown_peer_is_refused_and_dead() -> None:
    service = node()
    service.refuse = "this key is not admitted"
    wires = LINK.link(service)
    assert not wires.client.up
    assert wires.client.dead
    assert wires.server.dead
    assert wires.client.refused is not None
    assert wires.client.refused.what == "this key is not admitted"
    service.refuse = ""
    wires.cut()
    wires.connect()
    wires.run()
    assert wires.client.up
    assert wires.client.refused is None


def test_versions_are_negotiated_or_both_are_named() -> None:
    server = ServerSession(node(), "edge", Outlet(), node=NODE, epoch=7)
    server.opened(0.0)
    tell(server, wire.Hello(1, 3, NODE))  # a newer program that still speaks this version
    welcome = said(server)[0]
    assert isinstance(welcome, wire.Welcome)
    assert welcome.version == 1
    hello = bytes(wire.encode(wire.Hello(2, 3, NODE))[0])
    server.receive([hello[:4] + (3).to_bytes(2, "little") + hello[6:]], 0.0)
    (refused,) = said(server)
    assert isinstance(refused, wire.Refused)
    assert "version 1" in refused.text
    assert "2 to 3" in refused.text
    assert server.dead
    client = ClientSession(node=NODE)
    client.opened(0.0)
    said(client)
    tell(client, refused)
    assert client.dead
    assert client.refused is not None
    assert client.refused.where == "version"
    other = client_of()
    other.opened(0.0)
    with pytest.raises(ProtocolError, match="before welcome"):
        tell(other, wire.Pong(1))
    with pytest.raises(ProtocolError, match="chose version 2"):
        tell(other, wire.Welcome(2, NODE, 1, LINK.SALT))


def test_drain_ends_what_runs_and_refuses_what_is_new() -> None:
    wires = LINK.link(node())
    running, late = assembly(), assembly()
    wires.client.fetch(running, window=1)
    for _ in range(3):
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    wires.client.fetch(late)
    wires.server.drain("going down")
    wires.server.drain("going down")
    assert not wires.server.drained
    wires.run()
    assert whole(running)
    assert late.ended == "drain"
    assert wires.client.draining == "going down"
    after = assembly()
    wires.client.fetch(after)
    assert after.ended == "drain"
    with pytest.raises(LinkDownError, match="drain"):
        wires.client.match(SPACE.digest, KEYS).wait(0)
    assert wires.server.drained
    wires.cut()
    wires.connect()
    wires.run()
    assert wires.client.refused is not None
    assert wires.client.refused.where == "drain"


def test_a_drain_whose_time_is_up_says_so() -> None:
    service = node()
    wires = LINK.link(service)
    fetch = assembly()
    wires.client.fetch(fetch, window=1)
    wires.send(wires.client), wires.deliver(wires.server)
    wires.server.close()
    wires.run()
    assert fetch.ended == "drain"
    assert service.supplies[0].closed == 1


def test_bye_of_the_edge_lets_its_requests_finish() -> None:
    wires = LINK.link(node())
    fetch = assembly()
    wires.client.fetch(fetch)
    wires.client.bye("sleep")
    late = assembly()
    wires.client.fetch(late)
    assert late.ended == "drain"
    wires.run()
    assert whole(fetch)
    assert wires.client.drained
    wires.tick(1)
    assert wires.server.dead
    assert wires.server.reason == "bye"


def test_close_ends_everything() -> None:
    wires = LINK.link(node())
    fetch = assembly()
    wires.client.fetch(fetch)
    put = wires.client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    wires.client.close("closed")
    assert fetch.ended == "closed"
    with pytest.raises(LinkDownError, match="closed"):
        put.wait(0)
    wires.run()
    assert len(wires.server.outlet) == 0


def test_heartbeat_measures_the_round_trip() -> None:
    wires = LINK.link(node())
    assert wires.client.due(wires.now) <= 2.0
    wires.tick(2.0)
    wires.send(wires.client)
    wires.now += 0.04
    wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    assert wires.client.rtt == pytest.approx(0.04)


def test_silence_is_death_on_both_sides() -> None:
    wires = LINK.link(node())
    for _ in range(12):
        wires.tick(1.0)
        wires.send(wires.client)
        wires.up.clear()
        wires.send(wires.server)
        wires.down.clear()
    assert wires.client.dead
    assert wires.client.reason == "silent"
    assert wires.server.dead
    wires.cut()
    wires.connect()
    assert not wires.client.dead
    wires.run()
    assert wires.client.up


def test_clock_jumps_kill_nothing() -> None:
    wires = LINK.link(node())
    fetch = assembly()
    wires.client.fetch(fetch, window=1)
    for jump in (1e9, -2e9, 3600.0, 0.0, -0.001, 1e12):
        wires.tick(jump)
        assert wires.client.due(wires.now) <= 2.0
        assert wires.server.due(wires.now) <= 2.0
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
        assert not wires.client.dead
        assert not wires.server.dead
        assert wires.client.rtt is None or 0 <= wires.client.rtt <= 4.1
    wires.run()
    assert whole(fetch)


def test_a_peer_that_never_grants_credit_is_ended_and_costs_little() -> None:
    service = node()
    server = server_of(service, limits=Limits(stall=5.0))
    for number in range(1, 40):
        tell(server, wire.Fetch(number, 1, SPACE.digest, b"".join(KEYS)))
    refused = said(server)
    assert [message.code for message in refused if isinstance(message, wire.Refused)] == ["busy"] * 7
    for second in range(8):
        server.receive(wire.encode(wire.Ping(second)), second)
        server.tick(float(second))
        server.check()
    stalled = [message for message in said(server) if isinstance(message, wire.Refused)]
    assert {message.code for message in stalled} == {"stalled"}
    assert len(stalled) == 32
    assert all(supply.closed == 1 for supply in service.supplies)


def test_a_peer_that_never_reads_is_dead_at_the_bound() -> None:
    server = server_of(node(), limits=Limits(queue=50))
    for number in range(1, 1000):
        tell(server, wire.Match(number, SPACE.digest, b"".join(KEYS)))
        server.check()
    assert server.dead
    assert server.reason == "does not read"


def test_credit_beyond_the_terms_is_a_violation() -> None:
    server = server_of(node())
    with pytest.raises(ProtocolError, match="credit of 257"):
        tell(server, wire.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=257))
    tell(server, wire.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=1))
    with pytest.raises(ProtocolError, match="credit up to 300"):
        tell(server, wire.Credit(1, 1, 300))
    tell(server, wire.Credit(1, 7, 300))  # of another round
    assert server.counts["ignored"] == 1


def test_blocks_that_are_asked_for_at_once_are_bounded() -> None:
    service = node()
    server = server_of(service)
    row = KEYS[0] * wire.MAX_KEYS
    tell(server, wire.Fetch(1, 1, SPACE.digest, row))
    tell(server, wire.Fetch(2, 1, SPACE.digest, KEYS[0]))
    refused = said(server)[-1]
    assert isinstance(refused, wire.Refused)
    assert (refused.id, refused.code) == (2, "busy")
    assert [supply.closed for supply in service.supplies] == [0, 1]
    tell(server, wire.Cancel(1))
    tell(server, wire.Fetch(3, 1, SPACE.digest, row))
    assert said(server) == []


def test_a_fetch_said_twice_is_one_and_a_newer_round_replaces_it() -> None:
    service = node()
    server = server_of(service)
    opened = wire.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=1)
    tell(server, opened)
    tell(server, opened)
    assert len(service.supplies) == 1
    tell(server, wire.Fetch(1, 2, SPACE.digest, b"".join(KEYS), credit=1))
    assert [supply.closed for supply in service.supplies] == [1, 0]
    payload = said(server)[0]
    assert isinstance(payload, wire.Payload)
    assert payload.round == 2
    tell(server, wire.Hello(1, 1, NODE))  # the same peer, back on the same transport
    assert [supply.closed for supply in service.supplies] == [1, 1]


@pytest.mark.parametrize(
    "pieces",
    [((0, 1, 10),), ((1, 0, 10),), ((0, 0, SIZES[0] + 1),), ((7, 0, 10),), ((0, 0, 10), (0, 5, 10))],
)
def test_puts_out_of_turn_are_violations(pieces: tuple[tuple[int, int, int], ...]) -> None:
    server = server_of(LINK.DictNode(), limits=Limits(terms=wire.Terms(max_payload=1 << 20)))
    tell(server, wire.Put(1, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    with pytest.raises(ProtocolError):
        tell(server, wire.Payload(1, 1, pieces), bytes(sum(piece[2] for piece in pieces)))
    server.check()


def test_puts_beyond_credit_or_terms_are_violations() -> None:
    server = server_of(LINK.DictNode(), limits=Limits(terms=wire.Terms(max_payload=4096, puts=1)))
    tell(server, wire.Put(1, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    tell(server, wire.Put(2, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    want, busy = said(server)
    assert isinstance(want, wire.Want)
    assert isinstance(busy, wire.Refused)
    assert busy.code == "busy"
    with pytest.raises(ProtocolError, match="5000 bytes"):
        tell(server, wire.Payload(1, 1, ((0, 0, 5000),)), DATA[0][:5000])
    for i in range(3):  # the large one counted
        tell(server, wire.Payload(1, 1, ((0, 100 * i, 100),)), DATA[0][100 * i : 100 * i + 100])
    with pytest.raises(ProtocolError, match="with credit for 4"):
        tell(server, wire.Payload(1, 1, ((0, 300, 100),)), DATA[0][300:400])
    with pytest.raises(ProtocolError, match="cannot be skipped"):
        tell(server, wire.Skip(1, 1, 17))


def test_what_only_the_other_side_says_is_a_violation() -> None:
    for message in (wire.Pong(1), wire.Matched(1, 0, 0), wire.Want(1, 1, ())):
        with pytest.raises(ProtocolError, match="an edge sends no"):
            tell(server_of(node()), message)
    for message in (wire.Ping(1), wire.Match(1, SPACE.digest, KEYS[0]), wire.Resync()):
        with pytest.raises(ProtocolError, match="a cloud sends no"):
            tell(client_of(), message)
    server = ServerSession(node(), "edge", Outlet(), node=NODE, epoch=7)
    server.opened(0.0)
    with pytest.raises(ProtocolError, match="before hello"):
        tell(server, wire.Ping(1))


def test_a_cloud_that_lies_is_found_out() -> None:
    client = client_of()
    client.match(SPACE.digest, KEYS)
    with pytest.raises(ProtocolError, match="7 of 6 blocks"):
        tell(client, wire.Matched(1, 7, 0))
    fetch = assembly()
    client.fetch(fetch, window=1)
    tell(client, wire.Payload(99, 1, ((0, 0, 4),)), b"what")
    assert client.counts["ignored"] == 1
    tell(client, wire.Payload(2, 1, ((0, 0, 4000),)), DATA[0][:4000])
    with pytest.raises(ProtocolError, match="credit for 1"):  # more was not granted yet
        tell(client, wire.Payload(2, 1, ((0, 4000, 1000),)), DATA[0][4000:5000])
    client.fetch(other := assembly(), window=1)
    tell(client, wire.Payload(3, 1, ((0, 0, 4000),)), DATA[0][:4000])
    assert wire.Credit(3, 1, 2) in said(client)
    tell(client, wire.Payload(3, 1, ((0, 4000, 1000),)), DATA[0][4000:5000])
    tell(client, wire.Payload(3, 9, ((0, 5000, 1000),)), DATA[0][5000:6000])  # of another round
    assert client.counts["ignored"] == 2
    assert other.received == 5000
    wrong = assembly()
    client.fetch(wrong)
    with pytest.raises(ProtocolError, match="not asked for"):
        tell(client, wire.Payload(4, 1, ((0, 0, 4000),)), DATA[1][:4000])
    assert wrong.ended == "foreign"
    put = client.put(SPACE.digest, KEYS, SIZES, DATA.__getitem__)
    with pytest.raises(ProtocolError, match="wants block 17"):
        tell(client, wire.Want(5, 1, (0, 17)))
    with pytest.raises(ProtocolError, match="not given"):
        tell(client, wire.Stored(5, 1, 3))
    assert not put.done
    short = Assembly(SPACE, KEYS, TOKENS)
    client.fetch(short)
    tell(client, wire.Done(6, 1, 0))  # nothing was lost, the cloud just stops
    assert short.ended == "short"


def test_the_number_of_requests_of_a_client_is_bounded() -> None:
    client = ClientSession(node=NODE, limits=Limits(queue=3))
    requests = [client.match(SPACE.digest, KEYS) for _ in range(4)]
    assert [request.done for request in requests] == [False, False, False, True]
    with pytest.raises(LinkDownError, match="busy"):
        requests[3].wait(0)
    with pytest.raises(ValueError, match="sizes for"):
        client.put(SPACE.digest, KEYS, SIZES[:2], DATA.__getitem__)
