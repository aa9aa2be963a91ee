"""What a bench reports: figures with what they are compared to, and the machine they were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Figure", "Report", "checkout", "machine"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number and what it is compared with, all in ``unit``.

    ``baseline`` is the plain way, ``peer`` the strongest other software here, ``bound`` what nothing can beat. ``bar``
    is the value that this figure must reach (``higher``: at least, ``lower``: at most). ``note`` says what the
    comparisons are.
    """

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    peer: float | None = None
    bound: float | None = None
    better: Literal["higher", "lower"] = "higher"
    bar: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """True if there is no bar or the value reaches it."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar

    def ratio(self, other: float | None) -> float | None:
        """How many times better than ``other`` the value is (above 1 is better); None without comparison."""
        if other is None or not other or not self.value:
            return None
        return self.value / other if self.better == "higher" else other / self.value


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run of one bench; ``commit`` is the checkout's, empty in a wheel."""

    name: str
    figures: tuple[Figure, ...]
    machine: dict[str, Any]
    quick: bool = False
    date: str = ""
    commit: str = ""

    @property
    def passed(self) -> bool:
        """True if every figure reaches its bar."""
        return all(figure.passed for figure in self.figures)

    def json(self) -> bytes:
        """Indented JSON, numbers rounded to 5 digits: more would be noise that makes differences unreadable."""
        body = msgspec.to_builtins(self)
        for figure in body["figures"]:
            for field in ("value", "baseline", "peer", "bound", "bar"):
                if figure[field] is not None:
                    figure[field] = float(f"{figure[field]:.5g}")
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def checkout() -> str:
    """Return the short commit of the checkout this module lies in; empty if it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, GPU, cores, memory, system, versions, kernels in use, load by others."""
    import psutil

    from ctxreuse import kernels
    from ctxreuse.cpu import cpu_name
    from ctxreuse.cuda import missing, open_device

    versions = {}
    for name in ("ctxreuse", "lmdb", "numpy", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        **({} if missing() else {"gpu": open_device().name}),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kernels": kernels.active(),
        "versions": versions,
        "load_1m": round(os.getloadavg()[0], 2),
    }
