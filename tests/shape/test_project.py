"""The project's files: what a wheel holds, pins, scripts, and what no file may name."""

from __future__ import annotations

import importlib
import os
import re

from support.source_tree import FACES, PACKAGES, PROJECT, ROOT, tracked


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
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_no_registry_host_is_written_down() -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url|find-links", text), name


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().startswith("#!/usr/bin/env bash\n")
