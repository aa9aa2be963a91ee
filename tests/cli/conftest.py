"""Running the command line in this process, away from the user's own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ctxreuse.cli.app import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """`run("store", "stat")` gives exit code, output and error output; settings and data lie under tmp_path."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "CTXREUSE_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("CTXREUSE_CONFIG", "CTXREUSE_DEBUG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> Ran:
        with pytest.raises(SystemExit) as stopped:
            main(args)
        out, err = capfdbinary.readouterr()
        return Ran(int(stopped.value.code or 0), out.decode(), err.decode())

    return call
