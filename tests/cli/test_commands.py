"""The command line as a whole: help that teaches, errors without tracebacks, exit codes as documented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ctxreuse
from ctxreuse.cli import app
from ctxreuse.cli.app import main
from ctxreuse.errors import ConfigError, StoreError

GROUPS = ["", "config", "config show", "config path", "config example", "doctor", "demo", "bench", "model"]
GROUPS += ["store", "store ls", "store stat", "store verify", "store gc"]
GROUPS += ["keys", "keys add", "keys ls", "keys allow", "keys revoke"]


@pytest.mark.parametrize("group", GROUPS)
def test_help(run: Any, group: str) -> None:
    done = run(*group.split(), "--help")
    assert done.code == 0
    assert f"Usage: ctxreuse {group}".strip() in done.out


@pytest.mark.parametrize("group", ["", "config show", "doctor", "bench", "store", "keys"])
def test_help_has_examples_that_fit_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*group.split(), "--help").out.splitlines()
    examples = lines[next(i for i, line in enumerate(lines) if line.strip() == "Examples") :]
    assert any(line.strip().startswith("ctxreuse ") for line in examples)
    # A wrapped example would leave half of it on a line of its own.
    assert all(len(line) <= 80 for line in lines)
    body = [line for line in examples if line.strip()]
    assert all(line.startswith(" ") for line in body)


def test_old_verbs_warn(run: Any, tmp_path: Path) -> None:
    done = run("keys", "new", "laptop", "--dir", str(tmp_path))
    assert (done.code, "`keys add`" in done.err) == (0, True)
    done = run("keys", "list", "--dir", str(tmp_path))
    assert ("laptop" in done.out, "`keys ls`" in done.err) == (True, True)
    assert " new " not in run("keys", "--help").out


def test_version(run: Any) -> None:
    assert run("--version").out == f"ctxreuse {ctxreuse.__version__}\n"


def test_wrong_usage(run: Any) -> None:
    assert run("nonsense").code == 2
    assert run("store", "stat", "--nonsense").code == 2
    assert run().code in (0, 2)


def test_errors_have_three_parts_and_no_traceback(run: Any) -> None:
    done = run("store", "stat")
    assert done.code == app.EXIT_ERROR
    assert done.out == ""
    assert "StoreError" in done.err
    assert "there is no store here" in done.err
    assert "where" in done.err
    assert "--path" in done.err
    assert "Traceback" not in done.err


def test_settings_errors_are_usage_errors(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[store]\ncapasity = 1\n")
    done = run("--config", str(file), "config", "show")
    assert done.code == app.EXIT_USAGE
    assert "Did you mean store.capacity?" in done.err


def test_debug_keeps_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_DEBUG", "1")
    with pytest.raises(StoreError):
        main(["store", "stat"])
    with pytest.raises(ConfigError):
        main(["bench", "nonsense"])


def test_markup_in_a_message_is_not_interpreted(run: Any) -> None:
    done = run("store", "stat", "--path", "[red]x[/nonsense]")
    assert done.code == app.EXIT_ERROR
    assert "[red]x[/nonsense]" in done.err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ctxreuse", "--version"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == f"ctxreuse {ctxreuse.__version__}\n"


def test_the_command_line_starts_without_engines_or_stores() -> None:
    code = "import sys, ctxreuse.cli; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"torch", "transformers", "lmdb", "psutil", "prometheus_client", "zmq"}


@pytest.mark.parametrize("code", [0, 1])
def test_the_demo_is_that_of_the_checkout(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return code

    monkeypatch.setattr(subprocess, "call", call)
    folder = Path(ctxreuse.__file__).parents[1] / "examples" / "demo"
    assert (folder / "__main__.py").is_file()
    assert run("demo", "--keep", str(tmp_path)).code == code
    assert run("demo", "--engine", "torch").code == code
    kept = ["--keep", str(tmp_path), "--engine", "llama_cpp"]
    assert commands == [[sys.executable, str(folder), *words] for words in (kept, ["--engine", "torch"])]


def test_a_wheel_says_where_the_demo_is(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctxreuse, "__file__", str(tmp_path / "ctxreuse" / "__init__.py"))
    done = run("demo")
    assert (done.code, "make demo" in done.err) == (app.EXIT_USAGE, True)


class TestConfig:
    def test_show_is_a_config_file(self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CTXREUSE_STORE__CAPACITY", "3GB")
        shown = run("config", "show").out
        monkeypatch.delenv("CTXREUSE_STORE__CAPACITY")
        file = tmp_path / "again.toml"
        file.write_text(shown)
        assert run("--config", str(file), "config", "show").out == shown
        assert 'capacity = "3GB"' in shown

    def test_origins(self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "c.toml"
        file.write_text("[engine]\nthreads = 3\n")
        monkeypatch.setenv("CTXREUSE_STORE__CAPACITY", "3GB")
        lines = run("--config", str(file), "config", "show", "--origin").out.splitlines()
        found = {line.split(" ")[0]: line.partition("# ")[2] for line in lines if " = " in line}
        assert found["capacity"] == "env CTXREUSE_STORE__CAPACITY"
        assert found["threads"] == f"file {file}"
        assert found["model"] == "default"
        values = json.loads(run("--config", str(file), "config", "show", "--json").out)
        assert values["engine.threads"] == {"value": 3, "origin": f"file {file}"}
        assert values["store.capacity"]["value"] == 3_000_000_000

    def test_a_policy_that_does_not_exist_is_named(self, run: Any, tmp_path: Path) -> None:
        file = tmp_path / "c.toml"
        file.write_text('[store]\npolicy = "nosuch"\n')
        done = run("--config", str(file), "config", "show")
        assert (done.code, "store.policy" in done.err, "adaptive" in done.err) == (app.EXIT_USAGE, True, True), done.err

    def test_path_and_example(self, run: Any, tmp_path: Path) -> None:
        assert run("config", "path").out.strip() == str(tmp_path / "XDG_CONFIG_HOME" / "ctxreuse" / "config.toml")
        assert run("--config", "x.toml", "config", "path").out.strip() == "x.toml"
        file = tmp_path / "example.toml"
        file.write_text(run("config", "example").out)
        assert run("--config", str(file), "config", "show").out == run("config", "show").out
