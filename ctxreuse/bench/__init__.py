"""Measurements for one's own machine, each run by ``ctxreuse bench NAME``.

Figures come as ratios to what they are compared with: the plain baseline, the strongest peer that is installed, and
the bound that nothing can beat. The project's own evidence (rivals, traces, many nodes) is not installed: it lies in
``benchmarks/`` of the repository and runs through the same harness.
"""

from __future__ import annotations

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure, Report
from ctxreuse.bench.suite import Suite

__all__ = ["SUITE", "Figure", "Options", "Report", "Suite"]

SUITE = Suite(
    "ctxreuse bench",
    {name: f"ctxreuse.bench.{name}" for name in ("kernels", "link", "replay", "reuse", "store")},
    elsewhere="Others run in the repository of ctxreuse: python -m benchmarks ls",
)
