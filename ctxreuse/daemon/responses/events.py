"""An answer in the making as the items of its output, and as the events of ``/v1/responses`` in OpenAI's order."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ctxreuse.daemon.logprobs import TokenLogprob
from ctxreuse.daemon.openai import CallDelta, Delta
from ctxreuse.daemon.responses.answer import FunctionCall, OutputMessage, OutputText, ResponseObject

__all__ = ["OutputWriter", "named_event", "new_item_id"]


def new_item_id(prefix: str) -> str:
    """Return a random id of an item, such as ``msg_5f…``."""
    return f"{prefix}_{secrets.token_hex(16)}"


def named_event(event: dict[str, Any]) -> bytes:
    """Return a server-sent event that also bears its type as its name."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class OutputWriter:
    """Turns the deltas of one answer into events and items: text into messages, calls into items of their own.

    ``output``: the items so far, the last one as it is. Not thread-safe.
    """

    def __init__(self, new_id: Callable[[str], str] = new_item_id) -> None:
        self._new_id, self._number = new_id, 0
        self.output: list[OutputMessage | FunctionCall] = []
        self._open, self._pieces, self._logprobs = False, list[str](), list[TokenLogprob]()

    def lifecycle(self, kind: str, response: ResponseObject) -> dict[str, Any]:
        """The event ``response.KIND``, which has the whole response."""
        return self._event(f"response.{kind}", response=response)

    def feed(self, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[dict[str, Any]]:
        """The events of a delta; ``logprobs``: of its tokens, where the request wants them."""
        events: list[dict[str, Any]] = []
        if delta.content or logprobs:
            if not self._open or not isinstance(self.output[-1], OutputMessage):
                events += self._begin_message()
            text = delta.content or ""
            self._pieces.append(text)
            self._logprobs += logprobs
            place = {**self._place, "content_index": 0}
            events.append(self._event("response.output_text.delta", **place, delta=text, logprobs=list(logprobs)))
        for piece in delta.tool_calls or ():
            events += self._call(piece)
        return events

    def finish(self, *, cut: bool) -> list[dict[str, Any]]:
        """The events that end the last item; ``cut``: it is incomplete. An answer always has an item."""
        begun = self._begin_message() if not self.output else []
        return begun + self._close("incomplete" if cut else "completed")

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1].id, "output_index": len(self.output) - 1}

    def _begin(self, item: OutputMessage | FunctionCall) -> list[dict[str, Any]]:
        events = self._close("completed")
        self.output.append(item)
        self._open, self._pieces, self._logprobs = True, [], []
        return [*events, self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)]

    def _begin_message(self) -> list[dict[str, Any]]:
        events = self._begin(OutputMessage(self._new_id("msg"), "in_progress", []))
        place = {**self._place, "content_index": 0}
        return [*events, self._event("response.content_part.added", **place, part=OutputText(""))]

    def _call(self, piece: CallDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if isinstance(piece.id, str):
            name = piece.function.name if isinstance(piece.function.name, str) else ""
            events += self._begin(FunctionCall(self._new_id("fc"), "in_progress", piece.id, name, ""))
        if piece.function.arguments:
            self._pieces.append(piece.function.arguments)
            delta = piece.function.arguments
            events.append(self._event("response.function_call_arguments.delta", **self._place, delta=delta))
        return events

    def _close(self, status: str) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        item, text, place = self.output[-1], "".join(self._pieces), self._place
        done: OutputMessage | FunctionCall
        if isinstance(item, OutputMessage):
            part, place = OutputText(text, [], self._logprobs), {**place, "content_index": 0}
            events = [
                self._event("response.output_text.done", **place, text=text, logprobs=self._logprobs),
                self._event("response.content_part.done", **place, part=part),
            ]
            done = msgspec.structs.replace(item, status=status, content=[part])
        else:
            found = {"name": item.name, "arguments": text}
            events = [self._event("response.function_call_arguments.done", **place, **found)]
            done = msgspec.structs.replace(item, status=status, arguments=text)
        self.output[-1] = done
        return [*events, self._event("response.output_item.done", output_index=place["output_index"], item=done)]
