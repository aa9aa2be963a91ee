"""One connection of a BusServer: whose it is, where it comes from, and its session."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.wire import Frame
from ctxreuse.bus.zmqio_socket import Address

__all__ = ["Peer", "PeerInfo"]


class PeerInfo(msgspec.Struct, frozen=True):
    """One connected peer: its ``user`` and ``tenant`` (empty before its hello), where it comes from, what it calls
    itself, and its session's counts."""

    user: str
    tenant: str
    address: str
    node: bytes
    counts: Mapping[str, int]


class Peer:
    """One connection. ``key``: its public key in hexadecimal, empty without CURVE; ``tenant``: of the key as it came;
    ``held``: frames not yet taken."""

    __slots__ = ("address", "fd", "held", "key", "name", "session", "tenant", "user")

    def __init__(self, name: bytes, user: str, key: str, fd: int, address: Address, session: ServerSession) -> None:
        self.name, self.user, self.key, self.fd, self.address, self.session = name, user, key, fd, address, session
        self.tenant: str | None = None
        self.held: list[Frame] | None = None

    def info(self) -> PeerInfo:
        """As others may see it. Any thread."""
        session = self.session
        grant, hello = session.grant, session.hello  # the server's thread may take them away meanwhile
        return PeerInfo(
            self.user,
            grant.tenant if grant is not None else "",
            f"{self.address[0]}:{self.address[1]}",
            hello.node if hello is not None else b"",
            dict(session.counts),
        )
