"""``/api/tokens``: token ids in, pieces of text and ids out: what the agent memory library attaches to.

::

    POST /api/tokens/complete {"tokens", "sampling"?, "branches"?, "parts"?, "lossy"?, "about"?}
                                                                     events {"text", "token", "finish"?}, then {"usage"}
    POST /api/tokens/warm     {"tokens", "branches"?, "parts"?, "lossy"?, "about"?}          {"usage"}
    POST /api/tokens/forget   {"tokens"}                             {"blocks"}
    GET  /api/tokens/model                                           {"space", "digest", "model", "folder"}

``usage`` is the runtime's own (`ctxreuse.runtime.Usage`). Texts and sessions stay with the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.openai import ApiError, parse
from ctxreuse.engines.sampling import Sampling
from ctxreuse.keys import as_tokens
from ctxreuse.why import About
from ctxreuse_edge.api.answers import Answer, body_of, id_of, json_answer, lossy_of

if TYPE_CHECKING:
    from ctxreuse.engines.generate import Piece
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import Node

__all__ = ["TokensRequest", "about_of", "routes"]

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TokensRequest(msgspec.Struct, frozen=True):
    """A prompt in ids, where in it other contexts may go on differently (``branches``), and where parts end that were
    encoded by themselves (``parts``). ``lossy``: see `ctxreuse.daemon.openai.Extra`; ``about``: session, parts and
    opening, see `ctxreuse.why.About`."""

    tokens: Annotated[list[_Id], msgspec.Meta(min_length=1)]
    sampling: Sampling = Sampling()
    branches: list[int] = []
    parts: list[int] = []
    lossy: str | None = None
    about: About = About()


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def complete(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        ids, lossy, about = as_tokens(asked.tokens), lossy_of(node, asked.lossy), about_of(request, asked)
        running = node.worker.begin(
            lambda: node.runtime.complete(
                ids, asked.sampling, branches=asked.branches, parts=asked.parts, lossy=lossy, about=about
            )
        )
        return _Pieces(node, running, stream=True)

    async def warm(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        ids, lossy, about = as_tokens(asked.tokens), lossy_of(node, asked.lossy), about_of(request, asked)
        usage = await node.worker.call(
            lambda: node.runtime.warm(ids, branches=asked.branches, parts=asked.parts, lossy=lossy, about=about)
        )
        return json_answer({"usage": usage})

    async def forget(request: Request) -> Response:
        asked = parse(await body_of(request, node), TokensRequest)
        blocks = await node.worker.call(lambda: node.runtime.forget(as_tokens(asked.tokens)))
        return json_answer({"blocks": blocks})

    async def model(_: Request) -> Response:
        space = node.runtime.engine.space
        name, folder = node.model
        return json_answer({"space": space, "digest": space.digest.hex(), "model": name, "folder": folder})

    return [
        Route("/api/tokens/complete", complete, methods=["POST"]),
        Route("/api/tokens/warm", warm, methods=["POST"]),
        Route("/api/tokens/forget", forget, methods=["POST"]),
        Route("/api/tokens/model", model),
    ]


def about_of(request: Request, asked: TokensRequest) -> About:
    """What the caller says of its request, checked, under the id of the HTTP request. Raises ApiError."""
    said = asked.about
    ends = [0, *(part.end for part in said.parts)]
    if len(ends) > 4096 or ends != sorted(set(ends)) or ends[-1] > len(asked.tokens):
        raise ApiError(400, "parts must end one after the other within the prompt", param="about.parts")
    if len(said.session) > 200 or any(len(part.name) > 200 for part in said.parts):
        raise ApiError(400, "a name has more than 200 characters", param="about")
    return msgspec.structs.replace(said, request=id_of(request), alias="")


class _Pieces(Answer):
    def first(self, completion: Completion) -> Sequence[Any]:
        return [{"usage": completion.usage}]

    def piece(self, completion: Completion, piece: Piece) -> Sequence[Any]:
        return [piece]

    def last(self, completion: Completion) -> Sequence[Any]:
        return [{"usage": completion.usage, "finish": completion.finish}]

    def whole(self, completion: Completion) -> Any:
        return {"usage": completion.usage}
