"""The demo as a user runs it: real processes, a real model, a real SIGKILL, and the same tokens at the end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from ctxreuse_agents.demo import acts, play
from rich.console import Console

from ctxreuse.errors import EngineError, StoreError


@pytest.mark.model
@pytest.mark.timeout(900)
def test_demo_reuses_after_a_kill_and_all_tokens_are_the_same(tmp_path: Path) -> None:
    out = io.StringIO()
    assert play.play(str(tmp_path / "memory"), Console(file=out, width=100))
    text = out.getvalue()
    assert "same tokens: yes" in text
    assert "kill -9" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "computed" in lines["cold"]
    assert "device" in lines["warm"]
    assert "disk" in lines["after kill -9"]
    assert "computed" in lines["after eviction"]
    assert (tmp_path / "memory" / "ledger").exists()
    with pytest.raises(StoreError, match="not empty"):
        play.play(str(tmp_path / "memory"), Console(file=out))


def test_an_act_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="a store is a folder") as caught:
        list(play._events("first", tmp_path / "file"))
    assert caught.value.fix


def test_an_act_that_crashes_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="KeyError: 'third'"):
        list(play._events("third", tmp_path))


def test_a_table_without_equal_tokens_says_no() -> None:
    plain = [{"event": "plain", "question": q, "tokens": [1, 2], "seconds": 1.0} for q in acts.QUESTIONS]
    asked = {"event": "asked", "question": acts.QUESTIONS[0], "tokens": [1, 2]}
    assert play._same([*plain, asked])
    assert not play._same([*plain, asked, {**asked, "tokens": [1, 3]}])
    assert not play._same(plain)
    assert not play._same([asked])
