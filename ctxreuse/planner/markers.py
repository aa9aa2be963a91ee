"""Where a request to a provider's API says that its prompt may be cached: marks at the ends of what comes again.

Anthropic's API caches what ends in a block with ``cache_control``, four at most, in the order tools, system, messages
(https://docs.claude.com/en/docs/build-with-claude/prompt-caching): writing costs a quarter more than plain tokens,
reading a tenth. So marks stand where another request is likely to agree: behind what all chats begin with, behind the
documents of a question, behind the question before (where the request before this one ended: it is only looked for 20
blocks back from a mark), and at the end, for the next turn. OpenAI's API caches by itself, and sends requests with one
``prompt_cache_key`` to one machine: that of what all chats begin with.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ctxreuse.errors import FormatError
from ctxreuse.planner.repeats import LEAST, Repeats, without_repeats

__all__ = ["MarkedRequest", "ProviderApi", "mark_request"]

ProviderApi = Literal["anthropic", "openai"]

#: Blocks with a mark in a request.
_MARKS = 4
#: Tokens below which no model of the API caches anything, and bytes that are about one.
_LEAST_TOKENS, _BYTES = 1024, 4
_MARK: Mapping[str, str] = {"type": "ephemeral"}


class MarkedRequest(msgspec.Struct, frozen=True):
    """``body`` as it is sent. ``marks``: paths to the blocks with a new mark. ``repeats``: of the texts of user
    messages and tool results, at ``places``, where repeats were looked for."""

    body: dict[str, Any]
    marks: tuple[tuple[str | int, ...], ...] = ()
    repeats: Repeats = Repeats((), {})
    places: tuple[tuple[str | int, ...], ...] = ()

    def restored(self) -> dict[str, Any]:
        """Return the body with the texts that were replaced by pointers; marks stay."""
        body = copy.deepcopy(self.body)
        for place, text in zip(self.places, self.repeats.restored):
            _set(body, place, text)
        return body


def mark_request(
    body: Mapping[str, Any],
    api: ProviderApi = "anthropic",
    *,
    before: Mapping[str, Any] | None = None,
    repeats: bool = False,
    continues: bool = True,
) -> MarkedRequest:
    """Return a request with marks; one that has marks of its own gets none. The body given is not changed.

    Args:
        body: of ``/v1/messages`` or ``/v1/chat/completions``, as parsed JSON.
        api: whose marks.
        before: another request of the same program: system blocks that differ from its, such as a date, are no part
            of what all chats begin with.
        repeats: replace texts that stand before in the messages by pointers, see `without_repeats`.
        continues: the chat will go on, so its end is worth a mark.

    Raises FormatError if the body is no request of the API.
    """
    try:
        made = copy.deepcopy(dict(body))
    except RecursionError:
        raise FormatError("objects and lists are nested too deeply", where="body") from None
    messages = made.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages) or not messages:
        raise FormatError("messages must be a list of objects, and not empty", where="messages")
    places, found = _texts(messages) if repeats else [], Repeats((), {})
    if places:
        found = without_repeats([_get(made, place) for place in places], LEAST)
        for at in found.sources:
            _set(made, places[at], found.texts[at])
    if api == "openai":
        opening = [made.get("tools"), [one for one in messages if one.get("role") in ("system", "developer")]]
        made.setdefault("prompt_cache_key", hashlib.sha256(_json(opening)).hexdigest()[:32])
        return MarkedRequest(made, (), found, tuple(places))
    if _has_marks(made):
        return MarkedRequest(made, (), found, tuple(places))
    spread = copy.deepcopy(made)
    ends = _boundaries(spread, before or {}, continues)
    marks = [path for path in ends if _tokens(spread, path) >= _LEAST_TOKENS][:_MARKS]
    for path in marks:
        if path[0] != "tools":
            _blocks(made, path[:-1])  # texts without a mark stay texts
        _get(made, path)["cache_control"] = dict(_MARK)
    return MarkedRequest(made, tuple(marks), found, tuple(places))


def _has_marks(body: dict[str, Any]) -> bool:
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "cache_control" in value:
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False


def _boundaries(body: dict[str, Any], before: Mapping[str, Any], continues: bool) -> list[tuple[str | int, ...]]:
    """Paths to blocks behind which prompts begin to differ, in the order of the prompt. Texts become blocks."""
    found = list[tuple[str | int, ...]]()
    stable = _blocks(body, ("system",))
    earlier = _as_blocks(before.get("system"))
    same = len(stable)
    if before:
        same = next((n for n, (one, other) in enumerate(zip(stable, earlier)) if one != other), min(len(stable), same))
    if same:
        found.append(("system", same - 1))
    elif isinstance(body.get("tools"), list) and body["tools"]:
        found.append(("tools", len(body["tools"]) - 1))
    messages = body["messages"]
    questions = [n for n, message in enumerate(messages) if message.get("role") == "user"]
    if len(questions) > 1 and (blocks := _blocks(body, ("messages", questions[-2], "content"))):
        found.append(("messages", questions[-2], "content", len(blocks) - 1))
    last = len(messages) - 1
    blocks = _blocks(body, ("messages", last, "content")) if questions and questions[-1] == last else []
    if len(blocks) > 1:
        found.append(("messages", last, "content", len(blocks) - 2))
    if continues and blocks:
        found.append(("messages", last, "content", len(blocks) - 1))
    return [path for path in found if isinstance(_get(body, path), dict)]


def _blocks(body: dict[str, Any], path: tuple[str | int, ...]) -> list[Any]:
    """Return a list of blocks; a text there becomes one of one block."""
    place = _get(body, path[:-1])
    if found := _as_blocks(place.get(path[-1])):
        place[path[-1]] = found
    return found


def _as_blocks(value: Any) -> list[Any]:
    if isinstance(value, str) and value:
        return [{"type": "text", "text": value}]
    return value if isinstance(value, list) else []


def _texts(messages: Sequence[dict[str, Any]]) -> list[tuple[str | int, ...]]:
    """Paths to the texts of user messages and tool results, in order. What a model said, and system prompts, stay."""
    found = list[tuple[str | int, ...]]()
    for number, message in enumerate(messages):
        if message.get("role") not in ("user", "tool"):
            continue
        pending: list[tuple[tuple[str | int, ...], Any]] = [(("messages", number, "content"), message.get("content"))]
        while pending:
            path, value = pending.pop()
            if isinstance(value, str):
                found.append(path)
            elif isinstance(value, list):
                pending += [((*path, n), one) for n, one in reversed(list(enumerate(value)))]
            elif isinstance(value, dict) and value.get("type") in ("text", "tool_result"):
                name = "text" if value["type"] == "text" else "content"
                pending.append(((*path, name), value.get(name)))
    return found


def _tokens(body: Mapping[str, Any], path: tuple[str | int, ...]) -> float:
    """About the tokens of a prompt to the end of a block."""
    total = len(_json(body.get("tools") or [])) if path[0] != "tools" else len(_json(body["tools"][: int(path[1]) + 1]))
    if path[0] == "tools":
        return total / _BYTES
    system = body.get("system") or []
    if path[0] == "system":
        return (total + len(_json(system[: int(path[1]) + 1]))) / _BYTES
    messages, number, block = body["messages"], int(path[1]), int(path[3])
    total += len(_json(system)) + len(_json(messages[:number])) + len(_json(messages[number]["content"][: block + 1]))
    return total / _BYTES


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _get(body: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        body = body[step]
    return body


def _set(body: Any, path: Sequence[str | int], value: Any) -> None:
    _get(body, path[:-1])[path[-1]] = value
