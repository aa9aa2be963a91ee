"""``POST /v1/completions``: a text or token ids in, what follows out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.front import new_id
from ctxreuse.daemon.openai import ApiError, CompletionChoice, CompletionRequest, Usage, parse, usage_of
from ctxreuse.daemon.openai import Completion as TextCompletion
from ctxreuse.keys import Tokens, as_tokens
from ctxreuse.why import About
from ctxreuse_edge.api.answers import Answer, body_of, finish_of, id_of, known_model, lossy_of, sampling_of

if TYPE_CHECKING:
    from ctxreuse.engines.generate import Piece
    from ctxreuse.engines.text import TextModel
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.node import Node
    from ctxreuse_edge.worker import Running

__all__ = ["prompt_ids", "routes"]

# What other servers answer where max_tokens is not said.
_DEFAULT_TOKENS = 16


def prompt_ids(asked: str | list[Any], text: TextModel | None) -> Tokens:
    """Ids of a prompt: a text, ids, or a list of one of either. Markers in a text are the caller's own and special.

    Raises ApiError for anything else.
    """
    if isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], str | list):
        asked = asked[0]
    if isinstance(asked, str):
        if text is None:
            raise ApiError(400, "the model has no tokenizer: send token ids", param="prompt")
        return text.encode(asked)
    if any(type(token) is not int for token in asked):
        raise ApiError(400, "prompt: one text, or one list of token ids, is answered a request", param="prompt")
    if any(not 0 <= token < 1 << 31 for token in asked):
        raise ApiError(400, "prompt: a token id is out of range", param="prompt", code="token_out_of_range")
    return as_tokens(asked)


def routes(node: Node) -> list[Route]:
    """The routes of this module."""

    async def answer(request: Request) -> Response:
        asked = parse(await body_of(request, node), CompletionRequest)
        known_model(node, asked.model)
        for name, refused in (
            ("logprobs", asked.logprobs is not None),
            ("echo", bool(asked.echo)),
            ("suffix", bool(asked.suffix)),
            ("best_of", asked.best_of not in (None, 1)),
        ):
            if refused:
                raise ApiError(400, f"{name} is not supported", param=name)

        name = new_id("cmpl")

        def make() -> Completion:
            ids = prompt_ids(asked.prompt, node.runtime.text)
            limit = _DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
            sampling = sampling_of(asked, len(ids), node.runtime.engine.space.max_tokens, limit)
            lossy, about = lossy_of(node, asked.ctxreuse.lossy), About(id_of(request), name)
            return node.runtime.complete(ids, sampling, lossy=lossy, about=about)

        return _Text(node, asked, node.worker.begin(make), name)

    return [Route("/v1/completions", answer, methods=["POST"])]


class _Text(Answer):
    def __init__(self, node: Node, asked: CompletionRequest, running: Running, name: str) -> None:
        super().__init__(node, running, stream=bool(asked.stream))
        self._id, self._created = name, int(time.time())
        self._usage_wanted = bool(asked.stream_options and asked.stream_options.include_usage)

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> TextCompletion:
        given = msgspec.UNSET if usage is None and not self._usage_wanted else usage
        return TextCompletion(self._id, self._created, self._node.model.id, choices, self._node.fingerprint, given)

    def first(self, completion: Completion) -> Sequence[Any]:
        return []

    def piece(self, completion: Completion, piece: Piece) -> Sequence[Any]:
        return [self._event([CompletionChoice(piece.text, None)])] if piece.text else []

    def last(self, completion: Completion) -> Sequence[Any]:
        usage, choice = usage_of(completion.usage), CompletionChoice("", finish_of(completion))
        if self._usage_wanted:
            return [self._event([choice]), self._event([], usage)]
        return [self._event([choice], usage)]

    def whole(self, completion: Completion) -> Any:
        choice = CompletionChoice(completion.text, finish_of(completion))
        return self._event([choice], usage_of(completion.usage))
