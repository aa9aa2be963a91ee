"""Ollama's API: ``/api/chat`` and ``/api/generate``, streamed as lines of JSON unless ``stream`` is false, and what its
clients read of models: ``/api/tags``, ``/api/ps``, ``/api/show``, ``/api/version``.

Names may end with ``:latest``. Models are those of the settings: nothing is pulled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import ctxreuse
from ctxreuse.daemon.formats import JsonSchema, ResponseFormat
from ctxreuse.daemon.middleware import CALLER, new_id
from ctxreuse.daemon.ollama import (
    OllamaAnswer,
    OllamaCall,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModels,
    OllamaOptions,
    OllamaReply,
    OllamaRequest,
    ShowRequest,
    chat_messages,
    error_body,
)
from ctxreuse.daemon.openai import ApiError, ChatMessage, Delta
from ctxreuse.why import RequestInfo
from ctxreuse_edge.api.answers import HttpAnswer, body_of, finish_of, id_of, json_answer, running_answer, sampling_of
from ctxreuse_edge.api.chat import Chat, EdgeChatRequest
from ctxreuse_edge.api.formats import constrained, format_of
from ctxreuse_edge.api.v1 import prompt_ids
from ctxreuse_edge.models import check_keep_alive

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.runtime import Completion
    from ctxreuse_edge.api.answers import Make
    from ctxreuse_edge.api.calls import CallReader
    from ctxreuse_edge.models import ServedModel
    from ctxreuse_edge.node import EdgeNode

__all__ = ["PATHS", "found_model", "routes"]

#: The paths of this API; ``/api/embed`` and ``/api/embeddings`` are served elsewhere.
PATHS = (
    "/api/chat",
    "/api/generate",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/version",
    "/api/embed",
    "/api/embeddings",
)


def routes(node: EdgeNode) -> list[Route]:
    """The routes of this module."""

    async def chat(request: Request) -> Response:
        body = await body_of(request, node, OllamaChatRequest)
        model = found_model(node, body.model)
        if not body.messages:
            return await _load(node, model, body, OllamaReply("assistant", ""))
        chat_body = _chat_request(body, model, chat_messages(body.messages))
        tools = {"tools": body.tools or None, "tool_choice": body.tool_choice}
        chat_body = msgspec.structs.replace(chat_body, **tools)
        one = Chat(node, chat_body, id_of(request))
        return _OllamaStream(node, body, model, chat_body, one.begin, one)

    async def generate(request: Request) -> Response:
        body = await body_of(request, node, OllamaGenerateRequest)
        model = found_model(node, body.model)
        for field in ("images", "suffix"):
            if getattr(body, field):
                raise ApiError(400, f"{field}: not supported", param=field)
        if not body.prompt:
            return await _load(node, model, body, None)
        messages = [ChatMessage("system", body.system)] if body.system else []
        messages.append(ChatMessage("user", body.prompt))
        chat_body = _chat_request(body, model, messages)
        raw = _raw(model, chat_body, body.prompt, id_of(request))
        make = raw if body.raw else Chat(node, chat_body, id_of(request)).begin
        return _OllamaStream(node, body, model, chat_body, make, None)

    async def tags(_: Request) -> Response:
        return json_answer(OllamaModels([_described(node, one) for one in node.models.served]))

    async def running(_: Request) -> Response:
        return json_answer(OllamaModels([_described(node, one) for one in node.models.served if one.loaded]))

    async def show(request: Request) -> Response:
        body = await body_of(request, node, ShowRequest)
        model = found_model(node, body.model or body.name)
        return json_answer(await node.pool.call(lambda: _shown(node, model)))

    async def version(_: Request) -> Response:
        return json_answer({"version": ctxreuse.__version__})

    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", version),
    ]


def found_model(node: EdgeNode, name: str) -> ServedModel:
    """Return the model of that name, with the tag ``latest`` or without. Raises ApiError (404)."""
    names = {known for one in node.models.served for known in (one.name.id, one.given)}
    return node.models.find(name if name in names else name.removesuffix(":latest"))


def _chat_request(body: OllamaRequest, model: ServedModel, messages: list[ChatMessage]) -> EdgeChatRequest:
    options, wanted = body.options or OllamaOptions(), None
    if isinstance(body.format, dict):
        wanted = ResponseFormat("json_schema", JsonSchema(schema=body.format))
    elif body.format == "json":
        wanted = ResponseFormat("json_object")
    elif body.format:
        raise ApiError(400, f"format: {body.format[:64]!r} is neither json nor a schema", param="format")
    return EdgeChatRequest(
        model=model.name.id,
        messages=messages,
        max_tokens=options.num_predict if options.num_predict >= 0 else None,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=options.stop,
        response_format=wanted,
        keep_alive=body.keep_alive,
    )


def _raw(model: ServedModel, body: EdgeChatRequest, prompt: str, request: str) -> Make:
    """Begin answers to a prompt that is taken as it is."""
    wanted = format_of(body)

    def make(name: str, step: Callable[[], None]) -> Sequence[Completion]:
        runtime, space = model.runtime, model.runtime.space
        ids = prompt_ids(prompt, runtime.text, space.max_tokens)
        step()
        sampling = constrained(sampling_of(body, len(ids), space, body.max_tokens), wanted, runtime)
        return runtime.complete_many(
            runtime.request(ids, about=RequestInfo(request, name), caller=CALLER.get()), sampling.answers(1)
        )

    return make


async def _load(node: EdgeNode, model: ServedModel, body: OllamaRequest, message: OllamaReply | None) -> Response:
    """Load a model, or see to it that it is unloaded."""
    seconds = None if body.keep_alive is None else check_keep_alive(body.keep_alive)

    def work() -> None:
        with node.models.using(model, seconds):
            pass

    await node.pool.call(work)
    text = "" if message is None else msgspec.UNSET
    reason = "unload" if seconds == 0 else "load"
    return json_answer(OllamaAnswer(model.name.id, _now(), True, message, text, reason))


def _described(node: EdgeNode, model: ServedModel) -> OllamaModel:
    space, name = model.space, model.name.id
    details: dict[str, Any] = {
        "format": "gguf" if model.name.folder.endswith(".gguf") else "",
        "family": "",
        "families": None,
    }
    details |= {"parent_model": "", "parameter_size": "", "quantization_level": ""}
    if space is not None:
        details |= {"family": space.architecture, "families": [space.architecture]}
    since = datetime.fromtimestamp(node.since, UTC).isoformat()
    digest = space.digest.hex() if space is not None else ""
    return OllamaModel(name, name, since, model.nbytes, digest, details, model.max_tokens or None)


def _shown(node: EdgeNode, model: ServedModel) -> dict[str, Any]:
    with node.models.using(model):
        space, text = model.runtime.space, model.runtime.text
        family = space.architecture
        return {
            "modelfile": "",
            "parameters": "",
            "template": getattr(text, "template", ""),
            "details": _described(node, model).details,
            "model_info": {"general.architecture": family, f"{family}.context_length": space.max_tokens},
            "capabilities": ["completion", "tools"] if text is not None else [],
            "modified_at": datetime.fromtimestamp(node.since, UTC).isoformat(),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat()


class _OllamaStream(HttpAnswer):
    """``chat``: the request, whose answer may have calls; None: a text is answered with a text."""

    stream_type, end = "application/x-ndjson", b""

    def __init__(
        self,
        node: EdgeNode,
        body: OllamaRequest,
        model: ServedModel,
        chat_body: EdgeChatRequest,
        make: Make,
        chat: Chat | None,
    ) -> None:
        self._start, self._loaded = time.perf_counter_ns(), 0
        self._model, self._chat = model, chat
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._reader: CallReader | None = None
        self._text: list[str] = []
        self._calls: list[OllamaCall] = []
        self._call: tuple[str, list[str]] | None = None

        def begin(name: str, step: Callable[[], None]) -> Sequence[Completion]:
            self._loaded = time.perf_counter_ns() - self._start
            return make(name, step)

        running = running_answer(node, model, chat_body, new_id("ollama"), begin, chat_body.keep_alive)
        super().__init__(node, running, stream=body.stream is not False)

    def first(self) -> Sequence[Any]:
        return []

    def piece(self, number: int, piece: GeneratedToken) -> Sequence[Any]:
        if self._chat is None or not self._chat.has_tools:
            return self._said(Delta(content=piece.text))
        if self._reader is None:
            self._reader = self._chat.reader()
        return [line for delta in self._reader.feed(piece.text) for line in self._said(delta)]

    def _said(self, delta: Delta) -> list[OllamaAnswer]:
        lines = []
        if delta.content:
            self._text.append(delta.content)
            lines.append(self._line(delta.content))
        for call in delta.tool_calls or ():
            if isinstance(call.function.name, str):
                lines += self._called()
                self._call = call.function.name, []
            if self._call is not None:
                self._call[1].append(call.function.arguments)
        return lines

    def _called(self) -> list[OllamaAnswer]:
        """The line of the call that is complete now; one that was cut has none."""
        call, self._call = self._call, None
        if call is None:
            return []
        try:
            arguments = msgspec.json.encode(msgspec.json.decode("".join(call[1]), type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return []
        self._calls.append(OllamaCall(OllamaFunction(call[0], msgspec.Raw(arguments))))
        return [self._line("", self._calls[-1:])]

    def _line(self, text: str, calls: list[OllamaCall] | None = None, **last: Any) -> OllamaAnswer:
        message = OllamaReply("assistant", text, calls) if self._is_chat else None
        response = msgspec.UNSET if self._is_chat else text
        return OllamaAnswer(self._model.name.id, _now(), "done_reason" in last, message, response, **last)

    def last(self) -> Sequence[Any]:
        left = self._reader.finish() if self._reader is not None else []
        lines = [line for delta in left for line in self._said(delta)] + self._called()
        return [*lines, self._line("", **self._figures())]

    def whole(self) -> Any:
        self.last()
        return self._line("".join(self._text), self._calls or None, **self._figures())

    def _figures(self) -> dict[str, Any]:
        completion = self.completions[0]
        total, prompt = time.perf_counter_ns() - self._start, int(completion.usage.seconds.total * 1e9)
        return {
            "done_reason": finish_of(completion),
            "total_duration": total,
            "load_duration": self._loaded,
            "prompt_eval_count": completion.usage.tokens.prompt,
            "prompt_eval_duration": prompt,
            "eval_count": completion.usage.tokens.completion,
            "eval_duration": max(total - self._loaded - prompt, 0),
        }

    def encode(self, value: Any) -> bytes:
        return msgspec.json.encode(value) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"
