"""What ``ctxreuse-cloud doctor`` finds beyond what ``ctxreuse doctor`` does: keys, bus, backends, workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ctxreuse.config import load
from ctxreuse.daemon.client import Client
from ctxreuse.doctor import Finding, examine
from ctxreuse.errors import CtxReuseError
from ctxreuse_cloud.node import Node

__all__ = ["examine_cloud"]


def examine_cloud(config: str | None, client: Callable[[], Client]) -> list[Finding]:
    """Look at the machine, at the settings, and at the running sidecar. Raises nothing."""
    findings = examine(config)
    try:
        node = Node(load(config).settings)
        keys = "no key is asked for, so only programs of this machine are served" if node.tenants.open else "in use"
        findings.append(Finding("cloud", "keys", "ok", keys))
        if not node.backends.all:
            fix = "Set [[cloud.backends]] or `serve --backend URL`"
            findings.append(Finding("cloud", "backends", "missing", "none: no proxy, bus only", fix))
    except CtxReuseError as error:
        where = f"{error.what} ({error.where})" if error.where else error.what
        findings.append(Finding("cloud", "settings", "broken", where, error.fix))
    try:
        found = client().call("GET", "/api/status")
    except CtxReuseError as error:
        findings.append(Finding("sidecar", "running", "missing", error.what, error.fix))
        return findings
    return findings + _running(found)


def _running(found: dict[str, Any]) -> list[Finding]:
    findings = [
        Finding("sidecar", "state", "ok" if found["state"] == "ready" else "slow", found["state"]),
        Finding("sidecar", "bus", "ok", f"{found['bus']['endpoint']}, {len(found['peers'])} peers"),
    ]
    for backend in found["backends"]:
        well = backend["healthy"] is not False and backend["breaker"] == "closed"
        said = backend["said"] or f"{backend['url']}, circuit {backend['breaker']}"
        findings.append(Finding("backend", backend["name"], "ok" if well else "broken", said))
    for worker in found["workers"]["processes"]:
        well = worker["state"] in ("idle", "busy", "starting")
        said = worker["said"] or worker["state"]
        sick: Literal["broken", "slow"] = "broken" if worker["state"] == "broken" else "slow"
        findings.append(Finding("worker", str(worker["number"]), "ok" if well else sick, said))
    return findings
