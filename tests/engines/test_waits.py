"""How long threads of native libraries spin: shortly, unless the user chose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ctxreuse.engines.waits import short_waits

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with short_waits():
        assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert not set(NAMES) & set(os.environ)


def test_what_a_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with short_waits():
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
        assert "GOMP_SPINCOUNT" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings libgomp there")
def test_torch_is_loaded_with_short_waits() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    found = subprocess.run(
        [sys.executable, "-c", "import ctxreuse.engines.torch_hf"],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '1000'" in found.stderr
