"""One client and one server session with a few blocks between them; tests load it by path."""

from __future__ import annotations

from typing import Any

from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from support.memory_link import NODE, SALT, DictNode, blocks_of, space_of, tokens_of

SPACE = space_of(heads=4, dim=32)
TOKENS = tokens_of(6 * 4)
BLOCKS = blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = [data for _, data in BLOCKS]
SIZES = [len(data) for data in DATA]


def node(**options: Any) -> Any:
    return DictNode(BLOCKS, **options)


def buffer(**options: Any) -> FetchBuffer:
    refine = options.pop("refine", False)
    return FetchBuffer(FetchRequest(SPACE, TOKENS, **options), KEYS, refine=refine)


def whole(fetch: FetchBuffer) -> bool:
    return fetch.ended == "" and [bytes(view.buffer) for view in fetch.views(fetch.count)] == DATA[-fetch.count :]


def said(session: ServerSession | ClientSession) -> list[messages.Message]:
    """All messages that a session has to say now."""
    messages = []
    while (frames := session.next(0.0)) is not None:
        messages.append(wire.decode(frames)[0])
    return messages


def server_of(service: Any, **options: Any) -> ServerSession:
    """A server session that a peer has said hello to."""
    server = ServerSession(service, "edge", SendScheduler(), node=NODE, epoch=7, **options)
    server.opened(0.0)
    tell(server, messages.Hello(1, 1, NODE, max_payload=4096))
    assert isinstance(said(server)[0], messages.Welcome)
    return server


def tell(session: ServerSession | ClientSession, message: messages.Message, payload: bytes | None = None) -> None:
    session.receive(wire.encode(message, payload), 0.0)


def client_of(**options: Any) -> ClientSession:
    """A client session that a cloud has welcomed."""
    client = ClientSession(node=NODE, **options)
    client.opened(0.0)
    assert isinstance(said(client)[0], messages.Hello)
    tell(client, messages.Welcome(1, NODE, 7, SALT))
    return client
