"""What ``import ctxreuse`` and the command line cost, over starting the interpreter alone."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from ctxreuse.bench.measure import Options, fresh, paired
from ctxreuse.bench.report import Figure

__all__ = ["run"]

_COUNT = "import sys; before = set(sys.modules); {}; print(len(set(sys.modules) - before))"
_TYPES = "import ctxreuse; ctxreuse.ModelSpace, ctxreuse.ContextTree"
_HELP = "import sys; sys.argv[1:] = ['--help']; from ctxreuse.cli.app import main; main()"


def run(options: Options) -> list[Figure]:
    """Fresh interpreters, turn by turn; the bare one is the baseline and is taken off."""

    def start(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

    codes = {"bare": "pass", "import": "import ctxreuse", "types": _TYPES, "help": _HELP, "numpy": "import numpy"}
    options.step("fresh interpreters")
    times = paired({name: partial(start, code) for name, code in codes.items()}, rounds=options.pick(5, 25))
    bare = times["bare"] * 1e3
    over = {name: max(spent * 1e3 - bare, 1e-3) for name, spent in times.items()}
    note = f"over a bare interpreter start of {bare:.1f} ms; baseline: `import numpy`"
    return [
        Figure(
            metric="import", value=over["import"], unit="ms", baseline=over["numpy"], better="lower", bar=60, note=note
        ),
        Figure(metric="import_modules", value=fresh(_COUNT.format("import ctxreuse")), unit="modules", better="lower"),
        Figure(metric="first_types", value=over["types"], unit="ms", baseline=over["numpy"], better="lower"),
        Figure(metric="command_help", value=over["help"], unit="ms", better="lower"),
    ]
