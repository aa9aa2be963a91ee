"""Keys on disk, the allow-list that a running server follows, and what ZAP answers."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.bus.auth.allowlist import Allowed, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth, Zap, public_key
from ctxreuse.errors import ConfigError

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def entry(name: str, pair: KeyPair | None = None, tenant: str = "me") -> Allowed:
    return Allowed(name, (pair or KeyPair.new()).public, tenant, NOW)


def test_a_pair_survives_its_file_and_hides_its_secret(tmp_path: Path) -> None:
    pair = KeyPair.new()
    old = os.umask(0)
    try:
        pair.write(tmp_path / "deep" / "node.key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "deep" / "node.key").stat().st_mode) == 0o600
    assert KeyPair.read(tmp_path / "deep" / "node.key") == pair
    assert pair.secret.hex() not in repr(pair) + str(pair)
    with pytest.raises(ConfigError, match="exists already"):
        pair.write(tmp_path / "deep" / "node.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o610, 0o666])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    KeyPair.new().write(tmp_path / "node.key")
    (tmp_path / "node.key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyPair.read(tmp_path / "node.key")


@pytest.mark.parametrize("text", ["", "public = 1", "public = 'x'\nsecret = 'y'", "\xff", "[" * 5000, "public = 'a'"])
def test_what_is_no_key_file_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "node.key"
    file.write_text(text, "latin-1")
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        KeyPair.read(file)
    assert str(file) in str(caught.value)


def test_halves_of_different_pairs_are_refused(tmp_path: Path) -> None:
    KeyPair(KeyPair.new().public, KeyPair.new().secret).write(tmp_path / "node.key")
    with pytest.raises(ConfigError, match="do not match"):
        KeyPair.read(tmp_path / "node.key")


def test_a_public_key_may_come_in_three_ways(tmp_path: Path) -> None:
    from zmq.utils import z85

    pair = KeyPair.new()
    pair.write_public(tmp_path / "node.pub")
    for text in (pair.public.hex(), z85.encode(pair.public).decode(), str(tmp_path / "node.pub")):
        assert public_key(text) == pair.public
    with pytest.raises(ConfigError):
        KeyPair.read(tmp_path / "node.pub")  # has no secret


@given(st.text(max_size=80))
def test_a_wrong_public_key_is_a_config_error(text: str) -> None:
    try:
        assert len(public_key(text.replace("\0", ""))) == 32
    except ConfigError:
        pass


def test_the_list_is_followed_and_written_whole(tmp_path: Path) -> None:
    mine, other = AllowList(tmp_path / "allow.toml"), AllowList(tmp_path / "allow.toml")
    assert mine.entries == ()
    assert not mine.refresh()
    first, second = entry("laptop"), entry("phone", tenant="you")
    other.allow(first)
    other.allow(second)
    assert mine.refresh()
    assert not mine.refresh()
    assert mine.find(first.public) == first
    assert mine.named("phone") == second
    assert other.revoke("laptop", NOW).name == "laptop"
    assert mine.refresh()
    assert mine.find(first.public) is None
    other.allow(first)  # again
    assert mine.refresh()
    assert mine.find(first.public) == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["allow.toml"]


def test_names_and_keys_are_allowed_once(tmp_path: Path) -> None:
    entries = AllowList(tmp_path / "allow.toml")
    pair = KeyPair.new()
    entries.allow(entry("laptop", pair))
    for wrong in (entry("laptop"), entry("other", pair), entry("../x"), entry("a", tenant="b c")):
        with pytest.raises(ConfigError):
            entries.allow(wrong)
    entries.revoke(pair.public, NOW)
    entries.allow(entry("laptop"))  # a new key for a name whose old one was revoked
    assert [e.revoked is None for e in entries.entries] == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "key = 1",
        "[[key]]\nname = 'x'",
        "[[key]]\nname = 'x'\npublic = 'zz'\ntenant = 't'\nadded = 2026-01-01T00:00:00Z",
        "what = 1",
        "\0",
        "key = " + "[" * 3000,
    ],
)
def test_a_broken_list_leaves_the_last_good_one(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "allow.toml"
    entries, kept = AllowList(file), entry("laptop")
    entries.allow(kept)
    file.write_text(text)
    with caplog.at_level(logging.ERROR):
        assert not entries.refresh()
        assert not entries.refresh()
    assert len(caplog.records) == 1
    assert entries.find(kept.public) == kept
    with pytest.raises(ConfigError):
        AllowList(file)
    file.unlink()
    assert entries.refresh()  # no list: nobody
    assert entries.find(kept.public) is None


def test_refusals_are_logged_once_a_key_and_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auth = ServerAuth(KeyPair.new(), AllowList(tmp_path / "allow.toml"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert auth.admit(b"\1" * 32) is None
    assert len(caplog.records) == 1
    for i in range(5000):
        auth.admit(i.to_bytes(32, "big"))
    assert len(auth._refused) <= 1024
    assert 9 <= len(caplog.records) < 100, "strangers fill no disk with new keys"


class Asked:
    """ZAP questions as libzmq asks them."""

    def __init__(self, auth: ServerAuth | None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.zap = Zap(self.context, auth)
        self.socket = self.context.socket(zmq.REQ)
        self.socket.connect("inproc://zeromq.zap.01")

    def ask(self, *frames: bytes) -> list[bytes]:
        self.socket.send_multipart(frames)
        assert self.zap.socket.poll(2000)
        self.zap.answer()
        assert self.socket.poll(2000)
        return self.socket.recv_multipart()

    def close(self) -> None:
        self.socket.close(0)
        self.zap.close()
        self.context.term()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(ServerAuth(KeyPair.new(), AllowList(tmp_path / "allow.toml")))
    yield made
    made.close()


def test_zap_maps_the_key_to_its_user(asked: Asked, tmp_path: Path) -> None:
    pair = KeyPair.new()
    question = (b"1.0", b"7", b"ctxreuse", b"127.0.0.1", b"", b"CURVE", pair.public)
    assert asked.ask(*question)[:3] == [b"1.0", b"7", b"400"]
    AllowList(tmp_path / "allow.toml").allow(entry("laptop", pair))  # by another process, say
    answer = asked.ask(*question)
    assert (answer[2], answer[4]) == (b"200", b"laptop")
    assert pair.public.hex().encode() in answer[5]
    AllowList(tmp_path / "allow.toml").revoke("laptop", NOW)
    assert asked.ask(*question)[2] == b"400"


@pytest.mark.parametrize(
    "frames",
    [
        (b"1.0", b"1", b"ctxreuse", b"127.0.0.1", b"", b"NULL"),
        (b"1.0", b"1", b"ctxreuse", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"),
        (b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", bytes(32)),
        (b"2.0", b"1", b"ctxreuse", b"127.0.0.1", b"", b"CURVE", bytes(32)),
        (b"",),
    ],
)
def test_zap_refuses_all_else(asked: Asked, frames: tuple[bytes, ...]) -> None:
    assert asked.ask(*frames)[2] == b"400"


def test_without_keys_everybody_is_local() -> None:
    asked = Asked(None)
    try:
        null = (b"1.0", b"1", b"ctxreuse", b"127.0.0.1", b"", b"NULL")
        assert asked.ask(*null)[2:5] == [b"200", b"OK", b"local"]
        assert asked.ask(*null[:5], b"CURVE", bytes(32))[2] == b"400"
    finally:
        asked.close()
