"""What is shipped names what it is made of: pinned by hash, with a bill of materials and the licences of all parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.source_tree import PROJECT, ROOT

LOCKS = {name: (ROOT / name).read_text("utf-8") for name in ("requirements.lock", "requirements-torch.lock")}
EXTRAS = PROJECT["project"]["optional-dependencies"]


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def wanted(given: list[str]) -> Iterator[Requirement]:
    """Yield the packages that a list of requirements asks for, the project's extras resolved."""
    for line in given:
        requirement = Requirement(line)
        if requirement.name == "ctxreuse":
            for extra in requirement.extras:
                yield from wanted(EXTRAS[extra])
        else:
            yield requirement


@pytest.mark.parametrize(("lock", "extras"), [*zip(LOCKS, ("edge,cloud", "torch"))])
def test_a_lock_has_what_is_needed_in_the_versions_that_are_tested(lock: str, extras: str) -> None:
    locked, tested = pins(LOCKS[lock]), pins((ROOT / "constraints.txt").read_text("utf-8"))
    needed = [*wanted(PROJECT["project"]["dependencies"]), *wanted([f"ctxreuse[{extras}]"])]
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        if name != "torch":
            assert requirement.specifier.contains(locked[name]), name
    assert {name: tested[name] for name in locked if name in tested} == {n: v for n, v in locked.items() if n in tested}


def test_the_locks_agree_and_the_daemons_need_no_torch() -> None:
    light, torch = map(pins, LOCKS.values())
    assert {name: torch[name] for name in light if name in torch} == {n: v for n, v in light.items() if n in torch}
    assert "xllamacpp" in light
    assert not {"torch", "transformers", "tokenizers", "huggingface-hub"} & set(light)


@pytest.mark.parametrize("lock", LOCKS)
def test_each_locked_package_has_hashes(lock: str) -> None:
    for entry in re.split(r"^(?=[A-Za-z0-9])", LOCKS[lock], flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]


@pytest.mark.parametrize("face", ["edge", "cloud"])
def test_images_install_by_hash_from_a_pinned_base(face: str) -> None:
    text = (ROOT / face / "deploy" / "Dockerfile").read_text("utf-8")
    assert "--require-hashes -r requirements.lock" in text
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+(@sha256:\w+)?", base)


def test_the_context_of_an_image_has_only_what_its_build_needs() -> None:
    left_out = set((ROOT / ".dockerignore").read_text("utf-8").splitlines())
    assert {".git", "**/.venv", "build", "dist", "tests"} <= left_out


@pytest.mark.parametrize("face", ["edge", "cloud"])
def test_units_limit_memory_and_tasks_and_dump_no_core(face: str) -> None:
    text = (ROOT / face / "deploy" / f"ctxreuse-{face}.service").read_text("utf-8")
    for setting in ("MemoryMax=", "TasksMax=", "LimitCORE=0"):
        assert re.search(f"^{setting}", text, re.MULTILINE), setting


@pytest.mark.nightly
@pytest.mark.build("wheel")
def test_the_build_makes_a_bill_of_materials_and_a_notice(tmp_path: Path) -> None:
    venv = Path(sys.executable).parent.parent
    subprocess.run(["make", "dist", f"VENV={venv}"], cwd=ROOT, check=True, capture_output=True, timeout=1200)
    parts = json.loads((ROOT / "dist" / "sbom.cdx.json").read_text("utf-8"))["components"]
    assert {part["name"] for part in parts} >= {"lmdb", "numpy", "pyzmq"}
    notice = (ROOT / "dist" / "NOTICE").read_text("utf-8")
    assert "OpenLDAP Public License" in notice
    assert "pyzmq" in notice
