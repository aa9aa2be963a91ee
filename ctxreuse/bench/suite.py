"""A set of benchmarks: find one by name, say what it measures, run it."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ctxreuse.bench.measure import Options, Step
from ctxreuse.bench.report import Report, checkout, machine
from ctxreuse.errors import ConfigError

__all__ = ["Suite"]


class Suite:
    """Benchmarks by name; ``modules`` maps a name to its module, which is imported when it runs.

    A module has ``run(options: Options) -> list[Figure]``, may list in ``OPTIONS`` the settings it takes, and the first
    line of its docstring says what it measures. ``command`` runs one of them; ``elsewhere`` tells where others are.
    """

    def __init__(self, command: str, modules: Mapping[str, str], elsewhere: str = "") -> None:
        self.command, self.modules, self._elsewhere = command, dict(modules), elsewhere

    def _module(self, name: str) -> str:
        if name not in self.modules:
            known = f"Choose one of {', '.join(self.modules)}"
            raise ConfigError(f"no benchmark is called {name!r}", fix=f"{known}. {self._elsewhere}".strip())
        return self.modules[name]

    def about(self, name: str) -> str:
        """Return the first line of a benchmark's docstring without importing it. Raises ConfigError if unknown."""
        spec = find_spec(self._module(name))
        if spec is None or spec.origin is None:
            raise ConfigError(f"the module of benchmark {name!r} is missing", where=self.modules[name])
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
        return text.partition("\n")[0]

    def run(self, name: str, *, quick: bool = False, progress: bool = False, **settings: Any) -> Report:
        """Run one benchmark; blocks for seconds to minutes.

        Args:
            name: which.
            quick: less data and fewer rounds.
            progress: show steps on standard error.
            settings: fields of `Options`; ConfigError for one that this benchmark does not take.
        """
        module = import_module(self._module(name))
        for setting in settings:
            if setting not in getattr(module, "OPTIONS", ()):
                raise ConfigError(f"benchmark {name!r} has no setting {setting!r}")
        options = Options(quick=quick, step=Step(name) if progress else None, **settings)
        try:
            figures = module.run(options)
        finally:
            options.close()
        day, commit = time.strftime("%Y-%m-%d"), checkout()
        return Report(name=name, figures=tuple(figures), machine=machine(), quick=quick, date=day, commit=commit)
