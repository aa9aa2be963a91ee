"""The demo as a user runs it: real processes, a real model, a real SIGKILL, a real link, and the same tokens."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from demo import acts, link, play
from demo.nodes import Node
from rich.console import Console

from ctxreuse.codec import ProfileStore
from ctxreuse.errors import EngineError, LinkDownError, StoreError
from support.waiting import patient, until

pytestmark = pytest.mark.daemon


@pytest.mark.model
@pytest.mark.parametrize(
    ("engine", "calibrated", "short"),
    [
        ("llama_cpp", False, True),
        pytest.param("torch", True, True, marks=pytest.mark.nightly),
        pytest.param("llama_cpp", False, False, marks=pytest.mark.nightly),
        pytest.param("torch", False, False, marks=pytest.mark.nightly),
    ],
)
def test_demo_reuses_after_a_kill_and_all_tokens_are_the_same(
    engine: str,
    calibrated: bool,
    short: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    monkeypatch.setenv(acts.ENGINE, engine)
    if short:
        monkeypatch.setenv(acts.SHORT, "1")
    if engine == "llama_cpp":  # none of its processes needs torch, or takes it where it is installed
        (tmp_path / "without").mkdir()
        for name in ("torch", "transformers"):
            (tmp_path / "without" / f"{name}.py").write_text(f"raise ImportError('{name} is not wanted here')\n")
        paths = filter(None, [str(tmp_path / "without"), os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    if calibrated:
        ProfileStore(tmp_path / "cards").add(request.getfixturevalue("smollm2_card"))
    out = io.StringIO()
    assert play.play(str(tmp_path / "memory"), Console(file=out, width=100))
    text = out.getvalue()
    assert text.count("same tokens: yes") == 2
    assert "kill -9" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "computed" in lines["cold"]
    assert "device" in lines["warm"]
    assert "disk" in lines["after kill -9"]
    assert "computed" in lines["after eviction"]
    rows = {name: [cell.strip() for cell in line.split("│")] for name, line in lines.items()}
    assert rows["B fetches it"][2].endswith(" cloud")
    stranger = rows["C, key unknown"]
    prompt = int(stranger[3].replace(",", ""))
    assert stranger[2] == ""
    assert (prompt > 2000) is not short
    assert ("by what the request allows" in text) == (engine == "torch")
    assert rows["B, cloud stopped"][2] == f"{prompt - 1:,} device"
    assert rows["B, new question"][2].endswith(" device")
    assert (tmp_path / "memory" / "ledger").exists()
    assert psutil.Process().children() == []
    with pytest.raises(StoreError, match="not empty"):
        play.play(str(tmp_path / "memory"), Console(file=out))


def test_an_act_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="a store must be a folder") as caught:
        list(play._events("first", tmp_path / "file"))
    assert caught.value.fix


def test_an_act_that_crashes_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="KeyError: 'third'"):
        list(play._events("third", tmp_path))


def test_a_table_without_equal_tokens_says_no() -> None:
    plain = [{"event": "plain", "question": q, "tokens": [1, 2], "seconds": 1.0} for q in acts.QUESTIONS]
    asked = {"event": "answered", "question": acts.QUESTIONS[0], "tokens": [1, 2]}
    assert play._same([*plain, asked])
    assert not play._same([*plain, asked, {**asked, "tokens": [1, 3]}])
    assert not play._same(plain)
    assert not play._same([asked])


def test_a_link_that_does_not_do_what_is_shown_says_so() -> None:
    truth = {question: [1, 2] for question in acts.QUESTIONS}
    base = {"question": acts.QUESTIONS[0], "tokens": [1, 2], "prompt": 9, "cached": 0, "sources": {}}
    a, c = {**base, "who": "A reads"}, {**base, "who": "C, a stranger"}
    b = {**base, "who": "B, fetching", "cached": 8, "sources": {"cloud": 8}}
    assert link._verdict([a, b, c], truth) == ""
    assert "NO" in link._verdict([a, {**b, "tokens": [1, 3]}, c], truth)
    assert "did not fetch" in link._verdict([a, {**b, "sources": {"disk": 8}}, c], truth)
    assert "another tenant" in link._verdict([a, b, {**c, "cached": 8}], truth)


def test_a_daemon_that_does_not_start_shows_its_last_words(tmp_path: Path) -> None:
    settings = {"cloud": {"port": 0, "store": str(tmp_path / "c")}, "bus": {"bind": "tcp://nowhere.invalid:1"}}
    with (
        Node(tmp_path, "c", "cloud", settings) as node,
        pytest.raises(LinkDownError, match=r"ended with[^$]*bus") as told,
    ):
        node.ready()
    assert "nowhere.invalid" in str(told.value)


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, number: int) -> None:
    program = "from demo.link import play_link; from rich.console import Console; play_link({}, Console())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.DEVNULL) as demo:
        children = until(lambda: len(found := psutil.Process(demo.pid).children()) == 2 and found, 400)
        demo.send_signal(number)
        assert demo.wait(patient(60)) != 0
    assert [child for child in children if child.is_running()] == []
    assert list(tmp_path.iterdir()) == []
