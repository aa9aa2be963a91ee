"""What the texts say of torch's builds, asked of the indexes that they name: other tests use this machine's wheels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_TEXTS = ("README.md", "docs/index.md")
_COMMAND = re.compile(r"pip install (torch==\S+) --index-url (https://[^\s`]+)")


def _pinned() -> str:
    return re.findall(r"^torch==\S+", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def _would_install(requirement: str, folder: Path, *index: str) -> dict[str, Any]:
    """The metadata of the wheel that pip would install there, whatever this machine is configured to prefer."""
    report = folder / "report.json"
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--retries", "1", "--report", str(report)]
    ours = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT")
    env = {name: value for name, value in os.environ.items() if name not in ours} | {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, requirement, *index],
        env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if "(from versions: none)" in done.stderr:
        pytest.skip(f"that index cannot be asked from here: {' '.join(index) or 'the public one'}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())["install"][0]["metadata"]
    return found


def _cuda(metadata: dict[str, Any]) -> list[str]:
    return [name for name in metadata.get("requires_dist", ()) if re.match(r"nvidia-|cuda-", name)]


@pytest.mark.parametrize("text", _TEXTS)
def test_the_command_names_the_build_that_is_pinned(text: str) -> None:
    commands = _COMMAND.findall((_ROOT / text).read_text())
    assert [requirement for requirement, _ in commands] == [_pinned()]


@pytest.mark.nightly
def test_the_public_index_has_the_cuda_build(tmp_path: Path) -> None:
    assert _cuda(_would_install(_pinned(), tmp_path)), "the texts say that it brings gigabytes of CUDA"


@pytest.mark.nightly
@pytest.mark.parametrize("text", _TEXTS)
def test_the_command_brings_the_cpu_build(text: str, tmp_path: Path) -> None:
    ((requirement, index),) = _COMMAND.findall((_ROOT / text).read_text())
    found = _would_install(requirement, tmp_path, "--index-url", index)
    assert found["version"].partition("+")[2] == "cpu"
    assert not _cuda(found)
