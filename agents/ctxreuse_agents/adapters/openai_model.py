"""Models for the OpenAI Agents SDK that run in this process, on a memory's engine: no daemon, no key, KV reused."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from ctxreuse.daemon.deltas import delta_of
from ctxreuse.daemon.openai import ApiError, Delta
from ctxreuse.daemon.responses import (
    FunctionCall,
    InputItem,
    Item,
    OutputMessage,
    OutputWriter,
    ResponseObject,
    input_items,
    messages_of,
    response_usage,
)
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.store import NewTurn
from ctxreuse.toolcalls import CallParser, family_of
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

with framework("openai-agents", "0.20", "0.25"):
    from agents.usage import Usage
    from openai.types.responses import Response, ResponseOutputItem, ResponseStreamEvent
    from pydantic import TypeAdapter

    from agents import Model, ModelProvider, ModelResponse

__all__ = ["OpenAIAgentsModel", "OpenAIAgentsProvider"]

#: Sessions in which answers are made, that are remembered so as to go on in them.
_SESSIONS = 64
_NAME = "openai-agents "
#: Of this process: sessions with another are left from one that ended.
_RUN = secrets.token_hex(4)


class _Known(NamedTuple):
    """A session after whose turn ``turn`` a conversation goes on."""

    session: Session
    turn: int


class OpenAIAgentsModel(Model):  # type: ignore[misc]
    """Answers with a memory's engine. Any event loop may call, and several runs at once.

    A conversation that goes on does so in the session of its last answer, with the token ids that were sampled, so that
    all of it but the new items is reused. These sessions are named ``openai-agents …``; the oldest are deleted.
    """

    def __init__(self, memory: Memory, *, max_tokens: int = 512) -> None:
        """Use a memory that has an engine; the caller closes it. ``max_tokens``: of answers without another limit."""
        self._memory, self._max_tokens = memory, max_tokens
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        memory._state.engine()
        for left in memory.sessions(prefix=_NAME):
            if not left.name.startswith(_NAME + _RUN):
                self._forget(left)
        self._output, self._event = TypeAdapter(ResponseOutputItem), TypeAdapter(ResponseStreamEvent)

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: Any,
        tools: list[Any],
        output_schema: Any,
        handoffs: list[Any],
        tracing: Any,
        **given: Any,
    ) -> Any:
        """Answer; see the SDK. The ``request_id`` of the response is what `Runtime.why` explains."""
        begin = self._begin(system_instructions, input, model_settings, tools, output_schema, handoffs, given)
        made = await asyncio.to_thread(begin)
        try:
            await asyncio.to_thread(made.finish)
        finally:
            await asyncio.to_thread(made.close)
        usage = msgspec.to_builtins(response_usage(made.answer.usage))
        output = [self._output.validate_python(msgspec.to_builtins(item)) for item in made.writer.output]
        return ModelResponse(
            output=output, usage=Usage(requests=1, **usage), response_id=None, request_id=made.answer.usage.request
        )

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: Any,
        tools: list[Any],
        output_schema: Any,
        handoffs: list[Any],
        tracing: Any,
        **given: Any,
    ) -> AsyncIterator[Any]:
        """Answer in events; see the SDK."""
        begin = self._begin(system_instructions, input, model_settings, tools, output_schema, handoffs, given)
        made = await asyncio.to_thread(begin)
        response = ResponseObject(id=f"resp_{made.answer.session_id}", created_at=int(time.time()), model="ctxreuse")
        try:
            yield self._event_of(made.writer.lifecycle("created", response))
            events = made.events()
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield self._event_of(event)
            done = msgspec.structs.replace(
                response,
                status="completed",
                completed_at=int(time.time()),
                output=list(made.writer.output),
                usage=response_usage(made.answer.usage),
            )
            found = self._event_of(made.writer.lifecycle("completed", done))
            found.response = Response.model_validate(msgspec.to_builtins(done))
            yield found
        finally:
            await asyncio.to_thread(made.close)

    def _event_of(self, event: dict[str, Any]) -> Any:
        return self._event.validate_python(msgspec.to_builtins(event))

    def _begin(
        self,
        instructions: str | None,
        given: Any,
        settings: Any,
        tools: Sequence[Any],
        output_schema: Any,
        handoffs: Sequence[Any],
        others: dict[str, Any],
    ) -> Callable[[], _Made]:
        """Check a request; what is returned begins the answer. Raises ConfigError for what cannot be had here."""
        if any(others.get(name) for name in ("previous_response_id", "conversation_id", "prompt")):
            fix = "Send the items themselves, or use an OpenAISession"
            raise ConfigError("this model keeps no responses, conversations or prompts of a server", fix=fix)
        messages = _messages(instructions, given)
        wanted: dict[str, Any] = {"tools": _tools(tools, handoffs), "max_tokens": settings.max_tokens}
        wanted |= {"temperature": settings.temperature, "top_p": settings.top_p}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        wanted.setdefault("max_tokens", self._max_tokens)
        if wanted["tools"] and settings.tool_choice is not None:
            wanted["tool_choice"] = settings.tool_choice
        if output_schema is not None and not output_schema.is_plain_text():
            wanted["schema"] = output_schema.json_schema()
        return lambda: self._answer(messages, wanted)

    def _answer(self, messages: list[Message], wanted: dict[str, Any]) -> _Made:
        tools = msgspec.json.encode(wanted["tools"])
        prefixes = list(_prefixes(tools, messages))
        session, start = self._session(prefixes)
        rest = [NewTurn(one.role, one.content, one.meta) for one in messages[start:]]
        try:
            session.extend(rest)
            answer = session.complete(**wanted)
        except BaseException:
            self._forget(session)
            raise
        text = self._memory._state.engine()[0].text
        family = family_of(getattr(text, "template", ""))

        def keep(output: Sequence[OutputMessage | FunctionCall]) -> None:
            made = messages_of([Item.made(item) for item in output])
            turn = answer.turn
            if turn is None or answer.finish not in ("stop", "length"):
                self._forget(session)
                return
            *_, last = _prefixes(tools, [*messages, *made])
            self._remember(last, _Known(session, turn.id))

        return _Made(answer, CallParser(family) if wanted["tools"] else None, keep)

    def _session(self, prefixes: Sequence[bytes]) -> tuple[Session, int]:
        """Return a session with as many of the messages as any has, for one answer at a time, and their number."""
        for count in range(len(prefixes) - 1, 0, -1):
            with self._lock:
                known = self._known.pop(prefixes[count], None)
            if known is None:
                continue
            with suppress(CtxReuseError):  # deleted meanwhile
                if known.session.head == known.turn:
                    return known.session, count
        return self._memory.create(f"{_NAME}{_RUN} {secrets.token_hex(8)}"), 0

    def _remember(self, prefix: bytes, known: _Known) -> None:
        with self._lock:
            self._known[prefix] = known
            old = [self._known.popitem(last=False)[1] for _ in range(len(self._known) - _SESSIONS)]
        for one in old:
            self._forget(one.session)

    def _forget(self, session: Session) -> None:
        """Delete a session; its KV stays for others, until it is evicted."""
        with suppress(CtxReuseError):
            self._memory.ledger.delete(session.id)


class OpenAIAgentsProvider(ModelProvider):  # type: ignore[misc]
    """The one model of a memory's engine, under any name."""

    def __init__(self, memory: Memory, *, max_tokens: int = 512) -> None:
        """See `OpenAIAgentsModel`."""
        self._model = OpenAIAgentsModel(memory, max_tokens=max_tokens)

    def get_model(self, model_name: str | None) -> Any:
        """Return the model."""
        return self._model


class _Made:
    """An answer that is being made, as events; ``keep`` is called with its items at the end."""

    def __init__(
        self,
        answer: Answer,
        parser: CallParser | None,
        keep: Callable[[Sequence[OutputMessage | FunctionCall]], None],
    ) -> None:
        self.answer, self.writer = answer, OutputWriter()
        self._parser, self._keep = parser, keep

    def events(self) -> Iterator[dict[str, Any]]:
        """Iterate over the events of its items."""
        for piece in self.answer:
            yield from self._fed(self._deltas(piece))
        yield from self._fed(map(delta_of, self._parser.finish() if self._parser is not None else ()))
        yield from self.writer.finish(cut=self.answer.finish != "stop")
        self._keep(self.writer.output)

    def finish(self) -> None:
        """Make the whole answer."""
        for _ in self.events():
            pass

    def _fed(self, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            yield from self.writer.feed(delta)

    def _deltas(self, piece: str) -> Iterator[Delta]:
        return map(delta_of, self._parser.feed(piece)) if self._parser is not None else iter([Delta(content=piece)])

    def close(self) -> None:
        """End the answer, if it has not."""
        self.answer.close()


def _messages(instructions: str | None, given: Any) -> list[Message]:
    try:
        items = given if isinstance(given, str) else msgspec.convert(given, list[InputItem])
        found = messages_of(input_items(items))
    except (msgspec.ValidationError, ApiError) as error:
        raise ConfigError(f"the input has what this model cannot read: {error}", fix="Give texts and calls") from None
    return [Message("system", instructions), *found] if instructions else found


def _tools(tools: Sequence[Any], handoffs: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for tool in tools:
        schema = getattr(tool, "params_json_schema", None)
        if schema is None:
            raise ConfigError(f"the tool {tool.name!r} runs on a server of OpenAI's", fix="Give functions as tools")
        found.append({"name": tool.name, "description": tool.description or "", "parameters": schema})
    for one in handoffs:
        shown = {"name": one.tool_name, "description": one.tool_description, "parameters": one.input_json_schema}
        found.append(shown)
    return found


def _prefixes(tools: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a digest of the tools and no message, the first message, the first two, and so on."""
    state = hashlib.sha256(tools)
    yield state.digest()
    for message in messages:
        state.update(msgspec.json.encode(message) + b"\n")
        yield state.digest()
