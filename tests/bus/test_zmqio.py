"""Server and client over real sockets: what was asked for arrives, bit by bit, plain and with CURVE."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.errors import ConfigError, LinkError, LinkRefusedError
from support.memory_link import DictNode, blocks_of, space_of, tokens_of
from support.socket_link import BLOCKS, DATA, KEYS, QUICK, SIZES, SMALL, SPACE, TOKENS, Baker, link, whole
from support.waiting import patient, until

pytestmark = pytest.mark.daemon


def node(held: int = len(KEYS)) -> Any:
    return DictNode(BLOCKS[:held])


class Curve:
    """A server's keys and allow-list in files, and a device's key in it."""

    def __init__(self, folder: Path) -> None:
        KeyPair.new().write(folder / "cloud.key")
        self.device = KeyPair.new()
        self.allow = AllowList(folder / "allow.toml")
        self.allow.allow(Allowed("laptop", self.device.public, "me", datetime.now(UTC)))
        self.auth = ServerAuth.open(folder / "cloud.key", folder / "allow.toml")

    def client(self, pair: KeyPair | None = None) -> dict[str, Any]:
        return {"keys": pair or self.device, "server_key": self.auth.keys.public}


@pytest.fixture
def curve(tmp_path: Path) -> Curve:
    return Curve(tmp_path)


@pytest.fixture(params=["plain", "curve"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of both ends."""
    if request.param == "plain":
        return {}
    made = Curve(tmp_path)
    return {"server": {"auth": made.auth, "limits": SMALL}, **made.client()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    gc.collect()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("bus ") and t.name not in before])


def test_match_fetch_and_announcements(ends: dict[str, Any]) -> None:
    with link(node(20), **ends) as (server, client):
        found = client.match(SPACE.digest, KEYS, 5)
        assert (found.blocks, found.state_blocks) == (20, 20)
        until(lambda: client.announced(KEYS) == 20)
        for order in ("layers", "tail"):
            fetch = client.fetch(FetchRequest(SPACE, TOKENS, first=3, order=order), KEYS[:20])
            fetch.tail(17, patient(10))
            assert [bytes(view.buffer) for view in fetch.views(17)] == DATA[3:20]
        assert client.stats().payloads_in >= 2 * 17
        assert [peer.user for peer in server.peers()] == ["laptop" if "keys" in ends else "local"]


def test_put_gives_what_lacks(ends: dict[str, Any]) -> None:
    cloud = node(5)
    with link(cloud, **ends) as (_, client):
        stored = client.put(PutRequest(SPACE.digest, KEYS, SIZES), lambda i: DATA[i], timeout=patient(10))
        assert (stored.taken, stored.present) == (tuple(range(5, 24)), tuple(range(5)))
        assert cloud.blocks == dict(BLOCKS)


def test_a_block_that_cannot_be_read_does_not_end_the_link() -> None:
    def read(i: int) -> bytes:
        if i == 3:
            raise RuntimeError("the disk is gone")
        return DATA[i]

    cloud = node(0)
    with link(cloud) as (_, client):
        stored = client.put(PutRequest(SPACE.digest, KEYS[:6], SIZES[:6]), read, timeout=patient(10))
        assert (stored.taken, stored.refused) == ((0, 1, 2, 4, 5), {3: "gone"})
        assert client.match(SPACE.digest, KEYS, 5).blocks == 3


def test_prefill_streams_blocks_as_they_are_made(ends: dict[str, Any]) -> None:
    cloud = node(0)
    baker = Baker(cloud)
    try:
        with link(cloud, **ends) as (_, client):
            assert whole(client.fetch(FetchRequest(SPACE, TOKENS, first=2), KEYS, compute=True))
    finally:
        baker.close()


def test_payloads_of_a_megabyte_are_not_copied_and_not_damaged() -> None:
    space = space_of(layers=4, heads=8, dim=128, block_tokens=64)
    tokens = tokens_of(3 * 64)
    blocks = blocks_of(space, tokens)
    assert len(blocks[0][1]) > 2 << 20
    limits = Limits(terms=Terms(max_payload=1 << 20))
    with link(DictNode(blocks), {"limits": limits}, limits=limits, spaces=[]) as (_, client):
        for _ in range(3):
            fetch = client.fetch(FetchRequest(space, tokens), [key for key, _ in blocks])
            fetch.tail(3, patient(20))
            assert [bytes(view.buffer) for view in fetch.views(3)] == [data for _, data in blocks]


def test_memory_of_a_fetch_goes_with_its_last_view() -> None:
    with link(node()) as (_, client):
        fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS)
        assert whole(fetch)
        gone = weakref.ref(fetch)
        gc.disable()
        try:
            del fetch
            client.match(SPACE.digest, KEYS, 5)  # the link's thread has gone on
            assert gone() is None
        finally:
            gc.enable()


def test_many_threads_share_a_link() -> None:
    with link(node()) as (_, client):
        wrong: list[Any] = []

        def work(first: int) -> None:
            for _ in range(5):
                if not whole(client.fetch(FetchRequest(SPACE, TOKENS, first=first), KEYS)):
                    wrong.append(first)
                if client.match(SPACE.digest, KEYS[: first + 1], 5).blocks != first + 1:
                    wrong.append(first)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_fetch_may_be_stopped() -> None:
    cloud = node()
    with link(cloud) as (_, client):
        fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS, payload=4096, window=1)
        fetch.tail(1, patient(5))
        fetch.stop()
        until(lambda: all(source.closed for source in cloud.sources))
        assert whole(client.fetch(FetchRequest(SPACE, TOKENS), KEYS))


def test_an_unknown_key_is_refused_and_then_allowed(curve: Curve, caplog: pytest.LogCaptureFixture) -> None:
    stranger = KeyPair.new()
    with BusServer(node(), auth=curve.auth, limits=SMALL) as server:
        states: list[Any] = []
        options = {"limits": SMALL, "on_state": lambda *state: states.append(state)}
        with BusClient(server.endpoint, ClientOptions(**curve.client(stranger), **options)) as client:
            until(lambda: client.state == "refused")
            assert "does not know this key" in client.reason
            assert client.match(SPACE.digest, KEYS, 1) is None
            with pytest.raises(LinkRefusedError):
                client.put(PutRequest(SPACE.digest, KEYS, SIZES), lambda i: DATA[i])
            time.sleep(0.3)  # tries again meanwhile
            curve.allow.allow(Allowed("new", stranger.public, "me", datetime.now(UTC)))
            until(lambda: client.state == "up")
            assert whole(client.fetch(FetchRequest(SPACE, TOKENS), KEYS))
    assert len([r for r in caplog.records if "refused an unknown key" in r.message]) == 1
    assert [state for state, _ in states] == ["refused", "up", "down"]


def test_a_wrong_server_key_and_a_plain_peer_are_refused(curve: Curve) -> None:
    with BusServer(node(), auth=curve.auth, limits=SMALL) as server:
        wrong = {"keys": curve.device, "server_key": KeyPair.new().public}
        with (
            BusClient(server.endpoint, ClientOptions(**wrong, limits=QUICK)) as client,
            BusClient(server.endpoint, ClientOptions(limits=QUICK)) as plain,
        ):
            until(lambda: client.state == "refused")
            assert "public key" in client.reason
            until(lambda: plain.state == "refused")
            assert server.peers() == []


def test_a_key_that_is_revoked_while_connected_is_cut_off(curve: Curve) -> None:
    other = KeyPair.new()
    curve.allow.allow(Allowed("phone", other.public, "me", datetime.now(UTC)))
    with link(node(), {"auth": curve.auth, "limits": SMALL}, **curve.client()) as (server, client):
        options = {"limits": SMALL}
        with BusClient(server.endpoint, ClientOptions(**curve.client(other), **options)) as phone:
            until(lambda: phone.state == "up")
            AllowList(curve.allow.path).revoke("laptop", datetime.now(UTC))
            until(lambda: client.state == "refused", 5)
            assert [peer.user for peer in server.peers()] == ["phone"]
            fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS)
            assert fetch.tail(1, 0.3) == 0
            assert (phone.state, phone.stats().up) == ("up", 1)
            assert whole(phone.fetch(FetchRequest(SPACE, TOKENS), KEYS))


def test_a_key_that_gets_another_tenant_has_to_come_again(curve: Curve) -> None:
    with link(node(), {"auth": curve.auth, "limits": SMALL}, **curve.client()) as (_, client):
        public = next(entry.public for entry in curve.allow.entries if entry.name == "laptop")
        AllowList(curve.allow.path).allow(Allowed("laptop", public, "another", datetime.now(UTC)))
        until(lambda: client.stats().up == 2, 5)
        assert curve.auth.tenant("laptop") == "another"


def test_connections_of_one_key_are_bounded(curve: Curve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxreuse.bus.transport.server._MAX_OF_A_KEY", 2)
    options = {"limits": SMALL}
    with link(node(), {"auth": curve.auth, "limits": SMALL}, **curve.client()) as (server, first):
        second = BusClient(server.endpoint, ClientOptions(**curve.client(), **options))
        until(lambda: second.state == "up")
        with BusClient(server.endpoint, ClientOptions(**curve.client(), **options)) as third:
            until(lambda: "lost" in third.reason)
            assert (third.state, first.stats().up, second.stats().up) == ("down", 1, 1)
            second.close()
            until(lambda: third.state == "up")


def test_the_tenant_comes_from_the_key(curve: Curve) -> None:
    with link(node(), {"auth": curve.auth}, **curve.client()) as (server, _):
        assert [(peer.user, peer.tenant) for peer in server.peers()] == [("laptop", "tenant-laptop")]


def test_what_the_service_does_not_admit_is_refused() -> None:
    cloud = node()
    cloud.refuse = "no room for you"
    with BusServer(cloud, limits=SMALL) as server, BusClient(server.endpoint, ClientOptions(limits=QUICK)) as client:
        until(lambda: client.state == "refused")
        assert client.reason == "no room for you"
        cloud.refuse = ""
        until(lambda: client.state == "up")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:1", "tcp://example.org:1"])
def test_plain_tcp_stays_on_this_machine(endpoint: str, curve: Curve) -> None:
    with pytest.raises(ConfigError, match=r"plain TCP|cannot listen"):
        BusServer(node(), endpoint)
    with pytest.raises(ConfigError, match="plain TCP"):
        BusClient(endpoint)
    with BusServer(node(), "tcp://0.0.0.0:0", insecure=True), BusServer(node(), "tcp://0.0.0.0:0", auth=curve.auth):
        pass


@pytest.mark.parametrize("endpoint", ["", "ipc://x", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "127.0.0.1:1"])
def test_endpoints_are_checked(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        BusServer(node(), endpoint)
    with pytest.raises(ConfigError):
        BusClient(endpoint)


def test_an_address_in_use_and_half_a_curve_are_setting_errors(curve: Curve) -> None:
    with BusServer(node()) as server, pytest.raises(ConfigError, match="cannot listen"):
        BusServer(node(), server.endpoint)
    with pytest.raises(ConfigError, match="CURVE"):
        BusClient("tcp://127.0.0.1:1", ClientOptions(keys=curve.device))


def test_close_finishes_what_runs() -> None:
    cloud = node()
    with link(cloud) as (server, client):
        fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS, payload=4096, window=2)
        fetch.tail(1, patient(5))
        server.close(10)
        assert whole(fetch)
        until(lambda: client.state == "down")
        assert all(source.closed for source in cloud.sources)
        server.close()


def test_a_client_that_closes_finishes_what_runs() -> None:
    cloud = node(0)
    with link(cloud) as (_, client):
        results: list[Any] = []
        giver = threading.Thread(
            target=lambda: results.append(
                client.put(PutRequest(SPACE.digest, KEYS, SIZES), lambda i: DATA[i], timeout=patient(10))
            )
        )
        giver.start()
        until(lambda: cloud.blocks)
        client.close(10)
        giver.join()
        assert len(results[0].taken) == len(KEYS)
        assert client.fetch(FetchRequest(SPACE, TOKENS), KEYS).ended == "the link is closed"
        assert client.match(SPACE.digest, KEYS, 1) is None
        with pytest.raises(LinkError):
            client.put(PutRequest(SPACE.digest, KEYS, SIZES), lambda i: DATA[i])
        client.close()


def test_closing_ends_what_cannot_finish() -> None:
    with link(node(0)) as (_, client):
        fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS, compute=True)  # nobody makes these blocks
        start = time.monotonic()
        client.close(0.2)
        assert time.monotonic() - start < patient(3)
        assert fetch.ended


def test_a_link_without_a_server_waits_and_closes_quickly() -> None:
    with BusServer(node()) as server:
        endpoint = server.endpoint
    with BusClient(endpoint, ClientOptions(limits=QUICK)) as client:
        fetch = client.fetch(FetchRequest(SPACE, TOKENS), KEYS)
        until(lambda: "nothing listens" in client.reason)
        assert client.state == "down"
        with BusServer(node(), endpoint, limits=SMALL):
            assert whole(fetch)


def test_an_estimate_is_fed() -> None:
    class Seen:
        def __init__(self) -> None:
            self.bytes, self.seconds, self.rtts = 0, 0.0, 0

        def bytes_seen(self, nbytes: int, seconds: float) -> None:
            self.bytes, self.seconds = self.bytes + nbytes, self.seconds + seconds

        def rtt_seen(self, seconds: float) -> None:
            self.rtts += 1

    seen = Seen()
    with link(node(), estimate=seen) as (_, client):
        for _ in range(5):
            assert whole(client.fetch(FetchRequest(SPACE, TOKENS), KEYS))
        until(lambda: seen.rtts)
        assert 0 < seen.bytes <= 5 * sum(SIZES)
        assert seen.seconds > 0
