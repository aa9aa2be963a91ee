"""The command line of the sidecar."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_cloud.cli import main

from ctxreuse.config import load
from ctxreuse.config import settings as all_settings


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that find nothing of the machine's user, and nothing that runs."""
    (tmp_path / "config.toml").write_text(
        f'[cloud]\nport = 9\nstore = "{tmp_path / "store"}"\nkeys_file = "{tmp_path / "keys.json"}"\n'
    )
    monkeypatch.setenv("CTXREUSE_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "own"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True)
def no_log_lines() -> Iterator[None]:
    """`serve` sends logs to a standard error that ends with the test."""
    level, before = logging.getLogger().level, list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = before
    logging.getLogger().setLevel(level)


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr()
    return end.value.code or 0, said.out + said.err


def test_tenants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = call(capsys, "tenants", "add", "team-a")
    assert code == 0
    assert said.startswith("ctxr-")
    call(capsys, "tenants", "add", "team-b")
    listed = json.loads(call(capsys, "tenants", "ls", "--json")[1])
    assert [row["tenant"] for row in listed] == ["team-a", "team-b"]
    assert listed[0]["id"] in call(capsys, "tenants", "ls")[1]
    assert call(capsys, "tenants", "rm", listed[0]["id"]) == (0, "1 revoked\n")
    assert "team-a" not in call(capsys, "tenants", "ls")[1]
    code, said = call(capsys, "tenants", "rm", "team-a")
    assert (code, "no key and no tenant is called 'team-a'" in said) == (2, True)
    code, said = call(capsys, "tenants", "add", "../a")
    assert (code, "no tenant can be called" in said) == (2, True)


def test_status_and_doctor_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = call(capsys, "status")
    assert code == 3
    assert "127.0.0.1:9" in said
    _, said = call(capsys, "doctor", "--json")
    found = {(row["area"], row["name"]): row["status"] for row in json.loads(said)["findings"]}
    assert found["cloud", "keys"] == "ok"
    assert found["cloud", "backends"] == found["sidecar", "running"] == "missing"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend", "nonsense"], "is not the address of a backend"),
        (["--port", "99999"], "cloud.port"),
        (["--bus", "tcp://0.0.0.0:0", "--workers", "0", "--port", "0"], "plain TCP beyond this machine"),
        (["--host", "0.0.0.0", "--keys", "", "--backend", "http://127.0.0.1:1"], "requires API keys"),
    ],
)
def test_wrong_settings_are_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    code, text = call(capsys, "serve", *flags)
    assert code == 2
    assert said in text


def test_what_is_shipped_to_run_it_says_what_it_understands() -> None:
    deploy = Path(__file__).parents[2] / "cloud" / "deploy"
    settings = load(deploy / "cloud.toml", env={}).settings
    unit, image = ((deploy / name).read_text() for name in ("ctxreuse-cloud.service", "Dockerfile"))
    known = {setting.env for setting in all_settings()} | {"CTXREUSE_MODELS", "CTXREUSE_CONFIG"}
    assert set(re.findall(r"CTXREUSE_\w+", unit + image)) <= known
    assert f"EXPOSE {settings.cloud.port} {settings.bus.bind.rpartition(':')[2]}" in image
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop is not None
    assert int(stop[1]) > settings.cloud.drain + settings.cloud.linger
    assert [backend.name for backend in settings.cloud.backends] == ["vllm", "llama"]
    assert settings.cloud.linger == 5.0
