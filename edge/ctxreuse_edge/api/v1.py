"""The OpenAI-compatible routes: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

Text parts of a message (documents, then a question) are encoded one by one, so each is found again at any position:
with ``"ctxreuse": {"lossy": …}``, or ``edge.max_kl`` in the settings, its KV is relocated there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctxreuse.daemon.logprobs import ChatLogprobs, CompletionLogprobs, LogprobReporter, spelling_of
from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import (
    ApiError,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    CompletionChoice,
    CompletionRequest,
    Delta,
    Model,
    ModelList,
    Reply,
)
from ctxreuse.daemon.openai import Completion as TextCompletion
from ctxreuse.engines.prompt import EncodedPrompt, check_length, encode_prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import ContextTooLongError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.pauses import PauseKind
from ctxreuse.pauses.kinds import TOOL_CALL
from ctxreuse.toolcalls import Family, prompt_text
from ctxreuse.why import PromptPart, RequestInfo
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
from ctxreuse_edge.api.calls import CallReader, family_for, shown, tools_of
from ctxreuse_edge.api.formats import constrained, format_of

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.engines.text import TextModel
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode

#: Roles of messages with a tool's result: the session has waited for a tool, whatever its last answer ended with.
_TOOL_ROLES = frozenset(("tool", "function"))

__all__ = ["EdgeChatRequest", "about_messages", "branches_of", "prompt_ids", "routes"]

# The default of max_tokens in other servers.
_DEFAULT_TOKENS = 16


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""
    return [*_chat(node), *_completions(node), *_models(node)]


class EdgeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """A chat request; messages of a named ``context`` come before its own.

    ``keep_alive``: how long the model stays loaded afterwards, as in Ollama: ``5m``, seconds, 0, -1.
    """

    context: str | None = None
    keep_alive: KeepAlive = None


class EdgeCompletionRequest(CompletionRequest, frozen=True, kw_only=True):
    """A completion request; ``keep_alive``: see `EdgeChatRequest`."""

    keep_alive: KeepAlive = None


def branches_of(ends: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of turns where other contexts are likely to branch off: the first (a shared system prompt) and
    the last two (the conversation continues, or the last question is repeated)."""
    return tuple(sorted({*ends[:1], *ends[-2:]}))


def about_messages(
    messages: Sequence[Message],
    found: EncodedPrompt,
    request: str = "",
    client_id: str = "",
    tools: Sequence[str] = (),
) -> RequestInfo:
    """Return the parts of a conversation's prompt: its messages and tools, as far as their ends are known."""
    # Messages that the template cannot end with are joined with the next.
    names = [message.role for message in messages]
    if len(found.ends) == len(names):
        parts = tuple(PromptPart(name, end) for name, end in zip(names, found.ends))
    else:
        parts = tuple(PromptPart("", end) for end in found.ends)
    # A tool reaches to the next one, the last one to the end of the turn that it is in.
    ahead = [messages[0].role if messages else "", *(f"tool {name}" for name in tools)]
    named = tuple(PromptPart(name, end) for name, end in zip(ahead, found.tools))
    if named:
        after = [(part.name, part.end) for part in parts if part.end > named[-1].end]
        after[:1] = [(ahead[-1], end) for _, end in after[:1]]
        parts = (*named, *(PromptPart(*part) for part in after))
    return RequestInfo(request, client_id, parts=parts, first_message=messages[0].content if messages else "")


def _chat(node: EdgeNode) -> list[Route]:

    async def answer(request: Request) -> Response:
        body = await body_of(request, node, EdgeChatRequest)
        model = node.models.find(body.model)
        _refuse_unsupported(body)
        wanted, tools = format_of(body), tools_of(body)
        families: list[Family] = []

        def make(name: str, step: Callable[[], None]) -> list[Completion]:
            runtime = model.runtime
            before = node.contexts.messages(body.context) if body.context else []
            messages = [m.message(f"messages[{i}].content") for i, m in enumerate(body.messages)]
            text, space = runtime.text, runtime.space
            if text is None:
                raise ApiError(400, "the model has no tokenizer: send token ids to /v1/completions")
            family = family_for(text, node.settings.edge.tools)
            has_calls = any(message.tool_calls for message in messages)
            shown_text = prompt_text(text, family) if tools is not None or has_calls else text
            texts = tools.texts if tools is not None else ()
            found = encode_prompt(shown_text, [*before, *messages], tools=texts, max_tokens=space.max_tokens)
            _spell(body, text)
            step()
            limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            sampling, form = sampling_of(body, len(found.ids), space, limit), wanted
            if tools is not None:
                form, sampling = tools.format(family, text, wanted), shown(sampling, family, text)
                families.append(family)
            sampling = constrained(sampling, form, runtime)
            max_kl = max_kl_of(node, body.ctxreuse.lossy, runtime)
            names = [tool.name for tool in tools.tools] if tools is not None else ()
            about = about_messages([*before, *messages], found, id_of(request), name, names)
            branches = branches_of(found.ends)
            was = PauseKind(TOOL_CALL) if messages and messages[-1].role in _TOOL_ROLES else None
            prompt = runtime.request(
                found.ids,
                parts=found.parts,
                branches=branches,
                max_kl=max_kl,
                about=about,
                priority=body.priority,
                caller=CALLER.get(),
            )
            step()
            return runtime.complete_many(prompt, sampling.answers(body.answers), was=was)

        return _ChatAnswer(node, model, body, "chatcmpl", make, body.keep_alive, families=families)

    return [Route("/v1/chat/completions", answer, methods=["POST"])]


def _refuse_unsupported(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    _refuse_prompt_logprobs(body)


def _refuse_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    if body.prompt_logprobs is not None:
        what = "prompt_logprobs is not supported: what is reused of a prompt has none"
        raise ApiError(400, what, param="prompt_logprobs")


class _ChatAnswer(OpenAiAnswer):
    """``families``: holds the family whose calls the answers may have, once they have begun, if the request has
    tools."""

    def __init__(self, *given: Any, families: Sequence[Family]) -> None:
        super().__init__(*given)
        self._families = families
        self._readers: dict[int, CallReader] = {}

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
        if not self._families or not self._stream:
            return said
        reader = self._readers.setdefault(number, CallReader(self._families[0]))
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
        return ChatCompletion(*self.head, choices, self.usage, self.fingerprint)

    def _choice(self, index: int, number: int, report: Any) -> ChatChoice:
        text, finish = self.completions[number].text, self.finish(number)
        if not self._families:
            return ChatChoice(Reply(text), finish, index, report)
        reader = CallReader(self._families[0])
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
        echo: list[str] = []

        def make(name: str, step: Callable[[], None]) -> list[Completion]:
            runtime, space = model.runtime, model.runtime.space
            ids = prompt_ids(body.prompt, runtime.text, space.max_tokens)
            if runtime.text is not None:
                echo.extend([runtime.text.decode(ids)] if body.echo else [])
                _spell(body, runtime.text)
            step()
            limit = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
            sampling = constrained(sampling_of(body, len(ids), space, limit), wanted, runtime)
            max_kl, about = max_kl_of(node, body.ctxreuse.lossy, runtime), RequestInfo(id_of(request), name)
            prompt = runtime.request(ids, max_kl=max_kl, about=about, priority=body.priority, caller=CALLER.get())
            step()
            return runtime.complete_many(prompt, sampling.answers(body.answers))

        return _TextAnswer(node, model, body, "cmpl", make, body.keep_alive, echo)

    return [Route("/v1/completions", answer, methods=["POST"])]


def _check_completion(body: CompletionRequest) -> None:
    _refuse_prompt_logprobs(body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    if body.echo and body.wants_logprobs:
        what = "echo with logprobs is not supported: what is reused of a prompt has no log-probabilities"
        raise ApiError(400, what, param="echo")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, "best_of must be n or more", param="best_of")
    if body.stream and body.answers > (body.n or 1):
        raise ApiError(400, "best_of is not streamed: the best is known at the end", param="best_of")


def _spell(body: ChatRequest | CompletionRequest, text: TextModel) -> None:
    if body.wants_logprobs:
        spelling_of(text)


class _TextAnswer(OpenAiAnswer):
    def __init__(
        self,
        node: EdgeNode,
        model: ServedModel,
        body: CompletionRequest,
        prefix: str,
        make: Make,
        keep_alive: KeepAlive,
        echo: Sequence[str],
    ) -> None:
        super().__init__(node, model, body, prefix, make, keep_alive)
        #: The prompt, as soon as it was read, where it is wanted.
        self._echo = echo

    def event(
        self, content: str | None, finish: str | None, usage: Usages, number: int = 0, logprobs: Any = None
    ) -> Any:
        choices = [] if content is None else [CompletionChoice(content, finish, number, logprobs)]
        return TextCompletion(*self.head, choices, self.fingerprint, usage)

    def first(self) -> Sequence[Any]:
        return [self.event(self._echo[0], None, self.no_usage, n) for n in range(len(self.completions)) if self._echo]

    def whole(self) -> Any:
        choices = [
            CompletionChoice(
                "".join(self._echo) + self.completions[number].text, finish_of(self.completions[number]), index, report
            )
            for index, (number, report) in enumerate(self.chosen)
        ]
        return TextCompletion(*self.head, choices, self.fingerprint, self.usage)

    def report(self, reporter: LogprobReporter, pieces: Sequence[GeneratedToken]) -> CompletionLogprobs | None:
        return reporter.completion(pieces)


def _models(node: EdgeNode) -> list[Route]:

    def described(model: ServedModel) -> Model:
        return Model(model.name.id, int(node.since), model.max_tokens or None)

    async def listing(_: Request) -> Response:
        return json_answer(ModelList([described(model) for model in node.models.served]))

    async def one(request: Request) -> Response:
        return json_answer(described(node.models.find(request.path_params["name"])))

    return [Route("/v1/models", listing), Route("/v1/models/{name:path}", one)]
