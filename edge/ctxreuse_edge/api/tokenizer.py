"""A model's tokenizer, in vLLM's shapes: text or a conversation to ids, ids to text.

::

    POST /tokenize   {"prompt", "model"?, "return_token_strs"?}                                 {"count", "tokens", …}
    POST /tokenize   {"messages", "tools"?, "model"?, "add_generation_prompt"?, "return_token_strs"?}
                                                                                                {"count", "tokens", …}
    POST /detokenize {"tokens", "model"?}                                                       {"prompt"}

The ids are those that `/v1/completions` and `/v1/chat/completions` compute: no token is added to a text.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.logprobs import spelling_of
from ctxreuse.daemon.openai import MAX_MESSAGES, ApiError, ChatMessage
from ctxreuse.engines.prompt import check_length
from ctxreuse_edge.api.answers import body_of, json_answer
from ctxreuse_edge.api.calls import described, family_for
from ctxreuse_edge.api.chat import encode_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.toolcalls import Family
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode

__all__ = ["DetokenizeRequest", "TokenizeRequest", "routes"]


class TokenizeRequest(msgspec.Struct, frozen=True):
    """``POST /tokenize``: of a ``prompt``, or of ``messages`` with ``tools``."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """``POST /detokenize``"""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
    model: str = ""


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def in_pool(model: ServedModel, work: Callable[[TextModel], Any]) -> Response:
        def run() -> Any:
            with node.models.using(model):
                text = model.runtime.text
                if text is None:
                    raise ApiError(400, "the model has no tokenizer")
                return work(text)

        return json_answer(await node.pool.call(run))

    async def tokenize(request: Request) -> Response:
        body = await body_of(request, node, TokenizeRequest)
        model = node.models.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "either a prompt or messages are required", param="prompt")

        def work(text: TextModel) -> Any:
            longest = model.runtime.space.max_tokens
            ids = _ids(body, text, family_for(text, node.settings.edge.tools), longest)
            names = spelling_of(text).tokens if body.return_token_strs else ()
            strings = [names[i].decode("utf-8", "replace") for i in ids] if names else None
            return {"count": len(ids), "max_model_len": longest, "tokens": ids.tolist(), "token_strs": strings}

        return await in_pool(model, work)

    async def detokenize(request: Request) -> Response:
        body = await body_of(request, node, DetokenizeRequest)
        model = node.models.find(body.model)

        def work(text: TextModel) -> Any:
            beyond = next((i for i in body.tokens if i >= model.runtime.space.vocab_size), None)
            if beyond is not None:
                what = f"tokens: {beyond} is no token of the model, which has {model.runtime.space.vocab_size:,}"
                raise ApiError(400, what, param="tokens", code="token_out_of_range")
            return {"prompt": _spelt(text, body.tokens)}

        return await in_pool(model, work)

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


def _ids(body: TokenizeRequest, text: TextModel, family: Family, longest: int) -> Tokens:
    if body.prompt is not None:
        check_length(text, body.prompt, longest)
        return text.encode(body.prompt)
    messages = [m.message(f"messages[{i}].content") for i, m in enumerate(body.messages or ())]
    tools, generate = described(body.tools or ()), body.add_generation_prompt
    return encode_chat(text, family, messages, tools, max_tokens=longest, generate=generate).ids


def _spelt(text: TextModel, ids: Sequence[int]) -> str:
    """The text of ids, special ones spelt out where the text model tells how."""
    found = spelling_of(text)
    special = frozenset(found.special)
    runs = [(of, list(run)) for of, run in groupby(ids, special.__contains__)]
    return "".join(b"".join(found.tokens[i] for i in run).decode() if of else text.decode(run) for of, run in runs)
