"""Pauses of conversations between requests: their kind, from stop reasons, tool calls and the next message's role."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import xxhash
from prometheus_client import CollectorRegistry, Histogram

from ctxreuse.pauses import Pause, PauseKind, Sessions, infer
from ctxreuse.pauses.hazard import ends_within
from ctxreuse.pauses.kinds import TOOL_CALL

__all__ = ["KINDS", "PauseTracker", "stop_of"]

#: Values of the metric's label.
KINDS = ("tool", "end_of_turn", "length", "unknown")
_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
_TOOL_ROLES = frozenset(("tool", "function"))
_MAX = 2048
#: Share of pauses that are waited for.
_MOSTLY = 0.9
#: Bytes read of the end of an answer: the stop reason is there, and most tool calls are short enough, too.
_TAIL = 1 << 15
_FINISH = re.compile(rb'"(?:finish_reason|stop_reason|done_reason)"\s*:\s*"([a-z_]{1,32})"')
_TOOL = re.compile(rb'"function"\s*:\s*\{\s*"name"\s*:\s*"([\w.\-]{1,64})"')
_TEXT = re.compile(rb'"(?:content|text)"\s*:\s*"[^"]')
#: Calls of ``/v1/responses`` and ``/v1/messages``, and how the former says that it ended.
_CALL = re.compile(rb'"type"\s*:\s*"(?:function_call|tool_use)"(?:[^{}]{0,400}?"name"\s*:\s*"([\w.\-]{1,64})")?')
_STATUS = re.compile(rb'"object"\s*:\s*"response"|"type"\s*:\s*"response\.(?:completed|incomplete)"')
_CUT = re.compile(rb'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"max_output_tokens"')
_THOUGHT = re.compile(rb'"reasoning(?:_content)?"\s*:\s*"[^"]')


def stop_of(tail: bytes) -> PauseKind:
    """Return the kind of the pause after an answer, from the end of its body, streamed or whole."""
    tail = tail[-_TAIL:]
    finish = _FINISH.findall(tail)
    tools = [name.decode("ascii", "replace") for name in _TOOL.findall(tail)]
    tools += [name.decode("ascii", "replace") for name in _CALL.findall(tail)]
    reason = finish[-1].decode() if finish else None
    if reason is None and _STATUS.search(tail):
        reason = "length" if _CUT.search(tail) else "tool_calls" if tools else "stop"
    if reason in ("tool_calls", "tool_use", "function_call") and not tools:
        tools = [""]  # the tool's name came before the tail
    return infer(reason, tools, text=bool(_TEXT.search(tail)), thinking=bool(_THOUGHT.search(tail)))


class _Waits(NamedTuple):
    since: float
    kind: PauseKind


class PauseTracker:
    """Conversations of the proxy, by hashes of their messages; no text is kept. For one event loop.

    A request continues another if it begins with all of that one's messages.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions: Sessions[bytes] = Sessions(most=_MAX, personal=False)
        self._waits: dict[bytes, _Waits] = {}
        self._seed = int.from_bytes(os.urandom(8), "little")
        seconds = Histogram(
            "ctxreuse_proxy_pause_seconds",
            "From an answer to its conversation's next request, by what it waited for.",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._seconds = {kind: seconds.labels(kind) for kind in KINDS}

    def on_request(self, tenant: str, model: str, messages: Sequence[tuple[str, bytes]], now: float) -> bytes:
        """Note a request, by `ProxyRequest.messages`; returns its key for `on_pause`."""
        digest = xxhash.xxh3_128(f"{tenant}\0{model}".encode("utf-8", "surrogatepass"), self._seed)
        chain: list[bytes] = []
        for _, part in messages:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
            chain.append(digest.digest())
        if not chain:
            return b""
        before = next((key for key in reversed(chain) if key in self._waits), None)
        was = PauseKind(TOOL_CALL) if messages[-1][0] in _TOOL_ROLES else None
        key = chain[-1]
        if before is not None:
            waits = self._waits.pop(before)
            kind = was if was is not None and waits.kind.stop != "tool" else waits.kind
            self._seconds[kind.stop if kind.stop in KINDS else "unknown"].observe(max(now - waits.since, 0.0))
            self.sessions.begin(before, now, tenant=tenant, was=was)
            if before == key:
                return key
            self.sessions.forget(before)
        self.sessions.begin(key, now, tenant=tenant)
        return key

    def on_pause(self, key: bytes, kind: PauseKind, now: float) -> None:
        """Note that the request was answered in full."""
        if not key or key not in self.sessions:
            return
        self.sessions.pause(key, kind, now)
        self._waits[key] = _Waits(now, kind)
        while len(self._waits) > _MAX:
            del self._waits[next(iter(self._waits))]

    def tool_seconds(self, tenant: str) -> float:
        """Return the seconds in which most of a tenant's pauses for tools have ended."""
        return ends_within(self.sessions.estimator.rates(Pause("tool", "", tenant)), _MOSTLY)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""
        self.sessions.check()
        assert len(self._waits) <= _MAX, "more conversations than there may be"
