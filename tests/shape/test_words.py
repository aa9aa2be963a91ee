"""Names and docstrings of the product use the words of docs/concepts/glossary.md, not those that they replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from support.source_tree import modules

#: Parts of names that the glossary has a word for, with that word.
REPLACED_NAMES = {
    "asked": "request, requested",
    "card": "profile",
    "foretold": "announced",
    "gone": "removed, removal",
    "held": "cached, resident, stored, pinned",
    "homing": "backfill",
    "keeping": "checkpoints",
    "lack": "miss",
    "lacking": "missing",
    "lacks": "misses",
    "liar": "untrusted",
    "live": "context",
    "mend": "recompute",
    "mended": "recomputed",
    "moved": "relocated",
    "repair": "recompute",
    "shelf": "profiles",
    "told": "announced, reported",
    "wish": "level request",
}
REPLACED_PROSE = re.compile(
    r"\b(anew|asked of|foretell|foretold|hears? of|homing|lets? go of|lacks?|mend(ed|ing|s)?|nobody|sewn|shelf|told"
    r"|whoever)\b",
    re.IGNORECASE,
)
#: Names that stored files, wire messages or other people's interfaces fix, by module.
FIXED: dict[str, set[str]] = {
    "ctxreuse.bus.protocol.messages": {"FetchCard", "CardName"},
    "ctxreuse.calibrate.run": {"held_out"},
    "ctxreuse.daemon.openai": {"moved", "mended"},
    "ctxreuse_agents.memory": {"repair"},
    "ctxreuse_cloud.proxy.reported": {"moved", "mended"},
}


def names_given(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of all definitions, parameters, variables and attributes that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def test_names_use_the_words_of_the_glossary() -> None:
    wrong = []
    for name, module in modules().items():
        for line, given in names_given(module.tree):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", given).lower().split("_")
            wrong += [
                f"{module}:{line}: {given} (say {REPLACED_NAMES[word]})"
                for word in words
                if word in REPLACED_NAMES and given not in FIXED.get(name, ())
            ]
    assert wrong == []


def test_docstrings_use_the_words_of_the_glossary() -> None:
    wrong = []
    for name, module in modules().items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found = REPLACED_PROSE.search(ast.get_docstring(node) or "")
                if found and found[0] not in FIXED.get(name, ()):
                    wrong.append(f"{module}: {getattr(node, 'name', 'module')}: {found[0]!r}")
    assert wrong == []
