"""Between requests and engine: a hang-up ends the answer, a full house says so, nothing is left behind."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctxreuse.runtime.steps.passes import MOST
from support.waiting import patient, until

LONG = {"messages": [{"role": "user", "content": "Tell me everything."}], "max_tokens": 4000, "ignore_eos": True}


def finished(edge: Any, how: str) -> float:
    return float(edge.node.metrics.read("ctxreuse_requests_total", how))


@contextmanager
def asked(edge: Any, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request on its way, whose client hangs up at the end of the block."""
    with closing(http.client.HTTPConnection(edge.url.removeprefix("http://"), timeout=patient(20))) as link:
        link.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_ends_the_answer(edge: Any, stream: bool) -> None:
    passes = edge.node.runtime.steps.stats().passes
    with asked(edge, "/v1/chat/completions", LONG | {"stream": stream}):
        until(lambda: edge.node.runtime.steps.stats().passes > passes + 2)
    until(lambda: finished(edge, "cancelled") == 1)
    until(lambda: edge.node.pool.active == 0)
    edge.node.runtime.context_cache.check()
    assert len(edge.node.runtime.context_cache) == 1  # what was computed is kept


def test_a_hang_up_ends_a_prompt_before_its_next_pass(edge: Any) -> None:
    with edge.node.runtime.steps.exclusive():
        with asked(edge, "/v1/chat/completions", LONG):
            until(lambda: len(edge.node.runtime.inflight.table) == 1)
        until(lambda: edge.node.pool.active == 0)
    assert finished(edge, "cancelled") == 1


def test_two_hundred_streams_that_are_cut_leave_nothing(edge: Any) -> None:
    """At any moment: while they wait, while the prompt is computed, between two tokens."""
    node, rng, answered = edge.node, random.Random(3), Counter[bool]()
    body = {"prompt": "count:", "max_tokens": 6, "temperature": 0}
    expected = edge.http.post("/v1/completions", json=body).json()["choices"]

    def cut(n: int) -> None:
        messages = [{"role": "user", "content": f"{n % 7} " + "Tell me everything. " * (n % 5)}]
        events = rng.randrange(4)
        request = {"messages": messages, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with closing(http.client.HTTPConnection(edge.url.removeprefix("http://"), timeout=patient(60))) as link:
            link.request("POST", "/v1/chat/completions", json.dumps(request), {"content-type": "application/json"})
            if not events:
                return
            answer = link.getresponse()
            lines = [answer.readline() for _ in range(2 * events)]
            answered[answer.status == 200 and lines[0].startswith(b"data: {")] += 1

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(cut, range(200)))
    until(lambda: node.pool.active == 0)
    assert set(answered) == {True}
    assert answered[True] > 100
    node.pool.check()
    node.runtime.inflight.check()
    node.runtime.context_cache.check()
    assert len(node.runtime.inflight.table) == 0
    assert node.runtime.steps.stats().waiting == 0
    assert finished(edge, "cancelled") >= answered[True]
    assert not finished(edge, "error")
    assert edge.http.post("/v1/completions", json=body).json()["choices"] == expected


def test_a_hang_up_leaves_the_queue(edge: Any) -> None:
    pool = edge.node.pool

    def ask(n: int) -> AbstractContextManager[None]:
        return asked(edge, "/v1/completions", {"prompt": f"{n} {n}", "max_tokens": 1})

    with edge.node.runtime.steps.exclusive():
        with ExitStack() as running:
            for n in range(pool.running):
                running.enter_context(ask(n))
            until(lambda: pool.active == pool.running)
            with ask(pool.running):
                until(lambda: pool.waiting == 1)
            until(lambda: pool.active == pool.running)
            assert not pool.waiting
        until(lambda: pool.active == 0)


def test_background_leaves_threads_to_a_callers_other_requests(serve: Any) -> None:
    edge = serve(**{"edge.max_waiting": 16})
    node = edge.node

    def ask(n: int, priority: int) -> int:
        body = {"prompt": f"{n} {n}", "max_tokens": 1, "priority": priority}
        return int(edge.http.post("/v1/completions", json=body, timeout=patient(20)).status_code)

    with ThreadPoolExecutor(10) as pool:
        with node.runtime.steps.exclusive():
            answers = [pool.submit(ask, n, 7) for n in range(8)]
            until(lambda: node.pool.active == 8)
            assert node.pool.waiting == 8 - node.pool.running // 2
            answers += [pool.submit(ask, 8, -1), pool.submit(ask, 9, 0)]
            until(lambda: node.pool.active == 10)
            assert node.pool.waiting == 8 - node.pool.running // 2
            until(lambda: node.runtime.steps.stats().waiting == 2 + node.pool.running // 2)
        assert [answer.result() for answer in answers] == [200] * 10
    until(lambda: node.pool.active == 0)
    node.pool.check()
    assert edge.http.post("/api/contexts", json={"text": "computed in advance"}).status_code == 201
    page = edge.http.get("/metrics").text
    for priority, count in (("interactive", 1), ("normal", 1), ("background", 9)):
        assert f'ctxreuse_scheduler_started_requests_total{{priority="{priority}"}} {count}.0' in page
    assert node.metrics.read("ctxreuse_scheduler_passes_total") >= 3


def test_cold_agents_with_one_system_prompt_have_it_computed_once(edge: Any) -> None:
    system = {"role": "system", "content": "You are one of several agents that work on the same task. " * 4}

    def ask(n: int) -> dict[str, int]:
        body = {"messages": [system, {"role": "user", "content": f"{n} is yours"}], "max_tokens": 1}
        answer = edge.http.post("/v1/chat/completions", json=body, timeout=patient(20))
        return dict(answer.json()["usage"]["prompt_tokens_details"]["sources"])

    with ThreadPoolExecutor(4) as pool:
        with edge.node.runtime.steps.exclusive():
            answers = [pool.submit(ask, n) for n in range(4)]
            table = edge.node.runtime.inflight.table
            until(lambda: sum(len(prompt.wanted) for prompt in table.prompts()) == 3)
        sources = [answer.result() for answer in answers]
    shared = sorted(source["device"] + source["host"] for source in sources)
    assert shared[0] == 0
    assert shared[1] > 0
    assert edge.node.metrics.read("ctxreuse_inflight_followers_total") == 0  # read at the next scrape
    page = edge.http.get("/metrics").text
    assert "ctxreuse_inflight_followers_total 3.0" in page
    assert edge.node.metrics.read("ctxreuse_inflight_tokens_total") >= 3 * shared[1]


def test_a_full_house_says_when_to_come_again(serve: Any) -> None:
    edge = serve(**{"edge.max_waiting": 2})
    streams = [edge.http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) for _ in range(2)]
    with streams[0] as one, streams[1] as two:
        lines = [one.iter_lines(), two.iter_lines()]  # letting go of them would hang up
        assert all(next(each) for each in lines)
        refused = edge.http.post("/v1/chat/completions", json=LONG)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert edge.http.get("/readyz").status_code == 200
    until(lambda: edge.node.pool.active == 0)
    assert edge.http.post("/v1/chat/completions", json=LONG | {"max_tokens": 1}).status_code == 200
    edge.node.pool.check()


def test_a_key_that_floods_is_refused_while_another_is_served(serve: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("flood\nother\n")
    keys.chmod(0o600)
    edge = serve(**{"edge.max_waiting": 16, "edge.api_key_file": str(keys)})
    flood, other = ({"authorization": f"Bearer {key}"} for key in ("flood", "other"))
    answers: list[httpx.Response] = []

    def ask() -> None:
        with edge.http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}, headers=flood) as answer:
            answers.append(answer)
            if answer.status_code == 200:
                done.wait(patient(60))

    done = threading.Event()
    with ThreadPoolExecutor(16) as pool:
        for n in range(16):
            pool.submit(ask)
            until(lambda n=n: edge.node.pool.active == n + 1)
        # One more is over its share: it may have all places, and half of the threads.
        refused = edge.http.post("/v1/chat/completions", json=LONG, headers=flood)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        until(lambda: len(answers) == 8)
        # Another is served beside those that run, and one that waited leaves its place.
        body = {"prompt": "count:", "max_tokens": 2}
        assert edge.http.post("/v1/completions", json=body, headers=other).status_code == 200
        until(lambda: len(answers) == 9)
        assert [answer.status_code for answer in answers] == [200] * 8 + [429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        edge.node.pool.check()
        done.set()
    until(lambda: edge.node.pool.active == 0)


def test_a_caller_has_as_many_answers_at_once_as_a_pass_takes(edge: Any) -> None:
    """Else agents beyond a small number would wait for whole answers of others."""
    with ThreadPoolExecutor(MOST) as pool:
        with edge.node.runtime.steps.exclusive():
            body = {"max_tokens": 2, "ignore_eos": True}
            asked = [
                pool.submit(edge.http.post, "/v1/completions", json={"prompt": f"{n} {n}", **body}) for n in range(MOST)
            ]
            until(lambda: edge.node.runtime.steps.stats().waiting == MOST)
            assert not edge.node.pool.waiting
        assert [answer.result().status_code for answer in asked] == [200] * MOST
    until(lambda: edge.node.pool.active == 0)
    edge.node.pool.check()


def test_many_at_once_get_what_each_alone_gets(edge: Any) -> None:
    def ask(n: int) -> str:
        body = {"prompt": f"count from {n}:", "max_tokens": 12, "temperature": 0}
        return str(edge.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    alone = [ask(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    until(lambda: edge.node.pool.active == 0)


def test_threads_do_not_pile_up(edge: Any) -> None:
    for n in range(30):
        edge.http.post("/v1/completions", json={"prompt": f"{n}", "max_tokens": 1})
    assert sum(thread.name.startswith("ctxreuse-edge") for thread in threading.enumerate()) <= 4


def test_an_error_in_mid_answer_becomes_an_event(edge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxreuse.errors import EngineError

    model, calls = edge.node.runtime.engine, []
    step = type(model).step

    def failing(self: Any, batch: Any, **options: Any) -> Any:
        calls.append(len(batch))
        if len(calls) > 3:
            return [EngineError("the model broke") for _ in batch]
        return step(self, batch, **options)

    monkeypatch.setattr(type(model), "step", failing)
    answer = edge.http.post("/v1/chat/completions", json=LONG | {"stream": True})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert "[DONE]" not in answer.text
    assert json.loads(lines[-1][6:])["error"]["message"] == "the model broke"
    until(lambda: finished(edge, "error") == 1)
    monkeypatch.undo()
    with closing(edge.http.post("/v1/chat/completions", json=LONG | {"max_tokens": 1})) as good:
        assert good.status_code == 200
