"""One chat request: its messages and tools as a prompt, its answers begun. Each door translates its requests into
`EdgeChatRequest` and reads the answers in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ctxreuse.daemon.logprobs import LogprobReporter, PromptLogprob, spelling_of
from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.openai import ApiError, ChatRequest, CompletionRequest
from ctxreuse.engines.prompt import EncodedPrompt, encode_prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import as_tokens
from ctxreuse.pauses import PauseKind
from ctxreuse.pauses.kinds import TOOL_CALL
from ctxreuse.toolcalls import Family, Tool, prompt_text
from ctxreuse.why import PromptPart, Reordered, RequestInfo
from ctxreuse_edge.api.answers import KeepAlive, max_kl_of, sampling_of
from ctxreuse_edge.api.calls import CallReader, family_for, shown, tools_of
from ctxreuse_edge.api.documents import ordered
from ctxreuse_edge.api.formats import constrained, format_of

if TYPE_CHECKING:
    from ctxreuse.engines.text import TextModel
    from ctxreuse.runtime import Completion
    from ctxreuse.runtime.request import Request
    from ctxreuse_edge.node import EdgeNode

__all__ = ["Chat", "EdgeChatRequest", "about_messages", "branches_of", "check_prompt_logprobs", "encode_chat", "spell"]

#: Roles of messages with a tool's result: the session has waited for a tool, whatever its last answer ended with.
_TOOL_ROLES = frozenset(("tool", "function"))


class EdgeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """A chat request; messages of a named ``context`` come before its own.

    ``keep_alive``: how long the model stays loaded afterwards, as in Ollama: ``5m``, seconds, 0, -1.
    """

    context: str | None = None
    keep_alive: KeepAlive = None


def encode_chat(
    text: TextModel,
    family: Family,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    max_tokens: int,
    generate: bool = True,
) -> EncodedPrompt:
    """Encode a conversation with its tools and calls, as models of that family are shown them. Raises what
    `encode_prompt` raises."""
    if tools or any(message.tool_calls for message in messages):
        text = prompt_text(text, family)
    texts = [tool.text for tool in tools]
    return encode_prompt(text, messages, tools=texts, generate=generate, max_tokens=max_tokens)


class Chat:
    """A chat request, checked; `begin` makes its prompt and begins its answers.

    Args:
        body: the request.
        request: its id, under which `why` explains it.
        before: messages that come before its own, asked for when the prompt is made; None: those of its context.
        session: what its client says it belongs to: `why` finds its last request, and the scheduler groups by it.

    Raises:
        ApiError: for a model that is not served, and for fields that contradict each other.
    """

    def __init__(
        self,
        node: EdgeNode,
        body: EdgeChatRequest,
        request: str,
        before: Callable[[], Sequence[Message]] | None = None,
        *,
        session: str = "",
    ) -> None:
        self._node, self._body, self._request, self._session = node, body, request, session
        self._before = before if before is not None else self._of_context
        #: The model that answers.
        self.model = node.models.find(body.model)
        _refuse_unsupported(body)
        self._wanted, self._tools = format_of(body), tools_of(body)
        self._family: Family | None = None
        #: Of each token of the prompt what the model thinks of it, where the request wants that; after `begin`.
        self.prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
        #: The messages and where their text stands in the prompt, and the prompt; after `begin`.
        self.messages: Sequence[Message] = ()
        self.encoded = EncodedPrompt(as_tokens([]), ())
        self.prompt: Request | None = None

    @property
    def has_tools(self) -> bool:
        """True if the answers may have calls, which are read with `reader`."""
        return self._tools is not None

    def reader(self) -> CallReader:
        """Return a reader of one answer's text; after `begin`, for requests with tools."""
        assert self._family is not None, "begin first"
        return CallReader(self._family)

    def encode(self) -> EncodedPrompt:
        """Return the prompt's ids. The model must be loaded. Raises what `begin` raises."""
        text, own = self.model.runtime.text, self._body.messages
        self.messages = [*self._before(), *(m.message(f"messages[{i}].content") for i, m in enumerate(own))]
        if text is None:
            raise ApiError(400, "the model has no tokenizer: send token ids to /v1/completions")
        self._family = family_for(text, self._node.settings.edge.tools)
        self.encoded = self._encoded(self.messages, generate=True)
        return self.encoded

    def _encoded(self, messages: Sequence[Message], *, generate: bool) -> EncodedPrompt:
        runtime, tools, family = self.model.runtime, self._tools, self._family
        assert runtime.text is not None
        assert family is not None
        known = tools.tools if tools is not None else ()
        return encode_chat(
            runtime.text, family, messages, known, generate=generate, max_tokens=runtime.space.max_tokens
        )

    def begin(self, name: str, step: Callable[[], None]) -> list[Completion]:
        """Make the prompt and begin the answers with the id ``name``; calls ``step`` before each long step.

        Raises ApiError, ContextTooLongError, EngineError for what the model cannot answer.
        """
        self.encode()
        node, body, runtime, tools = self._node, self._body, self.model.runtime, self._tools
        max_kl = max_kl_of(node, body.ctxreuse.lossy, runtime)
        reordered = self._order_documents(max_kl)
        found, text, space = self.encoded, runtime.text, runtime.space
        family, messages = self._family, self.messages
        assert text is not None
        assert family is not None
        spell(body, text)
        step()
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        sampling, form = sampling_of(body, len(found.ids), space, limit), self._wanted
        if tools is not None:
            form, sampling = tools.format(family, text, form), shown(sampling, family, text)
        sampling = constrained(sampling, form, runtime)
        names = [tool.name for tool in tools.tools] if tools is not None else ()
        about = about_messages(messages, found, self._request, name, names)
        was = PauseKind(TOOL_CALL) if messages and messages[-1].role in _TOOL_ROLES else None
        self.prompt = prompt = runtime.request(
            found.ids,
            parts=found.parts,
            branches=branches_of(found.ends),
            max_kl=max_kl,
            about=msgspec.structs.replace(about, session=self._session, reordered=reordered),
            priority=body.priority,
            caller=CALLER.get(),
        )
        node.pins.use(prompt.keys)
        step()
        if body.prompt_logprobs is not None:
            scores = runtime.score(prompt, body.prompt_logprobs, step)
            self.prompt_logprobs = LogprobReporter(text, body.prompt_logprobs).prompt(found.ids.tolist(), scores)
        return runtime.complete_many(prompt, sampling.answers(body.answers), was=was)

    def _order_documents(self, max_kl: float | None) -> Reordered | None:
        """Put the documents of the last message into the order wanted; returns what was done (None: nothing)."""
        order = self._body.ctxreuse.order or self._node.settings.edge.document_order
        if order == "given" or not self.messages:
            return None
        found = ordered(self.messages[-1], self.encoded, order, lambda parts: self.model.runtime.plan(parts, max_kl))
        if found is None:
            return None
        message, reordered = found
        self.messages = [*self.messages[:-1], message]
        self.encoded = self._encoded(self.messages, generate=True)
        return reordered

    def end_of(self, message: int, parts: int) -> int:
        """Return the position in the prompt behind so many parts of a message of the body; after `begin`. What cannot
        be separated from what follows counts to that."""
        at = message + len(self.messages) - len(self._body.messages)
        one, ends = self.messages[at], self.encoded.ends
        last = parts >= len(one.cuts)
        if last and len(ends) == len(self.messages):
            return ends[at]
        if last and at == len(self.messages) - 1 and ends:
            return ends[-1]  # it is looked for in prompts of any length, see `encode_prompt`
        if not last:
            cut = one.cuts[parts - 1]
            one = msgspec.structs.replace(one, content=one.content[: cut + 1], cuts=(*one.cuts[:parts],))
        try:
            begun = self._encoded([*self.messages[:at], one], generate=False).ids
        except EngineError:
            return 0  # templates may refuse to end there
        size = min(len(begun), len(self.encoded.ids))
        differs = np.flatnonzero(begun[:size] != self.encoded.ids[:size])
        return int(differs[0]) if len(differs) else size

    def end_of_tools(self, count: int) -> int:
        """Return the position behind the first ``count`` tools in the prompt; after `begin`."""
        begun = self.encoded.tools
        if not begun:  # the template shows them in a form of its own, ahead of all that is said
            return min(self.encoded.ends, default=0)
        after = begun[count] if count < len(begun) else None
        return after or min((end for end in self.encoded.parts if end > begun[-1]), default=begun[-1])

    def _of_context(self) -> Sequence[Message]:
        return self._node.contexts.messages(self._body.context) if self._body.context else []


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


def _refuse_unsupported(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    check_prompt_logprobs(body)


def check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    """Raise ApiError for log-probabilities of a prompt that are to be streamed."""
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")


def spell(body: ChatRequest | CompletionRequest, text: TextModel) -> None:
    """Build the table that log-probabilities are spelled with, if the request wants them."""
    if body.wants_logprobs or body.prompt_logprobs is not None:
        spelling_of(text)
