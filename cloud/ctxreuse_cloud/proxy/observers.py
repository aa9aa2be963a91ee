"""Observers of the proxy's requests: counts, request log, pauses of conversations, recording."""

from __future__ import annotations

from typing import NamedTuple

from ctxreuse.lab.recorder import Recorder
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.forward import ProxyCall
from ctxreuse_cloud.proxy.pauses import PauseTracker, stop_of
from ctxreuse_cloud.proxy.reported import ReportedUsage
from ctxreuse_cloud.proxy.request_log import ProxyRequestLog
from ctxreuse_cloud.proxy.routes import describe

__all__ = ["Observers"]


class Observers(NamedTuple):
    """Observers of the requests of one proxy; times are those of its clock, in seconds."""

    counts: ProxyCounts
    requests: ProxyRequestLog
    pauses: PauseTracker
    recorder: Recorder | None = None

    def begin(self, call: ProxyCall, now: float) -> None:
        """Note a request whose tenant and body have been read."""
        request = call.request
        if self.recorder is not None and (parts := request.parts()):
            scope = b"\0".join((call.tenant.encode(), request.model.encode("utf-8", "surrogatepass")))
            call.recorded = self.recorder.text(parts, scope)
        call.conversation = self.pauses.on_request(call.tenant, request.model, request.messages(), now)

    def end(self, call: ProxyCall, began: float, now: float) -> None:
        """Note how a request ended."""
        first = None if call.first is None else call.first - began
        self.counts.ended(call.outcome, first, now - began)
        if call.outcome == "ok" and call.tail:
            self.pauses.on_pause(call.conversation, stop_of(call.tail), now)
        if call.outcome == "ok" and call.tried:
            usage, request = call.usage or ReportedUsage(), call.request
            tokens, route = (usage.prompt_tokens, usage.cached), describe(call.route) if call.route is not None else ""
            self.requests.note(
                call.identity, call.tenant, request.model, call.tried[-1].name, tokens, request.messages(), route
            )
        if self.recorder is not None:
            self.recorder.ended(call.recorded, busy=now - began)
