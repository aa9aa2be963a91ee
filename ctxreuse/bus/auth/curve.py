"""CURVE keys of a node, and authentication of peers (ZAP).

A node has one key pair, whose secret is in a file that only its user may read. A server answers the ZAP request of each
connecting peer from its `AllowList`: the public key, proved by the handshake, gives the user and the user's entry the
tenant. Messages have no influence on either.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import tomllib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from ctxreuse.bus.auth.allowlist import CURVE_BYTES, Allowed, AllowList, key_place
from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import giver_id

__all__ = ["LOCAL", "KeyPair", "ServerAuth", "Zap", "public_key"]

#: The user and tenant of a peer on loopback without keys.
LOCAL = "local"

_HEX, _Z85 = 2 * CURVE_BYTES, 40
_MAX_FILE = 1 << 16
_MAX_LOGGED = 1024

_log = logging.getLogger(__name__)


class _KeyFile(msgspec.Struct, frozen=True):
    public: str
    secret: str = ""


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, 32 bytes each. Its repr never shows the secret."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.hex()})"

    @classmethod
    def new(cls) -> KeyPair:
        """Return a new pair from the system's random source."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def read(cls, path: str | Path) -> KeyPair:
        """Return the pair in a file of `write`, or of the name given to `ctxreuse keys add`.

        Raises ConfigError if it is missing, invalid, or others may read it.
        """
        place = key_place(path, ".key")
        fix = "Make one with `ctxreuse keys add`"
        if place.is_dir():
            raise ConfigError("the key cannot be read: it is a folder", where=str(place), fix=fix)
        try:
            file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the key cannot be read: {error.strerror}", where=str(place), fix=fix) from None
        with open(file, "rb") as opened:
            # Of the opened file: it cannot be replaced in between.
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                what = f"others may read this secret key (its mode is {mode:o})"
                raise ConfigError(what, where=str(place), fix=f"chmod 600 {place}")
            found = _parse(opened.read(_MAX_FILE), place)
        if not found.secret:
            raise ConfigError("this file holds no secret key", where=str(place), fix="Name the .key file")
        pair = cls(_decoded(found.public, "public key", str(place)), _decoded(found.secret, "secret key", str(place)))
        if zmq.curve_public(z85.encode(pair.secret)) != z85.encode(pair.public):
            raise ConfigError("public and secret key do not match", where=str(place), fix=fix)
        return pair

    def write(self, path: str | Path) -> None:
        """Write the pair to a new file that only this user may read. Raises ConfigError if the file exists."""
        text = "# A secret key: who has it is this node. Keep it here; give others the public key.\n"
        _create(Path(path), text + f'public = "{self.public.hex()}"\nsecret = "{self.secret.hex()}"\n', 0o600)

    def write_public(self, path: str | Path) -> None:
        """Write the public key alone. Raises ConfigError if the file exists."""
        _create(Path(path), f'public = "{self.public.hex()}"\n', 0o644)


def public_key(text: str) -> bytes:
    """Parse a public key (32 bytes) given as 64 hexadecimal digits, 40 characters of Z85, the path of a key file, or a
    name in the user's folder of keys. Raises ConfigError.
    """
    text = text.strip()
    if len(text) in (_HEX, _Z85) and not Path(text).is_file():
        return _decoded(text, "public key", "")
    place = key_place(text, ".pub")
    try:
        with open(place, "rb") as file:
            found = _parse(file.read(_MAX_FILE), place)
    except OSError as error:
        what = f"{text!r} is neither a public key nor a file with one ({error.strerror})"
        raise ConfigError(what, fix="Give 64 hexadecimal digits, or the path of a .pub file") from None
    return _decoded(found.public, "public key", str(place))


def _decoded(text: str, what: str, where: str) -> bytes:
    try:
        raw = bytes.fromhex(text) if len(text) == _HEX else z85.decode(text)
    except (ValueError, KeyError, struct.error):  # what the tables of z85 raise
        raw = b""
    if len(raw) != CURVE_BYTES:
        shown = f"{text!r} is not a {what}" if what == "public key" else f"invalid {what}"
        raise ConfigError(shown, where=where, fix="`ctxreuse keys add` makes a pair")
    return raw


def _parse(raw: bytes, place: Path) -> _KeyFile:
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), _KeyFile)
    except (ValueError, RecursionError):  # its text could show a secret
        raise ConfigError("this is not a key file", where=str(place), fix="Make one with `ctxreuse keys add`") from None


def _create(path: Path, text: str, mode: int) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        what, fix = "this key exists already", "Choose another name; replacing a key would lock its node out"
        raise ConfigError(what, where=str(path), fix=fix) from None
    except OSError as error:
        raise ConfigError(f"the key cannot be written: {error.strerror}", where=str(path)) from None
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)


class ServerAuth:
    """A server's key pair and allow-list. Any thread may call."""

    def __init__(self, keys: KeyPair, allow: AllowList) -> None:
        self.keys, self.allow = keys, allow
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._log = LimitedLog(_log)

    @classmethod
    def open(cls, key_file: str | Path, allow_file: str | Path) -> ServerAuth:
        """Read both from files. Raises ConfigError if one is invalid; a missing allow-list allows no key."""
        return cls(KeyPair.read(key_file), AllowList(allow_file))

    def admit(self, public: bytes) -> Allowed | None:
        """Return the entry of a connecting key, by the current list; None (logged once per key) if it is not
        allowed."""
        self.allow.refresh()
        entry = self.allow.find(public)
        if entry is not None:
            self._refused.pop(public, None)
            return entry
        if public not in self._refused:
            revoked = any(known.public == public for known in self.allow.entries)
            # Strangers can make any number of keys: they share one budget of lines, and the oldest may be told again.
            what = "a revoked" if revoked else "an unknown"
            self._log.write(what, logging.WARNING, "refused %s key %s", what, public.hex())
            self._refused[public] = None
            if len(self._refused) > _MAX_LOGGED:
                self._refused.popitem(last=False)
        return None

    def holds(self, user: str, public: bytes) -> bool:
        """Return True while this key is that of this user, by the list as last read."""
        entry = self.allow.find(public)
        return entry is not None and entry.name == user

    def giver(self, user: str) -> bytes:
        """Return how blocks that an allowed user gives are marked, see `giver_id`."""
        entry = self.allow.named(user)
        return giver_id(entry.public if entry is not None else user.encode())

    def tenant(self, user: str) -> str | None:
        """Return the tenant of an allowed user, by the list as last read."""
        entry = self.allow.named(user)
        return entry.tenant if entry is not None else None


class Zap:
    """Answers ZAP requests (who may finish a handshake) by a `ServerAuth`; without one every peer is the user
    ``local``.

    Owned by the thread that calls `answer`, which must do so whenever ``socket`` is readable: peers wait for it.

    Message metadata then has ``User-Id`` (the name in the allow-list) and ``Key`` (hexadecimal, empty without CURVE).
    """

    DOMAIN = b"ctxreuse"

    def __init__(self, context: zmq.Context[Any], auth: ServerAuth | None) -> None:
        self._auth = auth
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Make a server socket accept only peers admitted here; call before bind."""
        if self._auth is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._auth.keys.secret
        # Without keys too: a socket with a domain turns away peers of protocols before ZMTP 3, whose messages have no
        # metadata, and one of which can abort the process by coming while the socket is closed (libzmq 4.3.5).
        socket.zap_domain = self.DOMAIN
        # Fails closed: without it, a missing ZAP answer admits every peer.
        socket.zap_enforce_domain = True

    def answer(self) -> None:
        """Answer one waiting request, if there is one."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        number = frames[1] if len(frames) > 1 else b""
        admitted = self._admit(frames)
        if admitted is None:
            self.socket.send_multipart([b"1.0", number, b"400", b"not allowed", b"", b""])
        else:
            user, key = admitted
            metadata = b"\x03Key" + len(key).to_bytes(4, "big") + key.encode()
            self.socket.send_multipart([b"1.0", number, b"200", b"OK", user.encode(), metadata])

    def _admit(self, frames: list[bytes]) -> tuple[str, str] | None:
        """Return user and key of an admitted peer, else None."""
        # version, request, domain, address, routing id, mechanism, credentials
        if len(frames) < 6 or frames[0] != b"1.0" or frames[2] != self.DOMAIN:
            return None
        if self._auth is None:
            return (LOCAL, "") if frames[5:] == [b"NULL"] else None
        if frames[5] != b"CURVE" or len(frames) != 7:
            return None
        entry = self._auth.admit(frames[6])
        return (entry.name, entry.public.hex()) if entry is not None else None

    def close(self) -> None:
        """Close the socket; no peer is admitted afterwards. Idempotent."""
        self.socket.close(0)
