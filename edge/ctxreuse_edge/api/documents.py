"""The order of documents: in a chat request that wants another, and for programs that send their prompts elsewhere.
For these also marks of what a provider may cache, and pointers in place of texts that come twice.

::

    POST /api/plan {"requests": [{"documents": […]}, …], "tokens"?}
                   {"schedule": […], "requests": [{"order": […]}, …], "shared", "tokens"}
    POST /api/plan {"body": {…}, "api": "anthropic" | "openai", "before"?, "repeats"?, "continues"?}
                   {"body": {…}, "marks": [["system", 0], …], "repeats": [{"at": […], "of": […]}, …]}
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.routing import Route

from ctxreuse.daemon.openai import MAX_MESSAGES, ApiError
from ctxreuse.errors import FormatError
from ctxreuse.planner import (
    DocumentOrder,
    Plan,
    ProviderApi,
    document_order,
    document_parts,
    mark_request,
    plan_batch,
    ranking_line,
)
from ctxreuse.runtime.steps.order import BACKGROUND
from ctxreuse.why import Reordered
from ctxreuse_edge.api.answers import post_route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

    from ctxreuse.engines.prompt import EncodedPrompt
    from ctxreuse.engines.text import Message
    from ctxreuse.planner import Part
    from ctxreuse_edge.node import EdgeNode

__all__ = ["PlanRequest", "PlannedDocuments", "ordered", "routes"]

#: Bytes of a text that are about a token.
_BYTES = 4
#: Documents of all requests of a plan together: their table takes 128 MiB at most.
_MOST = 1 << 16


class PlannedDocuments(msgspec.Struct, frozen=True):
    """``documents`` of one request, by text or by any names that equal documents share."""

    documents: Annotated[list[str], msgspec.Meta(max_length=4096)]


class PlanRequest(msgspec.Struct, frozen=True):
    """``requests`` that are computed one after another. ``tokens``: of documents that are given by name; of others they
    are estimated by their bytes. Or ``body``: one request to the ``api`` of a provider, see `mark_request`."""

    requests: Annotated[list[PlannedDocuments], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tokens: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] = {}
    body: dict[str, Any] | None = None
    api: ProviderApi = "anthropic"
    before: dict[str, Any] | None = None
    repeats: bool = False
    continues: bool = True


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    def plan(_: Request, body: PlanRequest) -> Any:
        if (body.requests is None) is (body.body is None):
            raise ApiError(400, "a plan is for requests or for one body: send one of them", param="requests")
        if body.body is not None:
            return _marked(body, body.body)
        requests = [request.documents for request in body.requests or ()]
        if sum(map(len, requests)) > _MOST:
            raise ApiError(
                400, f"requests: more than {_MOST:,} documents in all; send fewer at a time", param="requests"
            )
        names = {name for request in requests for name in request}
        tokens = {name: body.tokens.get(name, -(-len(name.encode()) // _BYTES)) for name in names}
        found = plan_batch(requests, tokens)
        return {
            "schedule": found.schedule.order,
            "requests": [{"order": one.order} for one in found.documents],
            "shared": round(found.shared),
            "tokens": sum(tokens[name] for request in requests for name in request),
        }

    return [post_route(node, "/api/plan", PlanRequest, plan, lambda _: BACKGROUND)]


def _marked(wanted: PlanRequest, body: dict[str, Any]) -> dict[str, Any]:
    try:
        found = mark_request(body, wanted.api, before=wanted.before, repeats=wanted.repeats, continues=wanted.continues)
    except FormatError as error:
        raise ApiError(400, f"body: {error.what}", param="body") from None
    pairs = found.repeats.sources.items()
    repeats = [{"at": found.places[at], "of": found.places[source]} for at, source in pairs]
    return {"body": found.body, "marks": found.marks, "repeats": repeats}


def ordered(
    message: Message, encoded: EncodedPrompt, order: DocumentOrder, plan: Callable[[Sequence[Part]], Plan]
) -> tuple[Message, Reordered] | None:
    """Return the last message of a prompt with its documents in the planned order, and what was done.

    None where they stay as given: also if there are fewer than two, or if the template does not show each as it is.
    """
    texts = [message.content[start:end] for start, end in pairwise((0, *message.cuts))]
    before = encoded.ends[-2] if len(encoded.ends) > 1 else 0
    ends = [at for at in encoded.parts if before < at < encoded.ends[-1]] if encoded.ends else []
    if len(texts) < 3 or len(ends) != len(texts) + 1:
        return None
    parts = document_parts(encoded.ids, ends[:-1], texts[:-1])
    found = plan(parts) if parts else None
    if found is None or not found.moves:
        return None
    best, question = document_order(found), texts[-1]
    if order == "ranked":
        question = f"{ranking_line(best)}\n\n{question}"
    texts = [*best.apply(texts[:-1]), question]
    content = msgspec.structs.replace(message, content="".join(texts), cuts=tuple(accumulate(map(len, texts))))
    return content, Reordered(best.order, found.cached, found.cached_as_given)
