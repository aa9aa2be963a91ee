"""``top`` shows what the page does, in a terminal, and obeys no text of others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ctxreuse_cloud.cli import main as cloud_main
from ctxreuse_edge.cli import main as edge_main

from ctxreuse.daemon.page.feed import Rows
from ctxreuse.daemon.page.follow import FeedState
from support.made_up_page import MadeUp, served

NASTY = "[bold]x[/bold]\x1b[31m\x07\u202e"


def call(main: Any, *args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return int(end.value.code or 0)


def test_once_prints_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with served(MadeUp().panels()) as url:
        assert call(edge_main, "top", "--once", "--url", url) == 0
    said = capsys.readouterr().out
    assert "81% of 1,4" in said
    assert "prompt tokens reused, 13m" in said
    for words in ("ctxreuse-edge", "smollm2", "4 running", "Requests", "agent ", "Sessions", "refactor parser", "home"):
        assert words in said
    assert "evicted" in said
    assert "\x1b" not in said  # no terminal, no colours


def test_as_json_it_has_all_panels(capsys: pytest.CaptureFixture[str]) -> None:
    with served(MadeUp(30).panels()) as url:
        assert call(edge_main, "top", "--json", "--url", url) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"daemon", "tokens", "contexts", "requests", "sessions", "links", "decisions"} <= found.keys()
    assert found["daemon"]["kind"] == "edge"


def test_texts_of_others_are_neither_markup_nor_orders(capsys: pytest.CaptureFixture[str]) -> None:
    panels = MadeUp(20).panels()
    daemon = panels["daemon"]()
    panels |= {
        "daemon": lambda: daemon | {"models": [[NASTY, "up", ""]], "failing": NASTY},
        "sessions": lambda: Rows({"1": [NASTY, 3, "", 0, 1.0, 2.0, False, "", ""]}),
        "requests": lambda: Rows({"r": [3.0, NASTY, 0, 0, {}, NASTY, "", "", ""]}),
    }
    with served(panels) as url:
        assert call(edge_main, "top", "--once", "--url", url) == 0
    said = capsys.readouterr().out
    assert "[bold]x[/bold]\ufffd[31m\ufffd\ufffd" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


def test_a_sidecar_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    panels = MadeUp(20).panels()
    daemon = panels["daemon"]() | {"kind": "cloud"}
    kept = {name: panels[name] for name in ("contexts", "store", "removals")}
    kept |= {
        "daemon": lambda: daemon,
        "tokens": lambda: {"sources": {"cloud": 3, "compute": 1}, "generated": 0},
        "running": lambda: {"active": 2, "queued": 0, "limit": 9},
        "peers": lambda: Rows(p=["laptop", "me", "10.0.0.2:1", 5_000_000, 7]),
        "backends": lambda: Rows({"one": ["healthy", "", 1, 12, 0]}),
    }
    with served(kept) as url:
        assert call(cloud_main, "top", "--once", "--url", url) == 0
    said = capsys.readouterr().out
    assert "75% of 4 prompt tokens reused" in said
    for words in ("ctxreuse-cloud", "laptop", "5MB", "healthy", "12"):
        assert words in said


def test_without_a_daemon_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(edge_main, "top", "--url", "http://127.0.0.1:9") == 3
    assert "ctxreuse-edge serve" in capsys.readouterr().err


def test_a_state_follows_messages() -> None:
    state = FeedState()
    state.take({"full": True, "set": {"a": 1}, "rows": {"t": {"all": True, "put": {"x": [1], "y": [2]}, "drop": []}}})
    state.take({"set": {"b": 2}, "rows": {"t": {"put": {"z": [3]}, "drop": ["x", "unknown"]}}})
    assert state.merged() == {"a": 1, "b": 2, "t": {"y": [2], "z": [3]}}
    state.take({"full": True, "set": {"c": 3}, "rows": {}})
    assert state.merged() == {"c": 3}
