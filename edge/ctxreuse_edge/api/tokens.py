"""``/api/tokens``: token ids in, pieces of text and ids out, for the agent memory library.

::

    POST /api/tokens/complete {"tokens", "sampling"?, "more"?, "branches"?, "parts"?, "lossy"?, "about"?, "priority"?}
                                          events {"usage"}, {"number"?, "text", "token", "finish"?}, {"number", "usage"}
    POST /api/tokens/warm     {"tokens", "branches"?, "parts"?, "lossy"?, "about"?, "priority"?}          {"usage"}
    POST /api/tokens/forget   {"tokens"}                             {"blocks"}
    GET  /api/tokens/model                                           {"space", "digest", "model", "folder"}

``usage``: see `ctxreuse.usage.WireUsage`. Texts and sessions stay with the caller. Optional hints on the future of
a context::

    POST /api/tokens/pause     {"tokens", "kind", "expect"?, "lossy"?}   {}
    POST /api/tokens/resume    {"tokens"}                                {}
    POST /api/tokens/hint      {"tokens", "name", "until"?}              {"known"}
    POST /api/tokens/supersede {"tokens", "keep"}                        {"blocks"}

``kind``: ``tool``, ``tool:NAME``, ``end_of_turn``, ``length``, ``closed`` or ``unknown``; ``expect`` and ``until`` are
seconds from now; ``name``: ``share``, ``prefetch``, ``demote``, ``pin`` or ``retain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import MAX_ANSWERS, ApiError
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ContextTooLongError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.runtime.steps.order import BACKGROUND, NORMAL
from ctxreuse.why import RequestInfo
from ctxreuse_edge.api.answers import HttpAnswer, body_of, id_of, json_answer, max_kl_of, post_route

if TYPE_CHECKING:
    from ctxreuse import runtime
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse_edge.node import EdgeNode

__all__ = ["TokensRequest", "about_of", "routes"]

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]


class TokensRequest(msgspec.Struct, frozen=True):
    """A prompt in ids.

    ``more``: how further answers are drawn, beside that of ``sampling``; ``branches``: where other contexts may branch
    off; ``parts``: ends of parts that were encoded by themselves; ``lossy``: see `ctxreuse.daemon.openai.Extra`;
    ``about``: see `ctxreuse.why.RequestInfo`; ``priority``: see `ctxreuse.daemon.openai.SamplingFields` (None: normal
    for answers, background for `warm`).
    """

    tokens: _Ids
    sampling: SamplingParams = SamplingParams()
    more: Annotated[list[SamplingParams], msgspec.Meta(max_length=MAX_ANSWERS - 1)] = []
    branches: list[int] = []
    parts: list[int] = []
    lossy: str | None = None
    about: RequestInfo = RequestInfo()
    priority: int | None = None


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


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    def prompt_of(request: Request, body: TokensRequest, priority: int) -> Callable[[], runtime.Request]:
        max_kl, about = max_kl_of(node, body.lossy), about_of(request, body)
        return lambda: node.runtime.request(
            body.tokens,
            parts=body.parts,
            branches=body.branches,
            max_kl=max_kl,
            about=about,
            priority=priority,
            caller=CALLER.get(),
        )

    async def complete(request: Request) -> Response:
        body = await body_of(request, node, TokensRequest)
        priority = body.priority or NORMAL
        prompt, using = prompt_of(request, body, priority), node.models.using(node.models.first)
        samplings = [body.sampling, *body.more]
        running = node.pool.begin(
            lambda _: node.runtime.complete_many(prompt(), samplings), priority, using, answers=len(samplings)
        )
        return _TokensAnswer(node, running, stream=True)

    def warm(request: Request, body: TokensRequest) -> Any:
        return {"usage": node.runtime.warm(prompt_of(request, body, _warming(body))()).to_wire()}

    def ids_of(body: _Tokens | TokensRequest) -> Tokens:
        maximum = node.runtime.space.max_tokens
        if len(body.tokens) > maximum:
            raise ContextTooLongError(f"the context has {len(body.tokens):,} tokens and the model takes {maximum:,}")
        return as_tokens(body.tokens)

    def forget(_: Request, body: TokensRequest) -> Any:
        return {"blocks": node.runtime.forget(ids_of(body))}

    def pause(_: Request, body: _Paused) -> Any:
        max_kl = max_kl_of(node, body.lossy)
        node.runtime.pause(ids_of(body), body.kind, expect=body.expect, max_kl=max_kl)
        return {}

    def resume(_: Request, body: _Tokens) -> Any:
        node.runtime.resume(ids_of(body))
        return {}

    def hint(_: Request, body: _Hinted) -> Any:
        return {"known": node.runtime.hint(ids_of(body), body.name, until=body.until)}

    def supersede(_: Request, body: _Superseded) -> Any:
        return {"blocks": node.runtime.supersede(ids_of(body), body.keep)}

    async def model(_: Request) -> Response:
        space = node.runtime.space
        name, folder = node.models.first.name
        return json_answer({"space": space, "digest": space.digest.hex(), "model": name, "folder": folder})

    return [
        Route("/api/tokens/complete", complete, methods=["POST"]),
        Route("/api/tokens/model", model),
        post_route(node, "/api/tokens/warm", TokensRequest, warm, _warming),
        post_route(node, "/api/tokens/forget", TokensRequest, forget),
        post_route(node, "/api/tokens/pause", _Paused, pause),
        post_route(node, "/api/tokens/resume", _Tokens, resume),
        post_route(node, "/api/tokens/hint", _Hinted, hint),
        post_route(node, "/api/tokens/supersede", _Superseded, supersede),
    ]


def _warming(body: TokensRequest) -> int:
    return BACKGROUND if body.priority is None else body.priority


def about_of(request: Request, body: TokensRequest) -> RequestInfo:
    """Return the caller's description of its request, checked, with the id of the HTTP request. Raises ApiError."""
    given = body.about
    ends = [0, *(part.end for part in given.parts)]
    if len(ends) > 4096 or ends != sorted(set(ends)) or ends[-1] > len(body.tokens):
        raise ApiError(400, "parts must be ascending positions within the prompt", param="about.parts")
    if len(given.session) > 200 or any(len(part.name) > 200 for part in given.parts):
        raise ApiError(400, "a name has more than 200 characters", param="about")
    return msgspec.structs.replace(given, request=id_of(request), client_id="")


class _TokensAnswer(HttpAnswer):
    def first(self) -> Sequence[Any]:
        return [self.whole()]

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        return [{"number": number, **msgspec.to_builtins(piece)}] if number else [piece]

    def last(self) -> Sequence[Any]:
        ends = enumerate(self.completions)
        return [{"number": n, "usage": one.usage.to_wire(), "finish": one.finish} for n, one in ends]

    def whole(self) -> dict[str, Any]:
        return {"usage": self.completions[0].usage.to_wire()}
