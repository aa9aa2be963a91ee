"""The default mix of texts: prose, chat, code, tables and other languages, in equal parts.

``corpus/`` was written for this project and has its licence; the rest is what every Python brings along, and tables
that are made up here.
"""

from __future__ import annotations

import ast
import csv
import inspect
import io
import json
import random
import sysconfig
from collections.abc import Callable, Sequence
from importlib import import_module, resources
from pathlib import Path

from ctxreuse.calibrate.texts import PARTS, Part, Texts

__all__ = ["default_texts"]

_MODULES: dict[Part, tuple[str, ...]] = {
    "calibration": (
        "argparse", "tarfile", "http.client", "json.decoder", "threading", "statistics", "pathlib", "subprocess",
        "email.message", "logging", "fractions", "difflib", "ast", "shutil", "zipfile", "csv",
    ),
    "validation": ("configparser", "datetime", "urllib.request", "heapq", "textwrap", "socketserver"),
    "held-out": ("asyncio.base_events", "decimal", "inspect", "imaplib", "unittest.case", "mailbox", "calendar", "pdb"),
}  # fmt: skip
#: Of four documents in a row of ``corpus/``, the part that each is for.
_DEALT: tuple[Part, ...] = ("calibration", "calibration", "validation", "held-out")
_TABLES = 12
_NAMES = ("Amara", "Bruno", "Chen", "Dilan", "Edith", "Farid", "Greta", "Hugo", "Imani", "Jun", "Katya", "Luis")
_PLACES = ("Oslo", "Lagos", "Quito", "Osaka", "Leeds", "Tunis", "Perth", "Graz", "Natal", "Split")
_STATES = ("open", "paid", "shipped", "returned", "on hold")


def default_texts() -> Texts:
    """Return the texts that levels are calibrated on unless the user gives others."""
    from pydoc_data import topics

    entries = [topics.topics[name] for name in sorted(topics.topics)]
    licence = Path(sysconfig.get_paths()["stdlib"], "LICENSE.txt")
    texts: Texts = {}
    for number, part in enumerate(PARTS):
        # Neighbours in the alphabet are often about the same thing, so each part takes whole stretches.
        reference = entries[len(entries) * number // 3 : len(entries) * (number + 1) // 3]
        if part == "calibration" and licence.is_file():
            reference.insert(0, licence.read_text("utf-8", "replace")[4000:12000])
        code, answers, tools = _library(_MODULES[part])
        texts[part] = {
            # What was written for this comes first, since few windows are taken of each kind.
            "prose": ["\n\n".join(_written("prose", part) + reference)],
            "chat": ["\n\n".join(_written("chat", part) + answers)],
            "code": code,
            "tables": ["\n\n".join(_tables(part)), "\n".join(tools)],
            "languages": ["\n\n".join(_written("languages", part))],
        }
    return texts


def _written(kind: str, part: Part) -> list[str]:
    """This part's share of the documents that were written for calibration."""
    text = resources.files("ctxreuse.calibrate").joinpath("corpus", f"{kind}.txt").read_text("utf-8")
    return [one for i, one in enumerate(text.split("%%\n")) if _DEALT[i % len(_DEALT)] == part]


def _library(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Code, questions with their answers, and tool descriptions, of the modules that are here with their sources."""
    code, answers, tools = [], [], []
    for name in names:
        try:
            module = import_module(name)
            source = inspect.getsource(module)
            nodes = list(ast.walk(ast.parse(source)))
        except (ImportError, OSError, SyntaxError, TypeError):
            continue
        code.append(source[len(source) // 5 :])
        functions = [(node, ast.get_docstring(node)) for node in nodes if isinstance(node, ast.FunctionDef)]
        answers += [f"User: what does {name}.{node.name} do?\n\nAssistant: {text}" for node, text in functions if text]
        tools.append(json.dumps([_tool(node, text) for node, text in functions], indent=1))
    return code, answers, tools


def _tool(node: ast.FunctionDef, text: str | None) -> dict[str, object]:
    """A function as agents describe their tools to a model."""
    fields = {a.arg: {"type": ast.unparse(a.annotation) if a.annotation else "string"} for a in node.args.args}
    return {"name": node.name, "description": text or "", "parameters": {"type": "object", "properties": fields}}


def _tables(part: Part) -> list[str]:
    """Made-up rows as CSV, JSON lines, Markdown and log lines in turn, the same each time."""
    made = random.Random(part)
    formats: tuple[Callable[[list[dict[str, object]]], str], ...] = (_csv, _json, _markdown, _log)
    return [formats[i % len(formats)]([_row(made) for _ in range(16)]) for i in range(_TABLES)]


def _row(made: random.Random) -> dict[str, object]:
    return {
        "id": made.randrange(10_000, 99_999),
        "date": f"2024-{made.randrange(1, 13):02}-{made.randrange(1, 29):02}",
        "customer": made.choice(_NAMES),
        "city": made.choice(_PLACES),
        "items": made.randrange(1, 20),
        "total": round(made.lognormvariate(4, 1), 2),
        "rate": round(made.random(), 4),
        "state": made.choice(_STATES),
    }


def _csv(rows: list[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _json(rows: list[dict[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows))


def _markdown(rows: list[dict[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _log(rows: list[dict[str, object]]) -> str:
    return "\n".join(
        f"{row['date']}T{row['id']} INFO orders[{row['items']}]: {row['customer']}@{row['city']} "
        f"status={row['state']} took={row['rate']}s bytes={row['total']}"
        for row in rows
    )
