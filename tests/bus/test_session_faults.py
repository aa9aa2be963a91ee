"""A client and a server session over a link in memory: refusals, ends, silence, and what a bad peer gets."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctxreuse.bus import wire
from ctxreuse.bus.session import Limits
from ctxreuse.bus.session_client import ClientSession
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Assembly, Outlet
from ctxreuse.errors import LinkDownError, LinkRefusedError, ProtocolError

P = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("session_pair.py"))))
LINK = P.LINK
SPACE = P.SPACE
TOKENS = P.TOKENS
KEYS = P.KEYS
DATA = P.DATA
SIZES = P.SIZES
NODE = P.NODE
node = P.node
assembly = P.assembly
whole = P.whole
said = P.said
server_of = P.server_of
tell = P.tell
client_of = P.client_of


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
