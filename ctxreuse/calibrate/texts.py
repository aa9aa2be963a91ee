"""Texts to calibrate on, and windows of token ids cut from them: one part to learn, one to set steps, one to report."""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np

from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.keys import Tokens

__all__ = ["PARTS", "Part", "Texts", "default_texts", "read_texts", "windows"]

Part = Literal["calibration", "validation", "held-out"]
PARTS: tuple[Part, ...] = ("calibration", "validation", "held-out")
#: Documents of each part; no document, and no piece of one, is in two parts.
Texts = dict[Part, list[str]]

_MODULES: dict[Part, tuple[str, ...]] = {
    "calibration": (
        "argparse", "tarfile", "http.client", "json.decoder", "threading", "statistics", "pathlib", "subprocess",
        "email.message", "logging", "fractions", "difflib", "ast", "shutil", "zipfile", "csv",
    ),
    "validation": ("configparser", "datetime", "urllib.request", "heapq", "textwrap", "socketserver"),
    "held-out": ("asyncio.base_events", "decimal", "inspect", "imaplib", "unittest.case", "mailbox", "calendar", "pdb"),
}  # fmt: skip
_TOPIC = 6000
_PROBE = "\x00"
_SHARE = {"calibration": 0.6, "validation": 0.15, "held-out": 0.25}


def default_texts() -> Texts:
    """What every Python brings along: its language reference, its library as code, docstrings and JSON, its licence."""
    from pydoc_data import topics

    entries = [topics.topics[name] for name in sorted(topics.topics)]
    texts: Texts = {}
    for number, part in enumerate(PARTS):
        # Neighbours in the alphabet are often about the same thing, so each part takes whole stretches.
        stretch = entries[len(entries) * number // 3 : len(entries) * (number + 1) // 3]
        kinds = [_join(stretch, _TOPIC), *_library(_MODULES[part])]
        longest = max(map(len, kinds))
        # Kinds take turns, so that the first windows are of all of them.
        texts[part] = [kind[i] for i in range(longest) for kind in kinds if i < len(kind)]
    licence = Path(sysconfig.get_paths()["stdlib"], "LICENSE.txt")
    if licence.is_file():
        texts["calibration"].insert(4, licence.read_text("utf-8", "replace"))
    return texts


def _join(pieces: Sequence[str], size: int) -> list[str]:
    joined, held = [], ""
    for piece in pieces:
        held = f"{held}\n\n{piece}" if held else piece
        if len(held) >= size:
            joined.append(held)
            held = ""
    return [*joined, held] if held else joined


def _library(names: Sequence[str]) -> list[list[str]]:
    """Code, docstrings and tool descriptions of the modules that are here with their sources."""
    code, prose, tools = [], [], []
    for name in names:
        try:
            module = import_module(name)
            source = inspect.getsource(module)
            nodes = list(ast.walk(ast.parse(source)))
        except (ImportError, OSError, SyntaxError, TypeError):
            continue
        code.append(source[len(source) // 5 :])
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documented = [(node, ast.get_docstring(node)) for node in nodes if isinstance(node, kinds)]
        prose.append("\n\n".join(text for _, text in documented if text))
        functions = [(node, text) for node, text in documented if isinstance(node, ast.FunctionDef)]
        tools.append(json.dumps([_tool(node, text) for node, text in functions], indent=1))
    return [code, _join(prose, _TOPIC), _join(tools, _TOPIC)]


def _tool(node: ast.FunctionDef, text: str | None) -> dict[str, object]:
    """A function as agents describe their tools to a model."""
    fields = {a.arg: {"type": ast.unparse(a.annotation) if a.annotation else "string"} for a in node.args.args}
    return {"name": node.name, "description": text or "", "parameters": {"type": "object", "properties": fields}}


def read_texts(paths: Sequence[Path]) -> Texts:
    """The user's files, each cut into the three parts; raises ConfigError for one that is not text."""
    texts: Texts = {part: [] for part in PARTS}
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text cannot be read: {error}", where=str(path), fix="Give UTF-8 files") from error
        at = 0.0
        for part in PARTS:
            texts[part].append(text[round(at * len(text)) : round((at + _SHARE[part]) * len(text))])
            at += _SHARE[part]
    return texts


def windows(texts: Sequence[str], text: TextModel, count: int, length: int, prefix: int = 0) -> list[Tokens]:
    """Up to ``count`` windows of ``length`` ids, from the documents in turn; each begins as a context begins.

    Every second one is a message in the model's own chat format, and what follows its first ``prefix`` ids begins the
    next message, as a question follows a document; the others are the bare text after the mark that the model expects
    at a beginning. Documents too short for a window give none.
    """
    start, turn = _marks(text)
    found: list[Tokens] = []
    ids: dict[int, Tokens] = {}
    offsets = [0] * len(texts)
    while len(found) < count:
        before = len(found)
        for number, document in enumerate(texts):
            if len(found) == count:
                break
            if number not in ids:
                ids[number] = text.encode(document, markers=False)
            opening = start[len(found) % 2]
            between = turn if len(found) % 2 and 0 < prefix < length - len(turn) else turn[:0]
            body = ids[number][offsets[number] : offsets[number] + length - len(opening) - len(between)]
            if len(opening) + len(between) + len(body) < length:
                continue
            offsets[number] += len(body)
            at = max(prefix - len(opening), 0) if len(between) else len(body)
            found.append(np.concatenate([opening, body[:at], between, body[at:]]).astype("<i4"))
        if len(found) == before:
            break
    return found


def _marks(text: TextModel) -> tuple[tuple[Tokens, Tokens], Tokens]:
    """Ids that come before the bare text and before that of a message, and those between two messages."""
    openings = []
    for messages in ([], [Message("system", _PROBE)]):
        try:
            before = text.render(messages, generate=False).split(_PROBE)[0]
        except EngineError:  # a template that wants other messages than these
            before = ""
        openings.append(text.encode(before))
    try:
        pieces = text.render([Message("system", _PROBE), Message("user", _PROBE)], generate=False).split(_PROBE)
    except EngineError:
        pieces = [""]
    between = text.encode(pieces[1], markers=False) if len(pieces) == 3 else np.empty(0, "<i4")
    return (openings[0], openings[1]), between
