"""One client and one server session with a few blocks between them; tests load it by path."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ctxreuse.bus import wire
from ctxreuse.bus.session_client import ClientSession
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Assembly, Outlet

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
