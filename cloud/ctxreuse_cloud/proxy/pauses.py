"""What conversations wait for between their requests, from stop reasons, called tools and the next message's role."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram

from ctxreuse.pauses import Kind, Sessions, infer
from ctxreuse.pauses.kinds import TOOL_CALL

__all__ = ["KINDS", "PauseBook", "stop_of"]

#: Values of the metric's label.
KINDS = ("tool", "end_of_turn", "length", "unknown")
_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
_TOOL_ROLES = frozenset(("tool", "function"))
_MOST = 2048
#: Only the end of an answer is read: it says why it stopped, and most calls are short enough to be there too.
_TAIL = 1 << 15
_FINISH = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"([a-z_]{1,32})"')
_TOOL = re.compile(rb'"function"\s*:\s*\{\s*"name"\s*:\s*"([\w.\-]{1,64})"')
_TEXT = re.compile(rb'"content"\s*:\s*"[^"]')
_THOUGHT = re.compile(rb'"reasoning(?:_content)?"\s*:\s*"[^"]')


def stop_of(tail: bytes) -> Kind:
    """The kind of the pause after an answer, by the end of its body; a stream and a whole answer say it alike."""
    tail = tail[-_TAIL:]
    finish = _FINISH.findall(tail)
    tools = [name.decode("ascii", "replace") for name in _TOOL.findall(tail)]
    said = finish[-1].decode() if finish else None
    if said in ("tool_calls", "tool_use", "function_call") and not tools:
        tools = [""]  # it called one whose name went by before
    return infer(said, tools, text=bool(_TEXT.search(tail)), thinking=bool(_THOUGHT.search(tail)))


class _Waits(NamedTuple):
    since: float
    kind: Kind


class PauseBook:
    """Conversations of the proxy, by hashes of what their requests read. One event loop calls.

    Nothing of a text is kept. A request goes on where another ended if it begins with all of that one's messages.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions: Sessions[bytes] = Sessions(most=_MOST, personal=False)
        self._waits: dict[bytes, _Waits] = {}
        self._seconds = Histogram(
            "ctxreuse_proxy_pause_seconds",
            "From an answer to its conversation's next request, by what it waited for.",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        for kind in KINDS:
            self._seconds.labels(kind)

    def begun(self, tenant: str, model: str, read: Sequence[tuple[str, bytes]], now: float) -> bytes:
        """A request begins; what its answer is to be told to `paused` by. ``read``: see `Asked.named`."""
        digest = hashlib.blake2b(f"{tenant}\0{model}".encode("utf-8", "surrogatepass"), digest_size=16)
        chain: list[bytes] = []
        for _, part in read:
            digest.update(len(part).to_bytes(8, "little") + part)
            chain.append(digest.copy().digest())
        if not chain:
            return b""
        before = next((key for key in reversed(chain) if key in self._waits), None)
        was = Kind(TOOL_CALL) if read[-1][0] in _TOOL_ROLES else None
        key = chain[-1]
        if before is not None:
            waits = self._waits.pop(before)
            kind = was if was is not None and waits.kind.stop != "tool" else waits.kind
            self._seconds.labels(kind.stop if kind.stop in KINDS else "unknown").observe(max(now - waits.since, 0.0))
            self.sessions.begin(before, now, tenant=tenant, was=was)
            if before == key:
                return key
            self.sessions.forget(before)
        self.sessions.begin(key, now, tenant=tenant)
        return key

    def paused(self, key: bytes, kind: Kind, now: float) -> None:
        """The request was answered in full."""
        if not key or key not in self.sessions:
            return
        self.sessions.pause(key, kind, now)
        self._waits[key] = _Waits(now, kind)
        while len(self._waits) > _MOST:
            del self._waits[next(iter(self._waits))]

    def check(self) -> None:
        """Raises AssertionError where something is counted wrongly."""
        self.sessions.check()
        assert len(self._waits) <= _MOST, "more conversations than there may be"
