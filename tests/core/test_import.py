"""`import ctxreuse`: public names are lazy, sorted, complete, and cost no heavy module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ctxreuse

HEAVY = (
    "torch",
    "cupy",
    "numba",
    "zmq",
    "transformers",
    "lmdb",
    "rich",
    "typer",
    "numpy",
    "msgspec",
    "prometheus_client",
)


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_pulls_in_no_heavy_module() -> None:
    loaded = modules_after("import ctxreuse")
    assert "ctxreuse" in loaded
    assert not loaded & set(HEAVY)


def test_the_core_types_pull_in_no_engine() -> None:
    statement = "import ctxreuse.identity.model, ctxreuse.tree, ctxreuse.block.format, ctxreuse.config, ctxreuse.usage"
    assert not modules_after(statement) & {"torch", "cupy", "numba", "zmq", "transformers", "lmdb", "rich", "typer"}


@pytest.mark.parametrize("name", ctxreuse.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ctxreuse, name) is not None
    assert name in dir(ctxreuse)


def test_public_names_are_known_to_type_checkers() -> None:
    assert sorted(ctxreuse.__all__) == sorted({"__version__", *ctxreuse.__all__})
    tree = ast.parse(Path(ctxreuse.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed |= {
        node.target.id for node in block.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert typed == set(ctxreuse.__all__)


@pytest.mark.parametrize("name", sorted(ctxreuse._OLD_NAMES))
def test_a_name_of_the_version_before_is_found_with_a_warning(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"ctxreuse.{name} is now"):
        assert getattr(ctxreuse, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ctxreuse.nonsense  # noqa: B018
