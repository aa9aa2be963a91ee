"""The OpenAI API: requests, answers, streamed chunks and errors, as structs.

Unknown fields of requests are ignored, as clients send new ones every month, and named in a header of the answer; a
known field with a wrong type or value is refused by name. `usage` has the usual counts, and prompt tokens by source.
"""

from __future__ import annotations

import contextlib
import re
from functools import cache
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ctxreuse.daemon.formats import ResponseFormat, StructuredOutputs
from ctxreuse.daemon.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob
from ctxreuse.engines.sampling import MAX_BIAS
from ctxreuse.engines.text import Message, ToolCall
from ctxreuse.errors import (
    ConfigError,
    ContextTooLongError,
    CtxReuseError,
    EngineDiedError,
    EngineError,
    LinkError,
    SessionError,
    StoreError,
    TokenRangeError,
)
from ctxreuse.metrics import SOURCES
from ctxreuse.pauses.envelope import KvHints
from ctxreuse.planner import DocumentOrder
from ctxreuse.usage import StepUsage, Usage

__all__ = [
    "DONE",
    "MAX_ANSWERS",
    "MAX_MESSAGES",
    "ROLES",
    "ApiError",
    "ApiFunction",
    "ApiToolCall",
    "ApiUsage",
    "CallDelta",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatMessage",
    "ChatRequest",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "ContentPart",
    "Delta",
    "FunctionDelta",
    "Model",
    "ModelList",
    "PromptDetails",
    "Reply",
    "SamplingFields",
    "StreamOptions",
    "api_error",
    "event",
    "ignored_fields",
    "parse",
    "usage_of",
]

T = TypeVar("T")

#: Who may say a message.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: Messages of a request at most.
MAX_MESSAGES = 16_384

DONE = b"data: [DONE]\n\n"

_Whole = Annotated[int, msgspec.Meta(ge=0)]
#: Answers to one request at most.
MAX_ANSWERS = 64
_Alternatives = Annotated[int, msgspec.Meta(ge=0, le=20)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class ApiError(Exception):
    """An error answer: HTTP ``status`` and the body that OpenAI clients expect; only raised inside the HTTP server."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """``{"error": {"message", "type", "code", "param"}}``"""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error})


def api_error(error: CtxReuseError) -> ApiError:
    """Return the answer to a client for an error."""
    text = str(error)
    if isinstance(error, ContextTooLongError):
        return ApiError(400, text, code="context_length_exceeded", param="messages")
    if isinstance(error, TokenRangeError):
        return ApiError(400, text, code="token_out_of_range", param="prompt")
    if isinstance(error, SessionError):
        return ApiError(404, text, type="not_found_error", code="no_such_context")
    if isinstance(error, EngineDiedError):
        return ApiError(503, text, type="server_error", code="engine_died", retry_after=1)
    if isinstance(error, EngineError | ConfigError):
        return ApiError(400, text)
    if isinstance(error, StoreError):
        return ApiError(503, text, type="server_error", code="store")
    if isinstance(error, LinkError):
        return ApiError(502, text, type="server_error", code="link")
    return ApiError(500, text, type="server_error")


# Requests


class ApiFunction(msgspec.Struct, frozen=True):
    """The function of a call; ``arguments``: JSON as a text."""

    name: str
    arguments: str = "{}"


class ApiToolCall(msgspec.Struct, frozen=True):
    """One call of a tool, in a request and in an answer."""

    function: ApiFunction
    id: str = ""
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    """A piece of a call's function; its name comes first, whole."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of the call ``index`` in a chunk; the first one has its id."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only the type ``text`` is supported."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; ``content``: text, a list of parts, or None (tool calls)."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ApiToolCall] | None = None
    tool_call_id: str | None = None

    def text(self, where: str = "messages") -> str:
        """Return the content as one text. Raises ApiError for parts that are not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise ApiError(400, f"content of type {part.type!r} is not supported, only text is", param=where)
        return "".join(part.text for part in self.content)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Characters of `text` at which parts end."""
        return tuple(accumulate(len(part.text) for part in self.content)) if isinstance(self.content, list) else ()

    def message(self, where: str = "messages") -> Message:
        """Return it as an engine takes it. Raises ApiError for an unknown role and for parts that are not text."""
        if self.role not in ROLES:
            place = f"{where.removesuffix('.content')}.role"
            raise ApiError(400, f"{place}: {self.role[:64]!r} is no role; use {', '.join(ROLES)}", param=place)
        calls = tuple(ToolCall.plain(c.function.name, c.function.arguments, c.id) for c in self.tool_calls or ())
        if calls and self.role != "assistant":
            place = f"{where.removesuffix('.content')}.tool_calls"
            raise ApiError(400, f"{place}: only an assistant calls tools", param=place)
        return Message(self.role, self.text(where), self.name, self.cuts, calls, self.tool_call_id or "")


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: a last chunk, without choices, has the usage."""

    include_usage: bool = False


class Extra(msgspec.Struct, frozen=True):
    """Our extension of a request.

    ``lossy``: quality limit of reused KV as a level, such as ``kl-0.01``; "": exact only; None: as in the daemon's
    settings. ``speculate``: ``off``: the answer is not drafted; ``auto``: as in the daemon's settings. ``verify``:
    likewise whether a cloud's model may give it; ``steps``: this node's model writes steps and the cloud's judges them,
    by ``step_threshold`` (None: as in the settings). ``exits``: the share of the answer's tokens that may be other than
    the model's own, so that some leave it early; ``off``: none; None: as in the daemon's settings. ``order``: of the
    documents (text parts but the last) of the last message, see `DocumentOrder`; None: as in the daemon's settings.
    """

    lossy: str | None = None
    speculate: Literal["auto", "off"] = "auto"
    verify: Literal["auto", "steps", "off"] = "auto"
    step_threshold: float | None = None
    exits: Annotated[float, msgspec.Meta(gt=0, le=0.2)] | Literal["off"] | None = None
    order: DocumentOrder | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields of both kinds of request, with the OpenAI API's defaults.

    ``priority``, as in vLLM: the lower, the sooner; here below 0 is interactive, above 0 background. ``kv_hints``: what
    becomes of the context after the answer, see `ctxreuse.pauses.envelope`.
    """

    model: str = ""
    max_tokens: _Whole | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: int | None = None
    logit_bias: dict[int, Annotated[float, msgspec.Meta(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: int = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_hints: KvHints | None = None
    ctxreuse: Extra = Extra()

    @property
    def answers(self) -> int:
        """How many answers are made."""
        return self.n or 1

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probabilities are to be given."""
        return False

    @property
    def listed_logprobs(self) -> int:
        """How many of the likeliest tokens are to be given in each place."""
        return 0

    @property
    def reported_logprobs(self) -> int:
        """`SamplingParams.logprobs` of the request: also to choose the likeliest of more answers."""
        return max(self.listed_logprobs, 1) if self.wants_logprobs or self.answers > (self.n or 1) else 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Whole | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    prompt_logprobs: _Alternatives | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """See `SamplingFields.wants_logprobs`."""
        return bool(self.logprobs)

    @property
    def listed_logprobs(self) -> int:
        """See `SamplingFields.listed_logprobs`."""
        return self.top_logprobs or 0


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/completions``; ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)] | None = None
    logprobs: _Alternatives | None = None
    suffix: str | None = None
    prompt_logprobs: _Alternatives | None = None

    @property
    def answers(self) -> int:
        """See `SamplingFields.answers`."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def wants_logprobs(self) -> bool:
        """See `SamplingFields.wants_logprobs`."""
        return self.logprobs is not None

    @property
    def listed_logprobs(self) -> int:
        """See `SamplingFields.listed_logprobs`."""
        return self.logprobs or 0


_AT = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a request's body. Raises ApiError (400) with the name of the wrong field."""
    try:
        body.decode()  # msgspec does not look into what it hands on as it came, such as the arguments of a call
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        text, param = found.groups() if found else (str(error), None)
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing and not param:
            param = missing[1]
        raise ApiError(400, f"{param}: {text}" if param else text, param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


#: Limits of the report of ignored fields: names, and characters of each.
_MAX_IGNORED, _MAX_NAME = 16, 64


def ignored_fields(body: bytes, kind: type[Any]) -> list[str]:
    """Return the ignored fields of a body that `parse` accepted, such as ``messages[].tool_calls``.

    At most 16 names, in order, with only characters that a header can have.
    """
    found: dict[str, None] = {}
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        _find_ignored(msgspec.Raw(body), kind, "", found)
    return list(found)


def _find_ignored(raw: msgspec.Raw, kind: type[Any], where: str, found: dict[str, None]) -> None:
    known = _structs_of(kind)  # type: ignore[arg-type]
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        if name not in known:
            if len(found) < _MAX_IGNORED:
                found[where + re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MAX_NAME])] = None
            continue
        inner, listed = known[name]
        first = bytes(memoryview(value)[:1])
        if inner is not None and first == b"{" and not listed:
            _find_ignored(value, inner, f"{where}{name}.", found)
        elif inner is not None and first == b"[" and listed:
            for item in msgspec.json.decode(value, type=list[msgspec.Raw]):
                _find_ignored(item, inner, f"{where}{name}[].", found)


@cache
def _structs_of(kind: type[Any]) -> dict[str, tuple[type[Any] | None, bool]]:
    """Return of each field of a struct the struct that it holds (None: none), and whether it is a list of them."""
    hints, found = get_type_hints(kind), {}
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        options = [hint, *get_args(hint)] if get_origin(hint) is not list else [hint]
        inner: tuple[type[Any] | None, bool] = (None, False)
        for option in options:
            listed = get_origin(option) is list
            one = get_args(option)[0] if listed else option
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                inner = one, listed
        found[field.encode_name] = inner
    return found


# Answers


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens in detail.

    ``cached_tokens``: reused; ``sources``: all tokens by source; ``levels``: the reused ones by level; ``approx``: the
    answer depends on lossy KV; ``missed``: reason of the first miss ("": none), see ``GET /api/why/ID``; ``moved``:
    reused ones that were relocated; ``mended``: tokens recomputed after relocation; ``gate``: verdict of the quality
    gate ("": nothing to relocate).
    """

    cached_tokens: int = 0
    sources: dict[str, int] = {}
    levels: dict[str, int] = {}
    approx: bool = False
    missed: str = ""
    moved: int = 0
    mended: int = 0
    gate: str = ""


class CompletionDetails(msgspec.Struct, frozen=True):
    """Tokens of the answer's drafts: those that were right, and those that were not; ``seconds_saved`` by them and by
    early exits.

    ``cloud_tokens``: of the answer, those that a cloud's model said; ``verification``: see `Usage`. Both are left out
    where no cloud was to. ``early_exit_tokens``: those that left the model early, ``early_exit_disagreements``: of
    these, those that the whole model would not have said; left out where none left. ``steps``: of an answer in
    steps, each of them.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    seconds_saved: float
    cloud_tokens: int | msgspec.UnsetType = msgspec.UNSET
    verification: str | msgspec.UnsetType = msgspec.UNSET
    early_exit_tokens: int | msgspec.UnsetType = msgspec.UNSET
    early_exit_disagreements: int | msgspec.UnsetType = msgspec.UNSET
    steps: tuple[StepUsage, ...] | msgspec.UnsetType = msgspec.UNSET
    drafted_by_model: int | msgspec.UnsetType = msgspec.UNSET
    accepted_by_model: int | msgspec.UnsetType = msgspec.UNSET


class ApiUsage(msgspec.Struct, frozen=True):
    """What a request cost; prompt_tokens is the sum of ``prompt_tokens_details.sources``.

    ``completion_tokens_details`` is left out of an answer that was neither drafted nor a cloud's to give, and of which
    no token left the model early.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET


def usage_of(usage: Usage) -> ApiUsage:
    """A runtime's usage in the API's words."""
    tokens = usage.tokens
    sources = dict.fromkeys(SOURCES, 0) | usage.tokens.by_source
    sources["compute"] += usage.tokens.computed
    return ApiUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptDetails(
            usage.cached_tokens,
            sources,
            usage.tokens.by_level,
            usage.approximate,
            usage.why or usage.miss_reason,
            usage.tokens.relocated,
            usage.tokens.recomputed,
            usage.gate_decision,
        ),
        _details(usage) if tokens.drafted or tokens.exited or usage.verification else msgspec.UNSET,
    )


def _details(usage: Usage) -> CompletionDetails:
    tokens, none = usage.tokens, msgspec.UNSET
    return CompletionDetails(
        tokens.accepted,
        tokens.drafted - tokens.accepted,
        round(usage.seconds.saved, 6),
        tokens.verified if usage.verification else none,
        usage.verification or none,
        tokens.exited or none,
        tokens.disagreed if tokens.exited else none,
        usage.steps or none,
        tokens.drafted_by_model or none,
        tokens.accepted_by_model if tokens.drafted_by_model else none,
    )


class Reply(msgspec.Struct, frozen=True):
    """The message of an answer; ``content`` is null in one that only calls tools."""

    content: str | None
    role: str = "assistant"
    tool_calls: list[ApiToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    message: Reply
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ApiUsage
    system_fingerprint: str
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The piece of the message in a chunk."""

    role: str = ""
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One streamed event; if usage is requested, it is null in all chunks but the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: ApiUsage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None
    index: int = 0
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True):
    """An answer of ``/v1/completions``, whole or a streamed event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: ApiUsage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    """One model, with the fields that clients of other local servers read; ``max_model_len``: None before it was
    first loaded."""

    id: str
    created: int
    max_model_len: int | None
    owned_by: str = "ctxreuse"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


def event(data: Any) -> bytes:
    """Return a server-sent event with ``data`` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
