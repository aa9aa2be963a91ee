"""Writes the pages that follow from data: figures (from JSON), settings (from the schema), commands (from typer).

Run ``python docs/generate.py`` after a benchmark, a new setting or a new command; ``--check`` only compares, and a test
does, so that no page is older than what it tells.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for benchmarks/, which is not installed

import benchmarks  # noqa: E402
from ctxreuse import bench  # noqa: E402

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
#: Measured with an option or a variable of the environment; what stands behind the bench's name in the file's.
OPTIONS = {"gemma3-270m": "--model gemma3-270m"}
VARIABLES = {"traces": "CTXREUSE_TRACES=DIR "}
NOTE = "<!-- Written by docs/generate.py: do not edit. -->\n"


def pages() -> Iterator[tuple[Path, str]]:
    """Every generated page: its path and its text."""
    yield from figure_pages()
    yield DOCS / "guide" / "settings.md", settings_page()
    yield DOCS / "guide" / "cli.md", commands_page()
    yield DOCS / "concepts" / "block-format.md", docstring_page("The block format", "ctxreuse.block.format")
    yield DOCS / "concepts" / "protocol.md", docstring_page("The protocol of the link", "ctxreuse.bus.protocol.wire")


# ---- figures ----


def number(value: float | None, unit: str = "") -> str:
    """Four significant digits, no exponent for what one can read."""
    if value is None:
        return ""
    text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{text} {unit}".strip()


def ratio(figure: dict[str, Any], other: str) -> str:
    """A compared value and, behind it, how many times better ours is."""
    value, ours = figure[other], figure["value"]
    if value is None:
        return ""
    if not value or not ours:
        return number(value)
    times = ours / value if figure["better"] == "higher" else value / ours
    return f"{number(value)} ({times:.2f}x)" if times < 10 else f"{number(value)} ({times:.0f}x)"


def verdict(figure: dict[str, Any]) -> str:
    """Whether a figure reaches its bar."""
    bar = figure["bar"]
    if bar is None:
        return ""
    met = figure["value"] >= bar if figure["better"] == "higher" else figure["value"] <= bar
    return f"{'met' if met else '**missed**'} ({'≥' if figure['better'] == 'higher' else '≤'} {number(bar)})"


def command(stem: str) -> str:
    """The command that measures what ``stem``.json holds."""
    name, _, option = stem.partition("-")
    tool = bench.SUITE.command if name in bench.SUITE.modules else benchmarks.SUITE.command
    return f"{VARIABLES.get(option, '')}{tool} {name} {OPTIONS.get(option, '')}".strip()


def _before(stem: str) -> list[str]:
    """What must be run before a benchmark."""
    name, _, model = stem.partition("-")
    needs = benchmarks.NEEDS.get(name, ())
    return [f"$ {line.replace('smollm2', model or 'smollm2')}   # once, some minutes" for line in needs]


def figure_pages() -> Iterator[tuple[Path, str]]:
    """A page a bench, and their index."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        figures = report["figures"]
        about = _about(path.stem.partition("-")[0])
        lines = [NOTE, f"# {path.stem}", "", about, ""]
        lines += ["```console", *_before(path.stem), f"$ {command(path.stem)}", "```", ""]
        for plot in sorted(RESULTS.glob("*.svg")):
            if plot.stem in (path.stem, path.stem.replace("codec", "rate-smollm2"), path.stem.replace("codec", "rate")):
                lines += [f"![{plot.stem}]({plot.name})", ""]
        lines += [
            "| figure | ours | unit | baseline | peer | bound | bar |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for figure in figures:
            cells = [figure["metric"], f"**{number(figure['value'])}**", figure["unit"]]
            cells += [ratio(figure, other) for other in ("baseline", "peer", "bound")] + [verdict(figure)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        notes = [f"- *{figure['metric']}*: {figure['note']}" for figure in figures if figure["note"]]
        lines += ["", "In brackets: how many times better ours is.", ""]
        lines += ["## What is compared", "", *notes, ""] if notes else []
        lines += ["## Machine", "", _machine(report), ""]
        yield DOCS / "figures" / f"{path.stem}.md", "\n".join(lines)
        missed = sum(verdict(figure).startswith("**") for figure in figures)
        barred = sum(figure["bar"] is not None for figure in figures)
        bars = f"{barred - missed} of {barred} met" if barred else ""
        day, cpu = report.get("date", ""), report["machine"]["cpu"]
        rows.append(f"| [{path.stem}]({path.stem}.md) | {about} | {bars} | {day} | {cpu} |")
    text = [NOTE, "# Figures", ""]
    text += [
        "Each page is made from the JSON of one run, committed with the code that it measured. `ctxreuse bench NAME`"
    ]
    text += [
        "measures on your machine; the others run from a checkout with `python -m benchmarks NAME`. What a page calls"
    ]
    text += ["*simulation* replays a trace through the store's own policy objects.", ""]
    text += ["| bench | what it measures | bars | date | processor |", "| --- | --- | --- | --- | --- |", *rows, ""]
    yield DOCS / "figures" / "index.md", "\n".join(text)


def _about(name: str) -> str:
    """The first line of a bench's docstring, not imported."""
    return (bench.SUITE if name in bench.SUITE.modules else benchmarks.SUITE).about(name)


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    measured = f" Measured on {report['date']} (commit {report['commit']})." if "date" in report else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, {machine['system']},"
        f" Python {machine['python']}, kernels {machine['kernels']}, load {machine['load_1m']}; {versions}.{measured}"
    )


# ---- settings, commands, formats ----


def settings_page() -> str:
    """Every setting, by section."""
    from ctxreuse.config.schema import ENV_PREFIX, Settings, settings

    lines = [NOTE, "# Settings", ""]
    lines += [
        "One TOML file serves every command. A setting comes from its default, then the file, then the environment"
    ]
    lines += [f"(`{ENV_PREFIX}SECTION__NAME`), then a flag; `ctxreuse config show --origin` says which.", ""]
    section = ""
    for setting in settings(Settings):
        head, _, name = setting.name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"## `[{section}]`", "", "| name | default | what it does |", "| --- | --- | --- |"]
        about = setting.about.replace("|", "\\|")
        lines.append(f"| `{name}` | `{setting.show(setting.default)}` | {about} |")
    return "\n".join(lines) + "\n"


PROGRAMS = (
    ("ctxreuse", "ctxreuse.cli.app"),
    ("ctxreuse-edge", "ctxreuse_edge.cli"),
    ("ctxreuse-cloud", "ctxreuse_cloud.cli"),
)


def commands_page() -> str:
    """Every command of the three command lines, as ``--help`` tells."""
    import typer.main

    lines = [NOTE, "# Command line", ""]
    lines += [
        "In a checkout they lie in `.venv/bin`, where `make test` and the like put them, or in `.venv-demo/bin` after "
        "`make demo` alone: `source .venv-demo/bin/activate`.",
        "",
    ]
    for program, module in PROGRAMS:
        lines += [f"## {program}", "", *_commands(program, typer.main.get_command(importlib.import_module(module).app))]
    return "\n".join(lines)


def _commands(path: str, found: Any) -> list[str]:
    if getattr(found, "hidden", False):
        return []
    if hasattr(found, "commands"):
        return [line for name, one in sorted(found.commands.items()) for line in _commands(f"{path} {name}", one)]
    lines = [f"### `{path}`", "", inspect.cleandoc(found.help or "").replace("\f", "").strip(), ""]
    rows = []
    for one in found.params:
        if one.name == "help" or getattr(one, "hidden", False):
            continue
        name = ", ".join(one.opts + one.secondary_opts) if one.param_type_name == "option" else (one.name or "").upper()
        rows.append(f"| `{_cell(name)}` | {_cell(getattr(one, 'help', '') or '')} |")
    return [*lines, "| argument | what it does |", "| --- | --- |", *rows, ""] if rows else lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def docstring_page(title: str, module: str) -> str:
    """A format as the docstring of the module that reads and writes it describes it."""
    text = inspect.getdoc(importlib.import_module(module)) or ""
    return f"{NOTE}\n# {title}\n\nFrom `{module.replace('.', '/')}.py`, which reads and writes it.\n\n{text}\n"


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not what it would be")
    check, stale = parser.parse_args().check, []
    made = dict(pages())
    plots = {DOCS / "figures" / plot.name: plot.read_text("utf-8") for plot in RESULTS.glob("*.svg")}
    for path, text in {**made, **plots}.items():
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
    left = set((DOCS / "figures").glob("*.md")) - set(made)
    stale += [str(path.relative_to(ROOT)) for path in left]
    if not check:
        for path in left:
            path.unlink()
    print("\n".join(stale) if stale else "every page is up to date")
    return bool(check and stale)


if __name__ == "__main__":
    sys.exit(main())
