"""Run the demo: ``python examples/demo [--short] [--keep DIR] [--engine torch]``.

It exits with 1 if not all was as expected.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Run the demo and return its exit code."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of the package `demo`
    from ctxreuse.cli.errors import report_errors
    from demo import run
    from demo.acts import ENGINE, SHORT

    parser = argparse.ArgumentParser(prog="demo", description="A context computed once, reused after a crash and afar.")
    parser.add_argument("--keep", metavar="DIR", help="leave the demo's memory in DIR, to look at afterwards")
    parser.add_argument("--short", action="store_true", help="read a third of the handbook, for a slow machine")
    parser.add_argument("--engine", default="llama_cpp", choices=("llama_cpp", "torch"), help="what computes")
    options = parser.parse_args()
    os.environ[ENGINE] = options.engine
    if options.short:
        os.environ[SHORT] = "1"
    with report_errors():
        return 0 if run(options.keep) else 1


if __name__ == "__main__":
    sys.exit(main())
