"""The OpenAI-compatible routes: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

Text parts of a message (documents, then a question) are encoded one by one, so each is found again at any position:
with ``"ctxreuse": {"lossy": …}``, or ``edge.max_kl`` in the settings, its KV is relocated there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.logprobs import ChatLogprobs, CompletionLogprobs, LogprobReporter, PromptLogprob
from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import (
    ApiError,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    CompletionChoice,
    CompletionRequest,
    Delta,
    Model,
    ModelList,
    Reply,
)
from ctxreuse.daemon.openai import Completion as TextCompletion
from ctxreuse.engines.prompt import check_length
from ctxreuse.errors import ContextTooLongError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.why import RequestInfo
from ctxreuse_edge.api.answers import (
    KeepAlive,
    Make,
    OpenAiAnswer,
    Usages,
    body_of,
    finish_of,
    id_of,
    json_answer,
    max_kl_of,
    sampling_of,
)
from ctxreuse_edge.api.calls import CallReader
from ctxreuse_edge.api.chat import Chat, EdgeChatRequest, check_prompt_logprobs, spell
from ctxreuse_edge.api.formats import constrained, format_of

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.engines.scoring import TokenScores
    from ctxreuse.engines.text import TextModel
    from ctxreuse.runtime import Completion
    from ctxreuse.runtime.request import Request as Prompt
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode

__all__ = ["EdgeCompletionRequest", "prompt_ids", "routes"]

# The default of max_tokens in other servers.
_DEFAULT_TOKENS = 16


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""
    return [*_chat(node), *_completions(node), *_models(node)]


class EdgeCompletionRequest(CompletionRequest, frozen=True, kw_only=True):
    """A completion request; ``keep_alive``: see `EdgeChatRequest`."""

    keep_alive: KeepAlive = None


def _chat(node: EdgeNode) -> list[Route]:

    async def answer(request: Request) -> Response:
        body = await body_of(request, node, EdgeChatRequest)
        return _ChatAnswer(node, body, Chat(node, body, id_of(request)))

    return [Route("/v1/chat/completions", answer, methods=["POST"])]


class _ChatAnswer(OpenAiAnswer):
    """``chat``: the request's prompt and its tools."""

    def __init__(self, node: EdgeNode, body: EdgeChatRequest, chat: Chat) -> None:
        super().__init__(node, chat.model, body, "chatcmpl", chat.begin, body.keep_alive)
        self._chat = chat
        self._readers: dict[int, CallReader] = {}

    @property
    def prompt(self) -> Prompt | None:
        return self._chat.prompt

    def _chunk(self, choices: list[ChunkChoice], usage: Usages) -> ChatChunk:
        return ChatChunk(*self.head, choices, self.fingerprint, usage)

    def event(
        self, content: str | None, finish: str | None, usage: Usages, number: int = 0, logprobs: Any = None
    ) -> Any:
        delta = None if content is None else Delta(content=content or None)
        return self._chunk([] if delta is None else [ChunkChoice(delta, finish, number, logprobs)], usage)

    def first(self) -> Sequence[Any]:
        begun = [ChunkChoice(Delta("assistant", ""), None, number) for number in range(len(self.completions))]
        return [self._chunk([choice], self.no_usage) for choice in begun]

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        said = super().piece(number, piece)
        if not self._chat.has_tools or not self._stream:
            return said
        reader = self._readers.setdefault(number, self._chat.reader())
        report = said[0].choices[0].logprobs if said else None
        deltas = reader.feed(piece.text) or ([Delta()] if report is not None else [])
        return [
            self._chunk([ChunkChoice(delta, None, number, None if n else report)], self.no_usage)
            for n, delta in enumerate(deltas)
        ]

    def last(self) -> Sequence[Any]:
        left = [(number, delta) for number, reader in self._readers.items() for delta in reader.finish()]
        events = [self._chunk([ChunkChoice(delta, None, number)], self.no_usage) for number, delta in left]
        return [*events, *super().last()]

    def finish(self, number: int) -> str:
        found = super().finish(number)
        return self._readers[number].finish_reason(found) if number in self._readers else found

    def whole(self) -> Any:
        choices = [self._choice(index, number, report) for index, (number, report) in enumerate(self.chosen)]
        return ChatCompletion(*self.head, choices, self.usage, self.fingerprint, self._chat.prompt_logprobs)

    def _choice(self, index: int, number: int, report: Any) -> ChatChoice:
        text, finish = self.completions[number].text, self.finish(number)
        if not self._chat.has_tools:
            return ChatChoice(Reply(text), finish, index, report)
        reader = self._chat.reader()
        reply = reader.reply(text)
        return ChatChoice(reply, reader.finish_reason(finish), index, report)

    def report(self, reporter: LogprobReporter, pieces: Sequence[GeneratedToken]) -> ChatLogprobs | None:
        return reporter.chat(pieces)


def prompt_ids(prompt: str | list[Any], text: TextModel | None, max_tokens: int) -> Tokens:
    """Return the ids of a prompt: a text (where markers are special tokens), ids, or a list of one of either.

    Raises ApiError for anything else, and ContextTooLongError, before any work, for what ``max_tokens`` cannot hold.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if text is None:
            raise ApiError(400, "the model has no tokenizer: send token ids", param="prompt")
        check_length(text, prompt, max_tokens)
        return text.encode(prompt)
    if len(prompt) > max_tokens:
        raise ContextTooLongError(f"the prompt has {len(prompt):,} tokens and the model takes {max_tokens:,}")
    if any(type(token) is not int for token in prompt):
        raise ApiError(400, "prompt: only one text, or one list of token ids, is supported", param="prompt")
    if any(not 0 <= token < 1 << 31 for token in prompt):
        raise ApiError(400, "prompt: a token id is out of range", param="prompt", code="token_out_of_range")
    return as_tokens(prompt)


def _completions(node: EdgeNode) -> list[Route]:

    async def answer(request: Request) -> Response:
        body = await body_of(request, node, EdgeCompletionRequest)
        model = node.models.find(body.model)
        wanted = format_of(body)
        _check_completion(body)
        said = _Prompt()

        def make(name: str, step: Callable[[], None]) -> list[Completion]:
            runtime, space = model.runtime, model.runtime.space
            ids = prompt_ids(body.prompt, runtime.text, space.max_tokens)
            if runtime.text is not None:
                said.text = runtime.text.decode(ids) if body.echo else ""
                spell(body, runtime.text)
            step()
            limit = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
            sampling = constrained(sampling_of(body, len(ids), space, limit), wanted, runtime)
            max_kl, about = max_kl_of(node, body.ctxreuse.lossy, runtime), RequestInfo(id_of(request), name)
            prompt = runtime.request(ids, max_kl=max_kl, about=about, priority=body.priority, caller=CALLER.get())
            said.made = prompt
            step()
            if runtime.text is not None and (body.prompt_logprobs is not None or (body.echo and body.wants_logprobs)):
                top = max(body.prompt_logprobs or 0, body.listed_logprobs)
                said.ids, said.scores = ids.tolist(), runtime.score(prompt, top, step)
            return runtime.complete_many(prompt, sampling.answers(body.answers))

        return _TextAnswer(node, model, body, "cmpl", make, body.keep_alive, said)

    return [Route("/v1/completions", answer, methods=["POST"])]


def _check_completion(body: CompletionRequest) -> None:
    check_prompt_logprobs(body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    if body.echo and body.wants_logprobs and body.stream:
        raise ApiError(400, "echo with logprobs cannot be streamed", param="echo")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, "best_of must be n or more", param="best_of")
    if body.stream and body.answers > (body.n or 1):
        raise ApiError(400, "best_of is not streamed: the best is known at the end", param="best_of")


@dataclass
class _Prompt:
    """A prompt, as soon as it was read: its text, where it is echoed, and its ids with their scores, where wanted."""

    made: Prompt | None = None
    text: str = ""
    ids: Sequence[int] = ()
    scores: TokenScores | None = None


class _TextAnswer(OpenAiAnswer):
    def __init__(
        self,
        node: EdgeNode,
        model: ServedModel,
        body: CompletionRequest,
        prefix: str,
        make: Make,
        keep_alive: KeepAlive,
        prompt: _Prompt,
    ) -> None:
        super().__init__(node, model, body, prefix, make, keep_alive)
        self._text_request, self._prompt = body, prompt

    @property
    def prompt(self) -> Prompt | None:
        return self._prompt.made

    def event(
        self, content: str | None, finish: str | None, usage: Usages, number: int = 0, logprobs: Any = None
    ) -> Any:
        choices = [] if content is None else [CompletionChoice(content, finish, number, logprobs)]
        return TextCompletion(*self.head, choices, self.fingerprint, usage)

    def first(self) -> Sequence[Any]:
        text = self._prompt.text
        return [self.event(text, None, self.no_usage, n) for n in range(len(self.completions)) if text]

    def whole(self) -> Any:
        choices = [
            CompletionChoice(
                self._prompt.text + self.completions[number].text,
                finish_of(self.completions[number]),
                index,
                report,
                self._prompt_logprobs(),
            )
            for index, (number, report) in enumerate(self.chosen)
        ]
        return TextCompletion(*self.head, choices, self.fingerprint, self.usage)

    def _prompt_logprobs(self) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
        count, prompt = self._text_request.prompt_logprobs, self._prompt
        if count is None or prompt.scores is None:
            return msgspec.UNSET
        return self.reporter(count).prompt(prompt.ids, prompt.scores)

    def report(self, reporter: LogprobReporter, pieces: Sequence[GeneratedToken]) -> CompletionLogprobs | None:
        prompt = self._prompt
        if self._stream or not self._text_request.echo or prompt.scores is None:
            return reporter.completion(pieces)
        echoed = reporter.echoed(prompt.ids, prompt.scores)
        return echoed.followed_by(reporter.completion(pieces))


def _models(node: EdgeNode) -> list[Route]:

    def described(model: ServedModel) -> Model:
        return Model(model.name.id, int(node.since), model.max_tokens or None)

    async def listing(_: Request) -> Response:
        return json_answer(ModelList([described(model) for model in node.models.served]))

    async def one(request: Request) -> Response:
        return json_answer(described(node.models.find(request.path_params["name"])))

    return [Route("/v1/models", listing), Route("/v1/models/{name:path}", one)]
