"""Measurements: one module a subject, each run by ``ctxreuse bench NAME``.

A bench module has ``run(options: Options) -> list[Figure]`` and a docstring whose first line says what it measures. To
add one, write the module and its row in BENCHES. Figures come as ratios to what they are compared with: the plain
baseline, the strongest peer that is installed, and the bound that nothing can beat.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ctxreuse.bench.measure import Options, Step
from ctxreuse.bench.report import Figure, Report, machine
from ctxreuse.errors import ConfigError

__all__ = ["BENCHES", "Figure", "Options", "Report", "about", "run"]

#: Bench name to module, imported when it runs.
BENCHES = {
    "agents": "ctxreuse.bench.agents",
    "attend": "ctxreuse.bench.attend",
    "bus": "ctxreuse.bench.bus",
    "chunks": "ctxreuse.bench.chunks",
    "codec": "ctxreuse.bench.codec",
    "cost": "ctxreuse.bench.cost",
    "decay": "ctxreuse.bench.decay",
    "evict": "ctxreuse.bench.evict",
    "fetch": "ctxreuse.bench.fetch",
    "fork": "ctxreuse.bench.fork",
    "import": "ctxreuse.bench.importing",
    "kernels": "ctxreuse.bench.kernels",
    "levels": "ctxreuse.bench.levels",
    "lossless": "ctxreuse.bench.lossless",
    "many": "ctxreuse.bench.many",
    "order": "ctxreuse.bench.order",
    "pauses": "ctxreuse.bench.pauses",
    "pipeline": "ctxreuse.bench.pipeline",
    "policy": "ctxreuse.bench.policy",
    "proxy": "ctxreuse.bench.proxy",
    "qa": "ctxreuse.bench.qa",
    "rans": "ctxreuse.bench.rans",
    "resume": "ctxreuse.bench.resume",
    "reuse": "ctxreuse.bench.reuse",
    "states": "ctxreuse.bench.states",
    "store": "ctxreuse.bench.store",
    "tree": "ctxreuse.bench.tree",
}


def _module(name: str) -> str:
    if name not in BENCHES:
        raise ConfigError(f"no bench is called {name!r}", fix=f"Choose one of {', '.join(BENCHES)}")
    return BENCHES[name]


def about(name: str) -> str:
    """The first line of a bench's docstring, without importing it. Raises ConfigError for an unknown name."""
    spec = find_spec(_module(name))
    if spec is None or spec.origin is None:
        raise ConfigError(f"the module of bench {name!r} is not here", where=BENCHES[name])
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    return text.partition("\n")[0]


def run(name: str, *, quick: bool = False, progress: bool = False, **settings: Any) -> Report:
    """Measure; blocks for seconds to minutes. ``progress`` shows steps on standard error.

    ``settings``: fields of `Options` for the benches that name them in ``OPTIONS``; ConfigError if this one does not.
    """
    module = import_module(_module(name))
    for setting in settings:
        if setting not in getattr(module, "OPTIONS", ()):
            raise ConfigError(f"bench {name!r} has no setting {setting!r}")
    options = Options(quick=quick, step=Step(name) if progress else None, **settings)
    try:
        figures = module.run(options)
    finally:
        options.close()
    return Report(name=name, figures=tuple(figures), machine=machine(), quick=quick)
