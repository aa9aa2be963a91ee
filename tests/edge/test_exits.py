"""Early exits in the daemon: a request names a budget, or refuses; usage, metrics and `why` say what became of it."""

from __future__ import annotations

from typing import Any

import pytest

from support.early import early_engine


def ask(edge: Any, text: str, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    return edge.http.post("/v1/chat/completions", json={**body, **more})


@pytest.fixture
def served(serve: Any) -> Any:
    return serve(engine=early_engine())


def test_usage_metrics_and_why_say_what_left_early(served: Any) -> None:
    plain = ask(served, "a").json()
    assert "completion_tokens_details" not in plain["usage"]
    assert served.http.get(f"/api/why/{plain['id']}").json()["exits"] is None
    for text in "bcd":
        answer = ask(served, text, ctxreuse={"exits": 0.2}).json()
    details = answer["usage"]["completion_tokens_details"]
    assert details["early_exit_tokens"] > 0
    assert 0 <= details["early_exit_disagreements"] <= 0.2 * 360
    assert isinstance(details["seconds_saved"], float)
    why = served.http.get(f"/api/why/{answer['id']}").json()
    exited, verified, disagreed, budget, _, _ = why["exits"]
    assert exited == verified == details["early_exit_tokens"], "all are verified at the end of an answer"
    assert disagreed == details["early_exit_disagreements"]
    assert budget == 0.2
    assert "left the model early" in why["text"]
    metrics = served.http.get("/metrics").text
    total = sum(float(line.split()[-1]) for line in metrics.splitlines() if "ctxreuse_exit_tokens_total{" in line)
    assert total >= exited
    off = ask(served, "e", ctxreuse={"exits": "off"}).json()
    assert "completion_tokens_details" not in off["usage"]


@pytest.mark.parametrize("exits", [0, 0.5, -1, "on", True])
def test_budgets_without_a_meaning_are_refused(served: Any, exits: Any) -> None:
    assert ask(served, "a", ctxreuse={"exits": exits}).status_code == 400
