"""Checks of ``ctxreuse-edge doctor`` besides those of ``ctxreuse doctor``: the running daemon and its clouds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ctxreuse.daemon.client import Client
from ctxreuse.doctor import Finding, Status, run_checks
from ctxreuse.errors import CtxReuseError

__all__ = ["check_edge"]

_LINKS: dict[str, Status] = {"up": "ok", "down": "missing"}


def check_edge(config: str | None, client: Callable[[], Client]) -> list[Finding]:
    """Check the machine and the running daemon. Raises nothing."""
    try:
        daemon = client()
        found = daemon.call("GET", "/api/status")
    except CtxReuseError as error:
        return [*run_checks(config), Finding("daemon", "running", "missing", error.what, error.fix)]
    # The running daemon's store, which its command line may have named.
    place = {"path": found["store"]["path"], "capacity": found["store"]["stats"]["capacity"]}
    findings = run_checks(config, lambda store: msgspec.structs.replace(store, **place))
    findings.append(Finding("daemon", "address", "ok", daemon.url))
    durable = found["store"]["durable"]
    fix = "" if durable else "The daemon's log says why the store could not be opened"
    findings.append(Finding("daemon", "store", "ok" if durable else "slow", found["store"]["path"], fix))
    kept = [f"{count} of {tokens:,} tokens {level}" for level, (count, tokens) in found["live"]["levels"].items()]
    findings.append(Finding("daemon", "contexts", "ok", "in memory: " + (", ".join(kept) or "none")))
    for cloud in found["clouds"]:
        findings.append(Finding("daemon", cloud["name"], _LINKS.get(cloud["state"], "broken"), cloud["state"]))
    return findings
