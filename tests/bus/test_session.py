"""A client and a server session over a link in memory: announcements, matches and fetches."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxreuse.bus import wire
from ctxreuse.bus.session import Limits, Request
from ctxreuse.bus.session_client import ClientSession
from ctxreuse.bus.session_known import Known
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Assembly, Outlet
from ctxreuse.errors import LinkDownError

P = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("session_pair.py"))))
LINK = P.LINK
SPACE = P.SPACE
TOKENS = P.TOKENS
BLOCKS = P.BLOCKS
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
