"""The model commands say what they did, on the right stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxreuse.cli.models import app
from ctxreuse.errors import ConfigError


def test_ls_names_all_models_and_what_is_missing(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["ls"])
    assert result.exit_code == 0
    for text in ("smollm2", "gemma3-270m", "Apache-2.0", "Gemma Terms of Use", "no (93 MB to fetch)"):
        assert text in result.stdout


def test_rm_says_whether_anything_was_there(cache_root: Path) -> None:
    (cache_root / "smollm2").mkdir(parents=True)
    assert CliRunner().invoke(app, ["rm", "smollm2"]).stdout == "smollm2: removed\n"
    assert CliRunner().invoke(app, ["rm", "smollm2"]).stdout == "smollm2: was not here\n"


def test_errors_are_left_to_the_program(cache_root: Path) -> None:
    result = CliRunner().invoke(app, ["get", "nonsense"])
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""


@pytest.mark.model
def test_get_prints_the_folder_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["get", "smollm2", "--engine", "torch"])
    assert result.exit_code == 0
    folder = Path(result.stdout.strip())
    assert (folder / "model.safetensors").is_file()
    result = CliRunner().invoke(app, ["get", "smollm2"])
    assert result.stdout == f"{folder / 'smollm2.gguf'}\n"
