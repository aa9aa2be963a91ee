"""`ctxreuse bench`: reports have the documented form, comparisons are paired, a missed bar is an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import benchmarks
from ctxreuse.bench import SUITE, Suite
from ctxreuse.bench.measure import Options, fresh, paired, seconds
from ctxreuse.bench.report import Figure, Report, machine
from ctxreuse.bench.table import show
from ctxreuse.errors import ConfigError, EngineError

FIELDS = {"metric", "value", "unit", "baseline", "peer", "bound"}


def figure(**fields: Any) -> Figure:
    return Figure(**{"metric": "speed", "value": 2.0, "unit": "GB/s"} | fields)


@pytest.mark.slow
def test_a_real_run(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "replay.json"
    done = run("bench", "replay", "--quick", "--json", "--out", str(out))
    assert out.read_text() == done.out
    body = json.loads(done.out)
    assert {"name", "figures", "machine"} <= set(body)
    assert (body["name"], body["quick"]) == ("replay", True)
    assert all(set(row) >= FIELDS for row in body["figures"])
    assert body["machine"]["cores"] >= 1
    served = {row["metric"]: row for row in body["figures"]}
    assert {"generated chat adaptive", "generated chat lru", "generated agents adaptive"} <= set(served)
    assert all(0 < row["value"] <= row["bound"] for row in served.values())


@pytest.mark.parametrize("suite", [SUITE, benchmarks.SUITE])
def test_every_name_has_a_module_that_says_what_it_measures(suite: Suite) -> None:
    for name, module in suite.modules.items():
        assert len(suite.about(name).split()) > 3, module
    if suite is benchmarks.SUITE:
        assert not suite.modules.keys() & SUITE.modules.keys()


def test_ls(run: Any) -> None:
    assert [line.split()[0] for line in run("bench", "ls").out.splitlines()] == list(SUITE.modules)


def test_every_benchmark_is_named() -> None:
    folder = Path(benchmarks.__file__).parent
    runs = {p.stem for p in folder.glob("*.py") if "def run(options: Options)" in p.read_text()}
    assert {module.rpartition(".")[2] for module in benchmarks.SUITE.modules.values()} == runs


def test_committed_results_have_the_form() -> None:
    for path in (Path(benchmarks.__file__).parent / "results").glob("*.json"):
        body = json.loads(path.read_text())
        assert body["name"] == path.stem.partition("-")[0]  # a second model stands behind a dash
        assert body["name"] in {*SUITE.modules, *benchmarks.SUITE.modules}
        assert not body["quick"]
        assert all(set(row) >= FIELDS for row in body["figures"])


def test_an_unknown_name(run: Any) -> None:
    done = run("bench", "tree")
    assert done.code == 2
    assert "store" in done.err
    assert "python -m benchmarks" in done.err
    with pytest.raises(ConfigError):
        SUITE.about("nonsense")


def test_names_and_flags_of_before(run: Any, made_up: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made_up("[Figure(metric='x', value=1.0, unit='s')]")
    monkeypatch.setitem(SUITE.modules, "link", "made_up_bench")
    done = run("bench", "bus", "--json")
    assert json.loads(done.out)["name"] == "link"
    assert "is called 'link' now" in done.err
    assert "python -m benchmarks cuda" in run("bench", "kernels", "--gpu").err


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a bench `made_up` with this source for its figures among the known ones."""

    def make(figures: str) -> None:
        head = '"""Made up for a test of the harness."""\nfrom ctxreuse.bench import Figure\n'
        source = f"{head}def run(options):\n    return {figures}\n"
        (tmp_path / "made_up_bench.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "made_up_bench", raising=False)
        monkeypatch.setitem(SUITE.modules, "made_up", "made_up_bench")

    return make


def test_a_missed_bar_is_an_exit_code(run: Any, made_up: Callable[[str], None]) -> None:
    made_up("[Figure(metric='x', value=1.0, unit='s', bar=2.0)]")
    done = run("bench", "made_up")
    assert done.code == 1
    assert "missed" in done.out


def test_a_met_bar(run: Any, made_up: Callable[[str], None]) -> None:
    made_up("[Figure(metric='x', value=1.0, unit='s', bar=2.0, better='lower')]")
    done = run("bench", "made_up")
    assert done.code == 0
    assert "met" in done.out


@pytest.mark.parametrize(
    ("better", "bar", "passed"),
    [("higher", 2.0, True), ("higher", 2.1, False), ("lower", 2.0, True), ("lower", 1.9, False), ("lower", None, True)],
)
def test_bars(better: Any, bar: float | None, passed: bool) -> None:
    assert figure(better=better, bar=bar).passed == passed


def test_ratios_say_how_many_times_better() -> None:
    assert figure().ratio(1.0) == 2.0
    assert figure(better="lower").ratio(1.0) == 0.5
    assert figure().ratio(None) is None
    assert figure().ratio(0.0) is None


def test_json_keeps_five_digits_and_all_fields() -> None:
    report = Report(name="x", figures=(figure(value=1.23456789, peer=123456.789),), machine={"cpu": "y"})
    body = json.loads(report.json())
    assert body["figures"][0]["value"] == 1.2346
    assert body["figures"][0]["peer"] == 123460
    assert body["figures"][0]["baseline"] is None
    assert body["machine"] == {"cpu": "y"}


def test_the_table_shows_ratios_and_leaves_out_empty_columns() -> None:
    report = Report(name="x", figures=(figure(peer=1.0, bar=3.0),), machine=machine())
    console = Console(file=StringIO(), width=120)
    show(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 (2x)" in text
    assert "≥ 3 missed" in text
    assert "baseline" not in text


def test_pairs_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    times = paired({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warm=2)
    assert len(calls) == 12
    rounds = ["".join(calls[i : i + 2]) for i in range(0, 12, 2)]
    assert rounds in (["ab", "ba"] * 3, ["ba", "ab"] * 3)
    assert set(times) == {"a", "b"}
    calls.clear()
    assert seconds(lambda: calls.append("x"), rounds=3, warm=1) >= 0
    assert len(calls) == 4


def test_fresh_processes_are_fresh() -> None:
    pid = fresh("import os, json; print('noise'); print(json.dumps(os.getpid()))")
    assert pid != os.getpid()
    assert fresh("import sys, json; print(json.dumps(sys.argv[1:]))", 1, "x") == ["1", "x"]
    with pytest.raises(EngineError, match="boom"):
        fresh("raise ValueError('boom')")


def test_options_pick() -> None:
    assert Options(quick=True).pick(1, 2) == 1
    assert Options().pick(1, 2) == 2
