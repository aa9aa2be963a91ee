"""What is kept of a named context, for the person whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse.identity.keys import Tokens
from ctxreuse_edge.contexts import session_of

if TYPE_CHECKING:
    from ctxreuse_edge.node import EdgeNode

__all__ = ["export_context"]


def export_context(node: EdgeNode, id_or_name: str) -> dict[str, Any]:
    """Return all that is kept of a context as values for JSON: its turns and ids, the requests that began with it, how
    much KV there is, and which clouds may have copies. Raises SessionError.
    """
    session, runtime = session_of(node.ledger, id_or_name), node.runtime
    ids = node.contexts.tokens(session)
    spaces = {turn.id: node.ledger.spaces(turn.id) for turn in node.ledger.turns(session.head)}
    turns = [
        msgspec.to_builtins(turn) | {"tokens": {space.hex(): _ids(node, turn.id, space) for space in spaces[turn.id]}}
        for turn in node.ledger.turns(session.head)
    ]
    entries = runtime.eraser.begun_with(ids, session.id)
    decode = runtime.text.decode if runtime.text is not None else _no_text
    requests = [
        {
            "request": entry.request,
            "id": entry.client_id,
            "at": entry.at,
            "session": entry.session,
            "tokens": entry.tokens,
            "text": decode(entry.numbers) if entry.ids and entry.space == runtime.space.digest else None,
        }
        for entry in entries
    ]
    match = node.store.match(runtime.keys(ids))
    return {
        "format": "ctxreuse.export",
        "version": 1,
        "context": msgspec.to_builtins(node.contexts.get(session.id)),
        "turns": turns,
        "tokens": ids.tolist(),
        "requests": requests,
        "kv": {"blocks": match.blocks, "tokens": match.tokens},
        "clouds": [status["name"] for status in node.links.status()],
    }


def _ids(node: EdgeNode, turn: int, space: bytes) -> list[int]:
    raw = node.ledger.tokens(turn, space) or b""
    return [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4)]


def _no_text(_: Sequence[int] | Tokens) -> str:
    return ""
