"""Drafts in the daemon: what usage, metrics and `why` say of them, how they outlive a restart, and that forgotten texts
are in no file of theirs."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.speculate import PassCosts
from support.raw_files import found_in_files

SECRET = "The password of the harbour office is marmalade forty-seven. "
LIST = "one, two, three, one, two, three, "


def ask(edge: Any, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    answer = edge.http.post("/v1/chat/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def drafts(edge: Any) -> list[Path]:
    return sorted(Path(edge.settings.store.folder()).glob("drafts-*"))


@pytest.fixture
def drafting(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A daemon whose passes cost little more with more rows, however busy the machine is."""
    observe = PassCosts.observe
    monkeypatch.setattr(
        PassCosts, "observe", lambda self, rows, contexts, _: observe(self, rows, contexts, 1 + rows / 500)
    )
    return serve(**{"engine.speculate": "auto"})


def test_usage_metrics_and_why_say_what_drafts_did(drafting: Any) -> None:
    # As often as it takes until the daemon knows what its passes cost; the answer repeats what it said before.
    for _ in range(20):
        answer = ask(drafting, LIST * 8)
        details = answer["usage"].get("completion_tokens_details", {})
        if details.get("accepted_prediction_tokens"):
            break
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    assert isinstance(details["seconds_saved"], float)
    why = drafting.http.get(f"/api/why/{answer['id']}").json()
    drafted, accepted, saved, short, *by_model = why["drafts"]
    assert by_model == [0, 0]
    assert accepted == details["accepted_prediction_tokens"]
    assert drafted - accepted == details["rejected_prediction_tokens"]
    assert saved == pytest.approx(details["seconds_saved"], abs=1e-5)
    assert set(short) <= {"match", "cost", "lost", "unknown", "grammar", "end"}
    assert f"Of {drafted:,} drafted tokens of the answer {accepted:,} were right" in why["text"]
    metrics = drafting.http.get("/metrics").text
    assert 'ctxreuse_draft_tokens_total{verdict="accepted"}' in metrics
    assert "ctxreuse_draft_memory_bytes 0.0" not in metrics
    assert sum(float(line.split()[-1]) for line in metrics.splitlines() if "draft_short_passes_total{" in line) > 0


def test_a_draft_model_is_named_in_the_settings_and_counted_apart(
    serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = PassCosts.observe
    monkeypatch.setattr(  # so slow a model that a draft of the same weights pays
        PassCosts, "observe", lambda self, rows, contexts, _: observe(self, rows, contexts, 1 + rows / 500)
    )
    edge = serve(**{"engine.speculate": "auto", "engine.draft_model": str(folder)})
    for number in range(3):
        answer = ask(edge, f"{number} and what nobody has said before")
    details = answer["usage"]["completion_tokens_details"]
    assert details["drafted_by_model"] >= 20
    assert details["accepted_by_model"] >= 0.8 * details["drafted_by_model"]
    assert "a draft model drafted" in edge.http.get(f"/api/why/{answer['id']}").json()["text"]
    assert 'ctxreuse_model_draft_tokens_total{verdict="accepted"}' in edge.http.get("/metrics").text


def test_an_answer_that_is_not_to_be_drafted_has_no_figures(drafting: Any) -> None:
    answer = ask(drafting, LIST, ctxreuse={"speculate": "off"})
    assert "completion_tokens_details" not in answer["usage"]
    assert drafting.http.get(f"/api/why/{answer['id']}").json()["drafts"] is None


def test_what_drafts_are_made_from_outlives_a_restart_and_no_deletion(serve: Any, tmp_path: Path) -> None:
    first = serve(**{"engine.speculate": "auto"})
    asked = ask(first, SECRET * 4)
    ids = [first.http.post("/tokenize", json={"prompt": SECRET}).json()["tokens"][2:-2]]
    first.close()
    (file,) = drafts(first)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert found_in_files(file.parent, [], ids), "the search finds what is kept"
    again = serve(**{"engine.speculate": "auto"})
    assert again.node.runtime.drafting.memory.nbytes > 0
    assert again.http.post("/api/forget", json={"request": asked["id"]}).json()["requests"] == 1
    assert drafts(again) == []
    assert again.node.runtime.drafting.memory.nbytes == 0
    assert again.http.post("/api/compact", json={}).json() == {"compacted": True}
    again.close()
    assert [one for one in found_in_files(file.parent, [SECRET], ids) if one.startswith("drafts")] == []


def test_forgetting_removes_drafts_also_where_nothing_is_drafted_any_more(serve: Any) -> None:
    first = serve(**{"engine.speculate": "auto"})
    ask(first, SECRET * 4)
    first.close()
    assert drafts(first)
    off = serve()
    assert off.http.post("/api/forget", json={"text": "no chat says this"}).json()["requests"] == 0
    assert drafts(off) == []


def test_drafts_go_with_what_is_too_old(drafting: Any) -> None:
    ask(drafting, SECRET * 4)
    drafting.node.runtime.save_drafts()
    now = time.time()
    drafting.node.forget.older_than(now - 1000)
    assert drafts(drafting)
    drafting.node.forget.older_than(now + 1)
    assert drafts(drafting) == []
    assert drafting.node.runtime.drafting.memory.nbytes == 0


def test_a_damaged_file_is_written_anew(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = serve(**{"engine.speculate": "auto"})
    ask(first, SECRET)
    first.close()
    (file,) = drafts(first)
    file.write_bytes(file.read_bytes()[:-3])
    again = serve(**{"engine.speculate": "auto"})
    assert again.node.runtime.drafting.memory.nbytes == 0
    ask(again, SECRET)
    again.close()
    third = serve(**{"engine.speculate": "auto"})
    assert third.node.runtime.drafting.memory.nbytes > 0
