"""A client and a server session over a link in memory: refusals, ends, silence, and what a bad peer gets."""

from __future__ import annotations

import pytest

from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import LinkDownError, LinkRefusedError, ProtocolError
from support.memory_link import SALT, DictNode, link
from support.session_pair import (
    DATA,
    KEYS,
    NODE,
    SIZES,
    SPACE,
    TOKENS,
    buffer,
    client_of,
    node,
    said,
    server_of,
    tell,
    whole,
)


def test_refusals_name_their_reason() -> None:
    service = node()
    wires = link(service)
    gone = FetchBuffer(FetchRequest(SPACE, TOKENS[:4]), [bytes(32)])
    wires.client.fetch(gone)
    service.refuse = "too many wait"
    full = buffer()
    wires.client.fetch(full, compute=True)
    wires.run()
    assert gone.ended == "gone"
    assert full.ended == "busy"
    large = wires.client.put(PutRequest(SPACE.digest, KEYS[:1], [1 << 33]), DATA.__getitem__)
    wires.run()
    with pytest.raises(LinkRefusedError, match="block of"):
        large.wait(0)
    nameless = buffer()
    wires.client.fetch(nameless)
    wires.client.receive(wire.encode(messages.Refused(4, "")), wires.now)
    assert nameless.ended == "failed"  # "" would say that all is here
    wires.client.check()


def test_an_unknown_peer_is_refused_and_dead() -> None:
    service = node()
    service.refuse = "this key is not admitted"
    wires = link(service)
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
    server = ServerSession(node(), "edge", SendScheduler(), node=NODE, epoch=7)
    server.opened(0.0)
    tell(server, messages.Hello(1, 3, NODE))  # a newer program that still speaks this version
    welcome = said(server)[0]
    assert isinstance(welcome, messages.Welcome)
    assert welcome.version == 1
    hello = bytes(wire.encode(messages.Hello(2, 3, NODE))[0])
    server.receive([hello[:4] + (3).to_bytes(2, "little") + hello[6:]], 0.0)
    (refused,) = said(server)
    assert isinstance(refused, messages.Refused)
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
        tell(other, messages.Pong(1))
    with pytest.raises(ProtocolError, match="chose version 2"):
        tell(other, messages.Welcome(2, NODE, 1, SALT))


def test_drain_ends_what_runs_and_refuses_what_is_new() -> None:
    wires = link(node())
    running, late = buffer(), buffer()
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
    after = buffer()
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
    wires = link(service)
    fetch = buffer()
    wires.client.fetch(fetch, window=1)
    wires.send(wires.client), wires.deliver(wires.server)
    wires.server.close()
    wires.run()
    assert fetch.ended == "drain"
    assert service.sources[0].closed == 1


def test_bye_of_the_edge_lets_its_requests_finish() -> None:
    wires = link(node())
    fetch = buffer()
    wires.client.fetch(fetch)
    wires.client.bye("sleep")
    late = buffer()
    wires.client.fetch(late)
    assert late.ended == "drain"
    wires.run()
    assert whole(fetch)
    assert wires.client.drained
    wires.tick(1)
    assert wires.server.dead
    assert wires.server.reason == "bye"


def test_close_ends_everything() -> None:
    wires = link(node())
    fetch = buffer()
    wires.client.fetch(fetch)
    put = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    wires.client.close("closed")
    assert fetch.ended == "closed"
    with pytest.raises(LinkDownError, match="closed"):
        put.wait(0)
    wires.run()
    assert len(wires.server.scheduler) == 0


def test_heartbeat_measures_the_round_trip() -> None:
    wires = link(node())
    assert wires.client.due(wires.now) <= 2.0
    wires.tick(2.0)
    wires.send(wires.client)
    wires.now += 0.04
    wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    assert wires.client.rtt == pytest.approx(0.04)


def test_silence_is_death_on_both_sides() -> None:
    wires = link(node())
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
    wires = link(node())
    fetch = buffer()
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
        tell(server, messages.Fetch(number, 1, SPACE.digest, b"".join(KEYS)))
    refused = said(server)
    assert [message.code for message in refused if isinstance(message, messages.Refused)] == ["busy"] * 7
    for second in range(8):
        server.receive(wire.encode(messages.Ping(second)), second)
        server.tick(float(second))
        server.check()
    stalled = [message for message in said(server) if isinstance(message, messages.Refused)]
    assert {message.code for message in stalled} == {"stalled"}
    assert len(stalled) == 32
    assert all(source.closed == 1 for source in service.sources)


def test_a_peer_that_never_reads_is_dead_at_the_bound() -> None:
    server = server_of(node(), limits=Limits(queue=50))
    for number in range(1, 1000):
        tell(server, messages.Match(number, SPACE.digest, b"".join(KEYS)))
        server.check()
    assert server.dead
    assert server.reason == "does not read"


def test_credit_beyond_the_terms_is_a_violation() -> None:
    server = server_of(node())
    with pytest.raises(ProtocolError, match="credit of 257"):
        tell(server, messages.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=257))
    tell(server, messages.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=1))
    with pytest.raises(ProtocolError, match="credit up to 300"):
        tell(server, messages.Credit(1, 1, 300))
    tell(server, messages.Credit(1, 7, 300))  # of another round
    assert server.counts["ignored"] == 1


def test_blocks_that_are_asked_for_at_once_are_bounded() -> None:
    service = node()
    server = server_of(service)
    row = KEYS[0] * messages.MAX_KEYS
    tell(server, messages.Fetch(1, 1, SPACE.digest, row))
    tell(server, messages.Fetch(2, 1, SPACE.digest, KEYS[0]))
    refused = said(server)[-1]
    assert isinstance(refused, messages.Refused)
    assert (refused.id, refused.code) == (2, "busy")
    assert [source.closed for source in service.sources] == [0, 1]
    tell(server, messages.Cancel(1))
    tell(server, messages.Fetch(3, 1, SPACE.digest, row))
    assert said(server) == []


def test_a_fetch_said_twice_is_one_and_a_newer_round_replaces_it() -> None:
    service = node()
    server = server_of(service)
    opened = messages.Fetch(1, 1, SPACE.digest, b"".join(KEYS), credit=1)
    tell(server, opened)
    tell(server, opened)
    assert len(service.sources) == 1
    tell(server, messages.Fetch(1, 2, SPACE.digest, b"".join(KEYS), credit=1))
    assert [source.closed for source in service.sources] == [1, 0]
    payload = said(server)[0]
    assert isinstance(payload, messages.Payload)
    assert payload.round == 2
    tell(server, messages.Hello(1, 1, NODE))  # the same peer, back on the same transport
    assert [source.closed for source in service.sources] == [1, 1]


@pytest.mark.parametrize(
    "pieces",
    [((0, 1, 10),), ((1, 0, 10),), ((0, 0, SIZES[0] + 1),), ((7, 0, 10),), ((0, 0, 10), (0, 5, 10))],
)
def test_puts_out_of_turn_are_violations(pieces: tuple[tuple[int, int, int], ...]) -> None:
    server = server_of(DictNode(), limits=Limits(terms=messages.Terms(max_payload=1 << 20)))
    tell(server, messages.Put(1, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    with pytest.raises(ProtocolError):
        tell(server, messages.Payload(1, 1, pieces), bytes(sum(piece[2] for piece in pieces)))
    server.check()


def test_puts_beyond_credit_or_terms_are_violations() -> None:
    server = server_of(DictNode(), limits=Limits(terms=messages.Terms(max_payload=4096, puts=1)))
    tell(server, messages.Put(1, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    tell(server, messages.Put(2, 1, SPACE.digest, bytes(32), b"".join(KEYS), tuple(SIZES)))
    want, busy = said(server)
    assert isinstance(want, messages.Want)
    assert isinstance(busy, messages.Refused)
    assert busy.code == "busy"
    with pytest.raises(ProtocolError, match="5000 bytes"):
        tell(server, messages.Payload(1, 1, ((0, 0, 5000),)), DATA[0][:5000])
    for i in range(3):  # the large one counted
        tell(server, messages.Payload(1, 1, ((0, 100 * i, 100),)), DATA[0][100 * i : 100 * i + 100])
    with pytest.raises(ProtocolError, match="with credit for 4"):
        tell(server, messages.Payload(1, 1, ((0, 300, 100),)), DATA[0][300:400])
    with pytest.raises(ProtocolError, match="cannot be skipped"):
        tell(server, messages.Skip(1, 1, 17))


def test_what_only_the_other_side_says_is_a_violation() -> None:
    for message in (messages.Pong(1), messages.Matched(1, 0, 0), messages.Want(1, 1, ())):
        with pytest.raises(ProtocolError, match="an edge sends no"):
            tell(server_of(node()), message)
    for message in (messages.Ping(1), messages.Match(1, SPACE.digest, KEYS[0]), messages.Resync()):
        with pytest.raises(ProtocolError, match="a cloud sends no"):
            tell(client_of(), message)
    server = ServerSession(node(), "edge", SendScheduler(), node=NODE, epoch=7)
    server.opened(0.0)
    with pytest.raises(ProtocolError, match="before hello"):
        tell(server, messages.Ping(1))


def test_a_cloud_that_lies_is_found_out() -> None:
    client = client_of()
    client.match(SPACE.digest, KEYS)
    with pytest.raises(ProtocolError, match="7 of 6 blocks"):
        tell(client, messages.Matched(1, 7, 0))
    fetch = buffer()
    client.fetch(fetch, window=1)
    tell(client, messages.Payload(99, 1, ((0, 0, 4),)), b"what")
    assert client.counts["ignored"] == 1
    tell(client, messages.Payload(2, 1, ((0, 0, 4000),)), DATA[0][:4000])
    with pytest.raises(ProtocolError, match="credit for 1"):  # more was not granted yet
        tell(client, messages.Payload(2, 1, ((0, 4000, 1000),)), DATA[0][4000:5000])
    client.fetch(other := buffer(), window=1)
    tell(client, messages.Payload(3, 1, ((0, 0, 4000),)), DATA[0][:4000])
    assert messages.Credit(3, 1, 2) in said(client)
    tell(client, messages.Payload(3, 1, ((0, 4000, 1000),)), DATA[0][4000:5000])
    tell(client, messages.Payload(3, 9, ((0, 5000, 1000),)), DATA[0][5000:6000])  # of another round
    assert client.counts["ignored"] == 2
    assert other.received == 5000
    wrong = buffer()
    client.fetch(wrong)
    with pytest.raises(ProtocolError, match="not requested"):
        tell(client, messages.Payload(4, 1, ((0, 0, 4000),)), DATA[1][:4000])
    assert wrong.ended == "foreign"
    put = client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    with pytest.raises(ProtocolError, match="wants block 17"):
        tell(client, messages.Want(5, 1, (0, 17)))
    with pytest.raises(ProtocolError, match="not sent"):
        tell(client, messages.Stored(5, 1, 3))
    assert not put.done
    short = FetchBuffer(FetchRequest(SPACE, TOKENS), KEYS)
    client.fetch(short)
    tell(client, messages.Done(6, 1, 0))  # nothing was lost, the cloud just stops
    assert short.ended == "short"


def test_the_number_of_requests_of_a_client_is_bounded() -> None:
    client = ClientSession(node=NODE, limits=Limits(queue=3))
    requests = [client.match(SPACE.digest, KEYS) for _ in range(4)]
    assert [request.done for request in requests] == [False, False, False, True]
    with pytest.raises(LinkDownError, match="busy"):
        requests[3].wait(0)
    with pytest.raises(ValueError, match="sizes for"):
        client.put(PutRequest(SPACE.digest, KEYS, SIZES[:2]), DATA.__getitem__)
