"""``python -m benchmarks NAME``: run one of the project's benchmarks, or list them."""

from __future__ import annotations

import typer

from benchmarks import SUITE
from ctxreuse.cli.bench import command_of
from ctxreuse.cli.errors import run

EXAMPLES = """[bold]Examples[/bold]

python -m benchmarks ls                      what can be measured

python -m benchmarks tree --out tree.json    keep the figures

python -m benchmarks codec --plot rate       rate against divergence, as rate.svg and rate.png

ctxreuse calibrate smollm2 [--chunks] makes the profile that codec, levels and pipeline (chunks, decay and qa) measure;
it takes minutes, once.

CTXREUSE_TRACES=DIR names the folder of public traces and texts; without it made-up ones are used, and no bar holds.

Exits with 1 if a figure misses its bar.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})(command_of(SUITE))

if __name__ == "__main__":
    run(app, SUITE.command)
