"""Items of conversations in the words of ``/v1/responses``: read from requests, kept as turns, shown again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.responses.request import InputItem, InputPart
from ctxreuse.engines.text import Message, ToolCall
from ctxreuse.store import NewTurn, Turn

if TYPE_CHECKING:
    from ctxreuse.daemon.responses.answer import FunctionCall, OutputMessage

__all__ = ["Item", "check_outputs", "input_items", "latest", "messages_of"]

#: Who may say a message of the input.
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_KINDS = "message, function_call, function_call_output"


class Item(NamedTuple):
    """One item: a message, a call (an assistant's message with it), or the output of one (a tool's message).

    ``id``: as the API shows it; "": by its turn. ``status``: ``completed`` or ``incomplete``.
    """

    message: Message
    id: str = ""
    status: str = "completed"

    @classmethod
    def kept(cls, turn: Turn) -> Item:
        """The item that a turn keeps."""
        message = Message.kept(turn.role, turn.content, turn.meta)
        id, status = turn.meta.get("item"), turn.meta.get("status")
        prefix = "fc" if message.tool_calls else "fco" if message.tool_call_id else "msg"
        return cls(
            message,
            id if isinstance(id, str) and id else f"{prefix}_{turn.id:024x}",
            "incomplete" if status == "incomplete" else "completed",
        )

    @classmethod
    def made(cls, item: OutputMessage | FunctionCall) -> Item:
        """The item of an answer."""
        if item.type == "message":
            message = Message("assistant", "".join(part.text for part in item.content))
        else:
            call = ToolCall(item.name, item.arguments, item.call_id)
            message = Message("assistant", "", tool_calls=(call,))
        return cls(message, item.id, item.status)

    @property
    def turn(self) -> NewTurn:
        """The turn that keeps it."""
        more = {"item": self.id} if self.id else {}
        more |= {"status": self.status} if self.status != "completed" else {}
        return NewTurn(self.message.role, self.message.content, {**self.message.meta, **more})

    @property
    def plain(self) -> dict[str, Any]:
        """The item as the API shows it."""
        message, head = self.message, {"id": self.id, "status": self.status}
        if message.tool_calls:
            call = message.tool_calls[0]
            found = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            return {"type": "function_call", **head, **found}
        if message.tool_call_id:
            output = self._parts("input_text") if message.cuts else message.content
            return {"type": "function_call_output", **head, "call_id": message.tool_call_id, "output": output}
        kind = "output_text" if message.role == "assistant" else "input_text"
        return {"type": "message", **head, "role": message.role, "content": self._parts(kind)}

    def _parts(self, kind: str) -> list[dict[str, Any]]:
        text = self.message.content
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        ends = sorted({0, *self.message.cuts, len(text)})
        found = [{"type": kind, "text": text[a:b], **more} for a, b in pairwise(ends)]
        return found or [{"type": kind, "text": "", **more}]


def input_items(given: str | Sequence[InputItem]) -> list[Item]:
    """The items of a request's input, without reasoning. Raises ApiError, naming the place, for what is none."""
    if isinstance(given, str):
        return [Item(Message("user", given))]
    found = [_item(one, f"input[{i}]") for i, one in enumerate(given)]
    return [one for one in found if one is not None]


def check_outputs(before: Iterable[Item], given: Iterable[Item]) -> None:
    """Raise ApiError if an output of ``given`` belongs to no call before it."""
    calls = {call.id for item in before for call in item.message.tool_calls}
    for item in given:
        calls.update(call.id for call in item.message.tool_calls)
        if item.message.tool_call_id and item.message.tool_call_id not in calls:
            what = f"no function_call with call_id {item.message.tool_call_id[:80]!r} comes before its output"
            raise ApiError(400, what, param="input")


def latest(items: Sequence[Item], dropped: int) -> Sequence[Item]:
    """The items but the first ``dropped``, and outputs of calls that are among these."""
    calls = {call.id for item in items[:dropped] for call in item.message.tool_calls}
    return [item for item in items[dropped:] if item.message.tool_call_id not in calls] if calls else items[dropped:]


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Items as messages: calls are of the assistant's message that they follow."""
    found: list[tuple[Message, list[ToolCall]]] = []
    for message in (item.message for item in items):
        calls = [ToolCall.plain(call.name, call.arguments, call.id) for call in message.tool_calls]
        if calls and found and found[-1][0].role == "assistant":
            found[-1][1].extend(calls)
        else:
            found.append((message, calls))
    return [msgspec.structs.replace(message, tool_calls=tuple(calls)) for message, calls in found]


def _item(given: InputItem, place: str) -> Item | None:
    if given.type == "message":
        return _message(given, place)
    if given.type == "function_call":
        call = ToolCall(_needed(given.name, f"{place}.name"), given.arguments or "{}", _call_id(given, place))
        return Item(Message("assistant", "", tool_calls=(call,)), given.id or "", _status(given))
    if given.type == "function_call_output":
        if given.output is None:
            raise ApiError(400, f"{place}.output is missing", param=f"{place}.output")
        text, cuts = _text(given.output, f"{place}.output")
        message = Message("tool", text, cuts=cuts, tool_call_id=_call_id(given, place))
        return Item(message, given.id or "", _status(given))
    if given.type == "reasoning":
        return None
    if given.type == "item_reference":
        what = f"{place}: items are not kept one by one; send the item itself, or previous_response_id"
        raise ApiError(400, what, param=place, code="unsupported_parameter")
    what = f"{place}.type: {given.type[:64]!r} is not here; use {_KINDS}"
    raise ApiError(400, what, param=f"{place}.type", code="unsupported_parameter")


def _message(given: InputItem, place: str) -> Item:
    if given.role not in _ROLES:
        what = f"{place}.role: {given.role[:64]!r} is no role; use {', '.join(_ROLES)}"
        raise ApiError(400, what, param=f"{place}.role")
    if given.content is None:
        raise ApiError(400, f"{place}.content is missing", param=f"{place}.content")
    text, cuts = _text(given.content, f"{place}.content")
    return Item(Message(given.role, text, cuts=cuts), given.id or "", _status(given))


def _text(given: str | Sequence[InputPart], place: str) -> tuple[str, tuple[int, ...]]:
    """A content's text, and at which characters its parts end."""
    if isinstance(given, str):
        return given, ()
    for i, part in enumerate(given):
        if part.type not in _TEXTS and part.type != "refusal":
            what = f"{place}[{i}].type: {part.type[:64]!r} is not supported, only text is"
            raise ApiError(400, what, param=f"{place}[{i}].type")
    texts = [part.refusal or part.text for part in given]
    return "".join(texts), tuple(accumulate(map(len, texts))) if len(texts) > 1 else ()


def _call_id(given: InputItem, place: str) -> str:
    return _needed(given.call_id, f"{place}.call_id")


def _needed(given: str, place: str) -> str:
    if not given:
        raise ApiError(400, f"{place} is missing", param=place)
    return given


def _status(given: InputItem) -> str:
    return "incomplete" if given.status == "incomplete" else "completed"
