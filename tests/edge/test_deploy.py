"""What is shipped to run the daemon says what the daemon understands; the example runs."""

from __future__ import annotations

import configparser
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.config import load, settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "edge" / "deploy"
VARIABLES = {setting.env for setting in settings()} | {"CTXREUSE_MODELS"}


def test_the_settings_file_is_one() -> None:
    found = load(DEPLOY / "edge.toml", env={}).settings
    assert found.edge.sync_rate == 500_000
    # What is commented out is right as well.
    text = (DEPLOY / "edge.toml").read_text()
    lines = [line.removeprefix("# ") if re.match(r"# (\[|\w+ = )", line) else line for line in text.splitlines()]
    import tomllib

    assert tomllib.loads("\n".join(lines))["bus"]["clouds"][0]["name"] == "home"


def test_the_unit_sets_what_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (DEPLOY / "ctxreuse-edge.service").read_text()
    unit.read_string(text)
    assert unit["Service"]["Type"] == "notify"
    assert unit["Service"]["ExecStart"].endswith("ctxreuse-edge --config /etc/ctxreuse/edge.toml serve")
    assert set(re.findall(r"CTXREUSE_\w+", text)) <= VARIABLES
    assert int(unit["Service"]["TimeoutStopSec"]) > load(DEPLOY / "edge.toml", env={}).settings.edge.drain


def test_the_image_sets_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"CTXREUSE_\w+", text)) <= VARIABLES
    assert f"EXPOSE {load(env={}).settings.edge.port}" in text


def test_the_image_asks_the_daemon_whether_it_is_ready(serve: Any, tmp_path: Path) -> None:
    found = re.search(r'HEALTHCHECK .*?"-c", \\\n\s*"(.*?)"\]', (DEPLOY / "Dockerfile").read_text(), re.DOTALL)
    assert found is not None
    check = [sys.executable, "-c", found[1].replace("/data/store", str(tmp_path / "store"))]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1, "there is none yet"
    serve()
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0


def test_the_example_runs(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    edge = serve()
    runpy.run_path(str(ROOT / "examples" / "edge_chat.py"))["main"](edge.url)
    first, second = re.findall(r"\[([\d,]+) of ([\d,]+) prompt tokens", capsys.readouterr().out)
    assert first[0] == "0"
    assert int(second[0].replace(",", "")) > 3000
