"""Between requests and engine: a hang-up ends the answer, a full house says so, nothing is left behind."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

LONG = {"messages": [{"role": "user", "content": "Tell me everything."}], "max_tokens": 4000, "ignore_eos": True}


def finished(edge: Any, how: str) -> float:
    return float(edge.node.metrics.read("ctxreuse_requests_total", how))


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_ends_the_answer(edge: Any, until: Any, stream: bool) -> None:
    if stream:
        with edge.http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.ReadTimeout):
            edge.http.post("/v1/chat/completions", json=LONG, timeout=0.3)
    until(lambda: finished(edge, "cancelled") == 1)
    until(lambda: edge.node.worker.held == 0)
    edge.node.runtime.pool.check()
    assert len(edge.node.runtime.pool) == 1  # what was computed is kept


def test_a_full_house_says_when_to_come_again(serve: Any, until: Any) -> None:
    edge = serve(**{"edge.max_waiting": 2})
    streams = [edge.http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) for _ in range(2)]
    with streams[0] as one, streams[1] as two:
        lines = [one.iter_lines(), two.iter_lines()]  # letting go of them would hang up
        assert all(next(each) for each in lines)
        refused = edge.http.post("/v1/chat/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert edge.http.get("/readyz").status_code == 200
    until(lambda: edge.node.worker.held == 0)
    assert edge.http.post("/v1/chat/completions", json=LONG | {"max_tokens": 1}).status_code == 200
    edge.node.worker.check()


def test_many_at_once_get_what_each_alone_gets(edge: Any, until: Any) -> None:
    def ask(n: int) -> str:
        body = {"prompt": f"count from {n}:", "max_tokens": 12, "temperature": 0}
        return str(edge.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    alone = [ask(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    until(lambda: edge.node.worker.held == 0)


def test_threads_do_not_pile_up(edge: Any) -> None:
    for n in range(30):
        edge.http.post("/v1/completions", json={"prompt": f"{n}", "max_tokens": 1})
    assert sum(thread.name.startswith("ctxreuse-edge") for thread in threading.enumerate()) <= 4


def test_an_error_in_mid_answer_becomes_an_event(edge: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxreuse.errors import EngineError

    model, calls = edge.node.runtime.engine, []
    prefill = type(model).prefill

    def failing(self: Any, live: Any, tokens: Any) -> Any:
        calls.append(len(tokens))
        if len(calls) > 3:
            raise EngineError("the model broke")
        return prefill(self, live, tokens)

    monkeypatch.setattr(type(model), "prefill", failing)
    answer = edge.http.post("/v1/chat/completions", json=LONG | {"stream": True})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert "[DONE]" not in answer.text
    assert json.loads(lines[-1][6:])["error"]["message"] == "the model broke"
    until(lambda: finished(edge, "error") == 1)
    monkeypatch.undo()
    with closing(edge.http.post("/v1/chat/completions", json=LONG | {"max_tokens": 1})) as good:
        assert good.status_code == 200
