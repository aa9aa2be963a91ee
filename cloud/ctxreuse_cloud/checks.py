"""Checks of ``ctxreuse-cloud doctor`` besides those of ``ctxreuse doctor``: API keys, bus, backends, workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ctxreuse.config import StoreConfig, load
from ctxreuse.daemon.client import Client
from ctxreuse.doctor import Finding, Status, broken, run_checks
from ctxreuse.errors import CtxReuseError
from ctxreuse_cloud.node import CloudNode

__all__ = ["check_cloud"]

_WORKERS: dict[str, Status] = {"idle": "ok", "busy": "ok", "starting": "ok", "broken": "broken"}


def check_cloud(config: str | None, client: Callable[[], Client]) -> list[Finding]:
    """Check the machine, the settings and the running sidecar. Raises nothing."""
    running: dict[str, Any] | None = None
    try:
        running = client().call("GET", "/api/status")
    except CtxReuseError as error:
        missing = Finding("sidecar", "running", "missing", error.what, error.fix)

    def store(settings: StoreConfig) -> StoreConfig:
        cloud = load(config).settings.cloud
        folder = running["store"]["path"] if running is not None else str(cloud.folder())
        return msgspec.structs.replace(settings, path=folder, capacity=cloud.store_bytes)

    findings = run_checks(config, store)
    try:
        node = CloudNode(load(config).settings)
        keys = "not required: only programs of this machine are served" if node.tenants.open else "in use"
        findings.append(Finding("cloud", "keys", "ok", keys))
        if not node.backends.all:
            fix = "Set [[cloud.backends]] or `serve --backend URL`"
            findings.append(Finding("cloud", "backends", "missing", "none: bus only, no proxy", fix))
    except CtxReuseError as error:
        findings.append(broken("cloud", "settings", error))
    return [*findings, missing] if running is None else findings + _running(running)


def _running(found: dict[str, Any]) -> list[Finding]:
    findings = [
        Finding("sidecar", "state", "ok" if found["state"] == "ready" else "slow", found["state"]),
        Finding("sidecar", "bus", "ok", f"{found['bus']['endpoint']}, {len(found['peers'])} peers"),
    ]
    for backend in found["backends"]:
        healthy = backend["healthy"] is not False and backend["breaker"] == "closed"
        text = backend["error"] or f"{backend['url']}, circuit {backend['breaker']}"
        findings.append(Finding("backend", backend["name"], "ok" if healthy else "broken", text))
    for worker in found["workers"]["processes"]:
        status = _WORKERS.get(worker["state"], "slow")
        findings.append(Finding("worker", str(worker["number"]), status, worker["error"] or worker["state"]))
    return findings
