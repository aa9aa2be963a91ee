"""The shape of the code: who may import whom, how big files are, what they say about themselves, what a wheel holds."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {name: ROOT / folder for name, folder in PROJECT["tool"]["scikit-build"]["wheel"]["packages"].items()}
MODULES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
FACES = {"agents": "ctxreuse_agents", "edge": "ctxreuse_edge", "cloud": "ctxreuse_cloud"}

MAX_LINES = 400
# Words that name no duty: what they would hold belongs to a module with a name.
VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|misc)(_|$)|^(handle|process)_")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """Files that git would commit; in an unpacked sdist, every file outside of what tools make."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        hidden = {".venv", "build", "dist"}
        listed = [name_of(path) for path in ROOT.rglob("*") if not hidden & set(path.relative_to(ROOT).parts)]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_import_rules() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(tool), "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_face_that_exists_is_under_the_rules() -> None:
    faces = [package for folder, package in FACES.items() if (ROOT / folder / package / "__init__.py").exists()]
    rules = PROJECT["tool"]["importlinter"]
    assert set(rules["root_packages"]) == {"ctxreuse", *faces}
    core = next(rule for rule in rules["contracts"] if rule["name"] == "the core never imports a face")
    assert set(core["forbidden_modules"]) == set(faces)
    apart = [set(rule["modules"]) for rule in rules["contracts"] if rule["type"] == "independence"]
    assert len(faces) < 2 or set(faces) in apart
    assert set(PACKAGES) == {"ctxreuse", *faces}
    assert set(PROJECT["tool"]["mypy"]["packages"]) == {"ctxreuse", *faces}


def test_every_layer_is_named() -> None:
    layers = next(rule for rule in PROJECT["tool"]["importlinter"]["contracts"] if rule["type"] == "layers")
    parts = {part.strip() for layer in layers["layers"] for part in layer.split("|")}
    entries = (ROOT / "ctxreuse").iterdir()
    held = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    # A name in brackets may be absent.
    assert {part for part in parts if not part.startswith("(")} <= held - {"__init__"} <= {p.strip("()") for p in parts}


def test_folders_of_faces_are_no_packages() -> None:
    # A top-level package `agents` would shadow the OpenAI Agents SDK, whose import name that is.
    for folder in FACES:
        assert not (ROOT / folder / "__init__.py").exists()


def test_packages_are_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_its_duty_and_stays_small(path: Path) -> None:
    text = path.read_text("utf-8")
    lines = text.count("\n")
    assert lines <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "a module opens with one sentence of duty"
    first = docstring.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":", "!", "?")), first


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_say_what_is_done(path: Path) -> None:
    named = [part.removesuffix(".py") for part in path.relative_to(ROOT).parts]
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    named += [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    # Snake case of class names, so that both spellings are seen.
    assert [n for n in named if VAGUE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).lower())] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_public_names_are_listed_and_real(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    listed = next(
        (
            [ast.literal_eval(item) for item in node.value.elts]
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
            and isinstance(node.value, ast.List | ast.Tuple)
        ),
        None,
    )
    public = {name for name in defined(tree) if not name.startswith("_")}
    if listed is None:
        assert not public, "__all__ is missing"
        return
    assert len(set(listed)) == len(listed)
    assert set(listed) <= bound(tree) or any(
        isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body
    )


def defined(tree: ast.Module) -> set[str]:
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def bound(tree: ast.Module) -> set[str]:
    """Names that a module's top level binds, inside `if` and `try` as well."""
    names = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_a_wheel_holds_only_these_packages() -> None:
    assert set(PACKAGES) <= {"ctxreuse", *FACES.values()}
    for folder in PACKAGES.values():
        assert (folder / "__init__.py").is_file()
        # What is no code must be something that the code reads.
        kinds = {path.suffix for path in tracked() if path.is_relative_to(folder)}
        assert kinds <= {
            ".py",
            ".pyi",
            ".typed",
            ".json",
            ".toml",
            ".html",
            ".css",
            ".js",
            ".svg",
            ".cu",
            ".md",
            ".txt",
            "",
        }


def test_scripts_exist() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_pins_lie_within_what_is_asked_for() -> None:
    from ctxreuse.doctor import satisfies

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = PROJECT["project"]
    asked = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    for line in asked:
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        if name[0] != "ctxreuse":
            assert satisfies(pins[name[0]], line.removeprefix(name[0])), line


def test_nothing_names_the_machine_it_was_written_on() -> None:
    # Pieced together, so that this file does not name them either.
    homes = [f"/{word}/" for word in ("root", "work", "home", "Users")] + ["/" + "tmp/"]
    pattern = re.compile("|".join(re.escape(home) for home in homes) + r"|/opt/(?!homebrew)\w")
    allowed = {"LICENSE"}
    found = []
    for path in tracked():
        if path.suffix in {".png", ".gguf", ".safetensors", ".bin"} or path.name in allowed:
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_no_registry_host_is_written_down() -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url|find-links", text), name


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().startswith("#!/usr/bin/env bash\n")
