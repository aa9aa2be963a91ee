"""CURVE keys of a node, and the check of who connects to it (ZAP).

A node has one key pair: its secret stays in a file that only its user may read, its public key is what others know it
by. A server answers the ZAP question of each connecting peer from its `AllowList`: the peer's public key, which the
handshake has proved, becomes the name of a user, and the user's entry gives the tenant. No message has a say in it.
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

from ctxreuse.bus.allow import CURVE_BYTES, Allowed, AllowList, key_place
from ctxreuse.errors import ConfigError

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
    """A CURVE key pair, 32 bytes each. Its text never shows the secret."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.hex()})"

    @classmethod
    def new(cls) -> KeyPair:
        """A new pair from the system's random source."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def read(cls, path: str | Path) -> KeyPair:
        """The pair in a file of `write`, or of the name given to `ctxreuse keys new`.

        Raises ConfigError if it is not there, is none, or others may read it.
        """
        place = key_place(path, ".key")
        fix = "Make one with `ctxreuse keys new`"
        try:
            file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the key cannot be read: {error.strerror}", where=str(place), fix=fix) from None
        with open(file, "rb") as opened:
            # Of the opened file, so that nobody can put another one in its place in between.
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                what = f"others may read this secret key (its mode is {mode:o})"
                raise ConfigError(what, where=str(place), fix=f"chmod 600 {place}")
            found = _parse(opened.read(_MAX_FILE), place)
        if not found.secret:
            raise ConfigError("there is no secret key in this file", where=str(place), fix="Name the .key file")
        pair = cls(_decoded(found.public, "public key", str(place)), _decoded(found.secret, "secret key", str(place)))
        if zmq.curve_public(z85.encode(pair.secret)) != z85.encode(pair.public):
            raise ConfigError("public and secret key do not belong together", where=str(place), fix=fix)
        return pair

    def write(self, path: str | Path) -> None:
        """Write the pair into a new file that only this user may read. Raises ConfigError if there is one already."""
        text = "# A secret key: who has it is this node. Keep it here; give others the public key.\n"
        _create(Path(path), text + f'public = "{self.public.hex()}"\nsecret = "{self.secret.hex()}"\n', 0o600)

    def write_public(self, path: str | Path) -> None:
        """Write the public key alone, for others. Raises ConfigError if the file exists."""
        _create(Path(path), f'public = "{self.public.hex()}"\n', 0o644)


def public_key(text: str) -> bytes:
    """The 32 bytes of a public key given as 64 hexadecimal digits, 40 characters of Z85, the path of a key file, or the
    name of a key in the user's config folder.

    Raises ConfigError.
    """
    text = text.strip()
    if len(text) in (_HEX, _Z85) and not Path(text).is_file():
        return _decoded(text, "public key", "")
    place = key_place(text, ".pub")
    try:
        with open(place, "rb") as file:
            found = _parse(file.read(_MAX_FILE), place)
    except OSError as error:
        what = f"{text!r} is no public key and no file of one ({error.strerror})"
        raise ConfigError(what, fix="Give 64 hexadecimal digits, or the path of a .pub file") from None
    return _decoded(found.public, "public key", str(place))


def _decoded(text: str, what: str, where: str) -> bytes:
    try:
        raw = bytes.fromhex(text) if len(text) == _HEX else z85.decode(text)
    except (ValueError, KeyError, struct.error):  # what the tables of z85 raise
        raw = b""
    if len(raw) != CURVE_BYTES:
        shown = f"{text!r} is no {what}" if what == "public key" else f"this is no {what}"
        raise ConfigError(shown, where=where, fix="`ctxreuse keys new` makes a pair")
    return raw


def _parse(raw: bytes, place: Path) -> _KeyFile:
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), _KeyFile)
    except (ValueError, RecursionError):  # its text could show a secret
        raise ConfigError("this is no key file", where=str(place), fix="Make one with `ctxreuse keys new`") from None


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
    """A server's key pair and whom it lets in. Any thread may call."""

    def __init__(self, keys: KeyPair, allow: AllowList) -> None:
        self.keys, self.allow = keys, allow
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    @classmethod
    def open(cls, key_file: str | Path, allow_file: str | Path) -> ServerAuth:
        """From files. Raises ConfigError if one is not what it should be; no allow-list yet means: nobody."""
        return cls(KeyPair.read(key_file), AllowList(allow_file))

    def admit(self, public: bytes) -> Allowed | None:
        """The entry of a key that connects, by the list as it is now; None (logged once a key) if it may not."""
        self.allow.refresh()
        entry = self.allow.find(public)
        if entry is not None:
            self._refused.pop(public, None)
            return entry
        if public not in self._refused:
            revoked = any(known.public == public for known in self.allow.entries)
            _log.warning("refused %s key %s", "a revoked" if revoked else "an unknown", public.hex())
            # Bounded: a stranger can make as many keys as it likes. The oldest may then be logged once more.
            self._refused[public] = None
            if len(self._refused) > _MAX_LOGGED:
                self._refused.popitem(last=False)
        return None

    def holds(self, user: str, public: bytes) -> bool:
        """True while this key is allowed as this user, by the list as it was last read."""
        entry = self.allow.find(public)
        return entry is not None and entry.name == user

    def tenant(self, user: str) -> str | None:
        """The tenant of an allowed user, by the list as it was last read."""
        entry = self.allow.named(user)
        return entry.tenant if entry is not None else None


class Zap:
    """Answers a context's ZAP questions (who may finish a handshake): by a `ServerAuth`, or without one that every peer
    is the user ``local``. Owned by the thread that calls `answer`, which must do so whenever ``socket`` is readable:
    peers wait meanwhile.

    Message metadata then has ``User-Id`` (the name in the allow-list) and ``Key`` (hexadecimal, empty without CURVE).
    """

    DOMAIN = b"ctxreuse"

    def __init__(self, context: zmq.Context[Any], auth: ServerAuth | None) -> None:
        self._auth = auth
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Make a server socket let in only who is admitted here; to be called before it is bound."""
        if self._auth is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._auth.keys.secret
        # Without keys too: a socket with a domain turns away peers of protocols before ZMTP 3, whose messages have no
        # metadata, and one of which can abort the process by coming while the socket is closed (libzmq 4.3.5).
        socket.zap_domain = self.DOMAIN
        # Fails closed: without it, a missing answer to ZAP lets everybody in.
        socket.zap_enforce_domain = True

    def answer(self) -> None:
        """Answer one waiting question; returns at once if there is none."""
        try:
            asked = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        number = asked[1] if len(asked) > 1 else b""
        admitted = self._admit(asked)
        if admitted is None:
            self.socket.send_multipart([b"1.0", number, b"400", b"not allowed", b"", b""])
        else:
            user, key = admitted
            metadata = b"\x03Key" + len(key).to_bytes(4, "big") + key.encode()
            self.socket.send_multipart([b"1.0", number, b"200", b"OK", user.encode(), metadata])

    def _admit(self, asked: list[bytes]) -> tuple[str, str] | None:
        """User and key of who may come in."""
        # version, request, domain, address, routing id, mechanism, credentials
        if len(asked) < 6 or asked[0] != b"1.0" or asked[2] != self.DOMAIN:
            return None
        if self._auth is None:
            return (LOCAL, "") if asked[5:] == [b"NULL"] else None
        if asked[5] != b"CURVE" or len(asked) != 7:
            return None
        entry = self._auth.admit(asked[6])
        return (entry.name, entry.public.hex()) if entry is not None else None

    def close(self) -> None:
        """Close its socket; nobody is admitted afterwards. Idempotent."""
        self.socket.close(0)
