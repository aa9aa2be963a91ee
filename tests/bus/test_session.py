"""A client and a server session over a link in memory: announcements, matches and fetches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.announce import AnnouncedKeys
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits, Request
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import LinkDownError
from support.memory_link import SALT, DictNode, Wires, blocks_of, link, state_of
from support.session_pair import (
    BLOCKS,
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


def test_match_and_announcements() -> None:
    wires = link(node())
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


def test_withdrawals_are_told_at_once_and_on_each_connection() -> None:
    service = node()
    wires = link(service)
    wires.tick(1)
    wires.run()
    assert wires.client.withdrawn() == frozenset()
    service.taken_back = KEYS[2][:8] + KEYS[3][:8]
    wires.tick(1)
    wires.run()
    assert wires.client.withdrawn() == {KEYS[2][:8], KEYS[3][:8]}
    assert wires.client.announced(KEYS) == 6  # whether they are there now is another matter
    wires.cut()
    service.taken_back += KEYS[4][:8]
    wires.connect()
    wires.run()
    wires.tick(1)
    wires.run()
    assert wires.client.withdrawn() == {KEYS[2][:8], KEYS[3][:8], KEYS[4][:8]}


def test_an_announcement_without_withdrawals_is_as_before_there_were_any() -> None:
    plain = wire.encode(announce(1, 0, 2, added=KEYS[0][:8]))
    assert len(msgspec.msgpack.decode(plain[0][8:])) == 7
    more = msgspec.structs.replace(announce(1, 0, 2), withdrawn=KEYS[0][:8])
    assert wire.decode(wire.encode(more))[0] == more


def test_announcements_go_on_after_a_cut_without_a_snapshot() -> None:
    service = node()
    wires = link(service)
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
    wires = link(service)
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
    wires = link(node())
    wires.tick(1)
    wires.run()
    wires.cut()
    wires.server = ServerSession(DictNode(), "edge", SendScheduler(), node=NODE, epoch=8, limits=wires.server.limits)
    fetch = buffer()
    wires.client.fetch(fetch)
    wires.connect()
    wires.run()
    assert wires.client.welcome is not None
    assert wires.client.welcome.epoch == 8
    assert wires.client.announced(KEYS) is None
    assert fetch.ended == "gone"
    wires.tick(1)
    wires.run()
    assert wires.client.announced(KEYS) == 0


def announce(seq: int, base: int, version: int, part: int = 0, parts: int = 1, added: bytes = b"") -> messages.Announce:
    return messages.Announce(seq, base, version, part, parts, added)


def test_gaps_in_announcements_ask_for_a_snapshot_once() -> None:
    known, one, two = AnnouncedKeys(10), b"a" * 8, b"b" * 8
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
    wires = link(service)
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
    snapshot = service.snapshot
    calls: list[str] = []
    service.snapshot = lambda tenant: calls.append(tenant) or snapshot(tenant)
    for step in range(100):
        server.receive(wire.encode(messages.Resync()), step * 0.1)
        server.tick(step * 0.1)
        while server.next(step * 0.1) is not None:
            pass
    assert 1 < len(calls) <= 6


def test_nothing_to_do_is_not_due() -> None:
    """Whoever polls by `due` must not spin: not beside a peer that does not read, not while draining."""
    service = node()
    wires = link(service)
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
    wires = link(service)
    fetch = buffer()
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
    service.states[KEYS[-1]] = state_of(SPACE, TOKENS, KEYS)
    wires = link(service)
    fetch = buffer(order=order, state=state)
    wires.client.fetch(fetch, payload=5000, window=2)
    wires.run()
    assert whole(fetch)
    held = fetch.state(0)
    assert (held is not None) == state
    assert held is None or bytes(held.buffer) == service.states[KEYS[-1]]
    assert [source.closed for source in service.sources] == [1]
    assert wires.broken == []
    assert wires.client.drained


def test_payloads_are_as_small_as_asked() -> None:
    service = node()
    wires = link(service, terms=messages.Terms(max_payload=1 << 20))
    for asked, most in ((8192, 8192), (0, 1 << 20), (1, 4096)):
        before = wires.client.counts["payloads_in"]
        fetch = buffer()
        wires.client.fetch(fetch, payload=asked)
        wires.run()
        assert whole(fetch)
        assert wires.client.counts["payloads_in"] - before >= sum(SIZES) / most
    assert wires.client.counts["payloads_in"] > 6 * SIZES[0] // 4096
    # What the other side takes at most counts as well, whoever of the two is more modest.
    small = ClientSession(node=NODE, limits=Limits(terms=messages.Terms(max_payload=4096)))
    large = ServerSession(service, "edge", SendScheduler(), node=NODE, epoch=7)
    modest = Wires(small, large)
    modest.connect()
    fetch = buffer()
    small.fetch(fetch)
    put = small.put(PutRequest(SPACE.digest, [bytes(32)], [SIZES[0]]), lambda _: DATA[0], payload=1 << 20)
    modest.run()
    assert whole(fetch)
    assert put.wait(0).refused == {0: "foreign"}
    assert modest.broken == []
    assert large.counts["payloads_in"] >= SIZES[0] / 4096


@pytest.mark.parametrize("order", ["layers", "tail"])
def test_a_fetch_survives_a_cut_at_every_payload(order: str) -> None:
    wires = link(node())
    fetch = buffer(order=order)
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
    fetch, unwanted = buffer(), buffer()
    unwanted.stop()
    client.fetch(unwanted)
    assert said(client) == []
    client.fetch(fetch, window=3)
    (opened,) = said(client)
    tell(client, messages.Payload(1, 1, ((0, 0, 4000), (1, 0, 100))), DATA[0][:4000] + DATA[1][:100])
    client.lost(0.0)
    client.opened(0.0)
    tell(client, messages.Welcome(1, NODE, 7, SALT))
    _, again = said(client)
    assert isinstance(opened, messages.Fetch)
    assert isinstance(again, messages.Fetch)
    assert (opened.id, opened.round, opened.have, opened.credit) == (1, 1, (), 3)
    assert (again.id, again.round, again.credit, again.keys) == (1, 2, 3, opened.keys)
    assert again.have == ((0, 4000, DATA[0][24:32]), (1, 100, DATA[1][24:32]))
    tell(client, messages.Payload(1, 1, ((0, 4000, 10),)), DATA[0][4000:4010])  # of the connection before
    assert client.counts["ignored"] == 1
    assert fetch.received == 4100


def test_a_fetch_that_never_gets_anything_is_given_up() -> None:
    wires = link(node(), limits=Limits(rounds=5))
    fetch = buffer()
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
    wires = link(service)
    fetch = buffer()
    wires.client.fetch(fetch, window=2)
    for _ in range(8):
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
    assert 0 < fetch.received < sum(SIZES)
    wires.cut()
    service.blocks.update(blocks_of(SPACE, TOKENS, seed=99))
    wires.connect()
    wires.run()
    assert fetch.ended == "changed"


def test_a_lost_payload_breaks_the_link_and_is_sent_after_it() -> None:
    wires = link(node())
    fetch = buffer()
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
    wires = link(node())
    fetch = FetchBuffer(FetchRequest(SPACE, TOKENS[:4]), KEYS[:1])
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
    wires = link(node(), terms=messages.Terms(max_payload=4096, transfers=2))
    fetches = [buffer() for _ in range(7)]
    for fetch in fetches:
        wires.client.fetch(fetch)
    wires.run()
    assert all(whole(fetch) for fetch in fetches)
    assert wires.client.counts["ignored"] == 0


def test_requests_made_while_the_link_is_down_wait_for_it() -> None:
    wires = link(node())
    wires.cut()
    fetch, request = buffer(), wires.client.match(SPACE.digest, KEYS)
    wires.client.fetch(fetch)
    with pytest.raises(LinkDownError, match="no answer within"):
        request.wait(0)
    wires.connect()
    wires.run()
    assert request.wait(0).blocks == 6
    assert whole(fetch)


def test_stop_and_cancel_free_the_server() -> None:
    service = node()
    wires = link(service)
    stopped, cancelled = buffer(), buffer()
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
    assert [source.closed for source in service.sources] == [1, 1]
    assert len(wires.server.scheduler) == 0
