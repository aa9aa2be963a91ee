"""`ctxreuse doctor`: it sees what is there, says what to do, and survives what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxreuse import kernels
from ctxreuse.cpu import cpu_features, multiplies_bfloat16
from ctxreuse.doctor import run_checks, satisfies
from ctxreuse.store import Ledger, NewTurn


def findings(run: Any, *args: str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    done = run(*args, "doctor", "--json")
    body = json.loads(done.out)
    assert body["healthy"] == (done.code == 0)
    return done.code, {(f["area"], f["name"]): f for f in body["findings"]}


@pytest.mark.slow
def test_a_healthy_machine(run: Any) -> None:
    code, found = findings(run)
    assert code == 0
    assert found["kernels", "in use"]["value"].startswith(kernels.active())
    assert found["packages", "lmdb"]["status"] == "ok"
    assert found["models", "smollm2"]["status"] == "missing"
    assert found["models", "smollm2"]["fix"] == "ctxreuse model get smollm2"
    assert found["store", "folder"]["status"] == "missing"
    assert "Healthy" in run("doctor").out


def test_a_wrong_setting_is_a_finding(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[store]\ncapasity = 1\n")
    code, found = findings(run, "--config", str(file))
    assert code == 1
    assert found["store", "ConfigError"]["status"] == "broken"
    assert "store.capacity" in found["store", "ConfigError"]["fix"]
    # The other areas are still looked at.
    assert found["packages", "numpy"]["status"] == "ok"
    assert "broken" in run("--config", str(file), "doctor").out


def test_a_damaged_ledger_is_a_finding(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "store"
    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(place))
    with Ledger.open(place) as ledger:
        ledger.append(ledger.create("s").id, [NewTurn("user", "hello")])
    code, found = findings(run)
    assert code == 0
    assert found["store", "ledger"]["value"] == "1 sessions, 1 turns"
    (place / "ledger" / "data.mdb").write_bytes(b"damaged " * 4096)
    code, found = findings(run)
    assert code == 1
    assert found["store", "ledger"]["status"] == "broken"


def test_too_little_disk_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_STORE__CAPACITY", "1000000TB")
    code, found = findings(run)
    assert code == 0
    assert found["store", "disk"]["status"] == "slow"


def test_one_sick_organ_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError("no such register")

    monkeypatch.setattr(kernels, "active", fail)
    found = {(f.area, f.name): f for f in run_checks()}
    assert found["kernels", "OSError"].status == "broken"
    assert found["packages", "numpy"].status == "ok"


@pytest.mark.parametrize(
    ("installed", "bounds", "holds"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.5.9", ">=2.6", False),
        ("5.23.0", ">=5.20,<6", True),
        ("6.0.0", ">=5.20,<6", False),
        ("6.0", "<6", False),
        ("1.10", ">1.9", True),
        ("1.9", "!=1.9", False),
        ("2.0", "==2.0.0", True),
        ("2.0.1rc1", ">=2.0", True),
        ("1.4.9", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1", "", True),
    ],
)
def test_bounds(installed: str, bounds: str, holds: bool) -> None:
    assert satisfies(installed, bounds) == holds


def test_features_of_other_machines(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp sve\n")
    assert cpu_features(info) == ("asimd", "asimdhp", "sve")
    assert cpu_features(tmp_path / "none") == ()
    assert not multiplies_bfloat16(info)
    assert multiplies_bfloat16(tmp_path / "none")
    for name in ("avx512_bf16", "amx_bf16", "bf16"):
        info.write_text(f"flags\t: fpu avx2 {name} sse\n")
        assert multiplies_bfloat16(info)
