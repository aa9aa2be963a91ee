"""The project's modules as syntax trees, and who imports whom: for tests of the code's shape."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["FACES", "PACKAGES", "PROJECT", "ROOT", "Module", "circles", "importers", "imports", "modules", "tracked"]

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGES: Final = {name: ROOT / folder for name, folder in PROJECT["tool"]["scikit-build"]["wheel"]["packages"].items()}
FACES: Final = {"agents": "ctxreuse_agents", "edge": "ctxreuse_edge", "cloud": "ctxreuse_cloud"}


class Module(NamedTuple):
    """A module of the wheel."""

    path: Path
    text: str
    tree: ast.Module

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@cache
def modules() -> Mapping[str, Module]:
    """Return all modules of the wheel by their dotted names, in the order of the names."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            text = path.read_text("utf-8")
            found[".".join(part for part in parts if part != "__init__")] = Module(path, text, ast.parse(text))
    return dict(sorted(found.items()))


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return what each module imports of the wheel, at any depth, for types only included."""
    return {name: frozenset(_imported(name, module.tree)) for name, module in modules().items()}


def importers() -> dict[str, set[str]]:
    """Return who imports each module."""
    found: dict[str, set[str]] = {name: set() for name in modules()}
    for name, others in imports().items():
        for other in others:
            found[other].add(name)
    return found


def circles() -> list[set[str]]:
    """Return the sets of modules that all import each other in the end (Tarjan's strongly connected components)."""
    graph = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def tracked() -> list[Path]:
    """Return the files that git would commit; in an unpacked sdist, every file outside of what tools make."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        hidden = {".venv", "build", "dist"}
        files = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [str(path) for path in files if not hidden & set(path.parts)]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def _imported(name: str, tree: ast.Module) -> Iterator[str]:
    known = modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in known else node.module
                if target in known and target != name:
                    yield target
