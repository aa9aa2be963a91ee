"""``/api/tokens/pause`` and its like: what callers know of their contexts' future. None of it is needed.

::

    POST /api/tokens/pause     {"tokens", "kind", "expect"?, "lossy"?}   {}
    POST /api/tokens/resume    {"tokens"}                                {}
    POST /api/tokens/hint      {"tokens", "name", "until"?}              {"known"}
    POST /api/tokens/supersede {"tokens", "keep"}                        {"blocks"}

``kind``: ``tool``, ``tool:NAME``, ``end_of_turn``, ``length``, ``closed`` or ``unknown``; ``expect`` and ``until`` are
seconds from now; ``name``: ``share``, ``prefetch``, ``demote``, ``pin`` or ``retain``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError, parse
from ctxreuse.errors import ConfigError
from ctxreuse.keys import as_tokens
from ctxreuse_edge.api.answers import body_of, json_answer, lossy_of

if TYPE_CHECKING:
    from ctxreuse_edge.node import Node

__all__ = ["routes"]

T = TypeVar("T")
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: _Ids


class _Paused(_Tokens, frozen=True):
    kind: _Name
    expect: _Seconds | None = None
    lossy: str | None = None


class _Hinted(_Tokens, frozen=True):
    name: _Name
    until: _Seconds | None = None


class _Superseded(_Tokens, frozen=True):
    keep: Annotated[int, msgspec.Meta(ge=0)]


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def pause(request: Request) -> Response:
        asked = parse(await body_of(request, node), _Paused)
        lossy = lossy_of(node, asked.lossy)
        await _done(
            node, lambda: node.runtime.pause(as_tokens(asked.tokens), asked.kind, expect=asked.expect, lossy=lossy)
        )
        return json_answer({})

    async def resume(request: Request) -> Response:
        asked = parse(await body_of(request, node), _Tokens)
        await _done(node, lambda: node.runtime.resume(as_tokens(asked.tokens)))
        return json_answer({})

    async def hint(request: Request) -> Response:
        asked = parse(await body_of(request, node), _Hinted)
        known = await _done(node, lambda: node.runtime.hint(as_tokens(asked.tokens), asked.name, until=asked.until))
        return json_answer({"known": known})

    async def supersede(request: Request) -> Response:
        asked = parse(await body_of(request, node), _Superseded)
        blocks = await _done(node, lambda: node.runtime.supersede(as_tokens(asked.tokens), asked.keep))
        return json_answer({"blocks": blocks})

    made: dict[str, Any] = {"pause": pause, "resume": resume, "hint": hint, "supersede": supersede}
    return [Route(f"/api/tokens/{name}", route, methods=["POST"]) for name, route in made.items()]


async def _done(node: Node, work: Callable[[], T]) -> T:
    """Run it in a worker's thread; what the caller may not name is the caller's mistake."""

    def checked() -> T:
        try:
            return work()
        except ConfigError as error:
            raise ApiError(400, str(error)) from None

    return await node.worker.call(checked)
