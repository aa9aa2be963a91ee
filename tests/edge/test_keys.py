"""API keys at the edge: what they may, what they use, and their end in the middle of an answer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ctxreuse_edge.cli import main

from support.waiting import patient, until

Run = Callable[..., tuple[int, str, str]]
LONG = {
    "messages": [{"role": "user", "content": "a secret word"}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
}
SHORT = {"messages": [{"role": "user", "content": "What is in the box? " * 16}], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("keys", …) runs a command of ``ctxreuse-edge`` whose key file is ``tmp_path/keys.json``."""
    monkeypatch.setenv("CTXREUSE_CONFIG", os.devnull)
    monkeypatch.setenv("CTXREUSE_EDGE__API_KEY_FILE", str(tmp_path / "keys.json"))

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(args)
        return int(stopped.value.code or 0), *capfd.readouterr()

    return run


def test_commands_for_keys(run: Run, tmp_path: Path) -> None:
    code, key, said = run("keys", "add", "laptop", "--expires", "30d", "--requests", "60", "--tokens", "5000")
    assert (code, key[:5]) == (0, "ctxr-")
    assert str(tmp_path / "keys.json") in said
    assert "edge.api_key_file" in said
    assert run("keys", "add", "prometheus", "--scope", "metrics", "--scope", "status")[0] == 0
    rows = json.loads(run("keys", "ls", "--json")[1])
    assert [(row["tenant"], row["scopes"]) for row in rows] == [
        ("laptop", ["answers"]),
        ("prometheus", ["metrics", "status"]),
    ]
    assert rows[0]["expires"] - rows[0]["created"] == 30 * 86400
    out = run("keys", "ls")[1]
    assert "expires" in out
    assert "60 requests/min" in out
    assert key.strip() not in out
    assert run("keys", "rm", rows[0]["id"])[1] == "1 revoked\n"
    assert "laptop" not in run("keys", "ls")[1]
    for odd, says in (
        (("add", "x", "--scope", "all"), "there is no scope 'all'"),
        (("add", "x", "--expires", "soon"), "is not a duration"),
        (("add", "x", "--expires", "0s"), "cannot expire at once"),
        (("add", "../x"), "can be called"),
        (("rm", "nobody"), "nobody"),
    ):
        code, _, err = run("keys", *odd)
        assert (code, says in err) == (2, True), err


def test_a_revoked_key_ends_its_answers_and_others_go_on(
    serve: Any, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gone, stays = (run("keys", "add", name)[1].strip() for name in ("gone", "stays"))
    edge = serve(**{"edge.api_key_file": str(tmp_path / "keys.json")})
    with (
        httpx.Client(base_url=edge.url, headers={"authorization": f"Bearer {gone}"}, timeout=patient(60)) as one,
        httpx.Client(base_url=edge.url, headers={"x-api-key": stays}, timeout=patient(60)) as other,
        one.stream("POST", "/v1/chat/completions", json=LONG) as ending,
        other.stream("POST", "/v1/chat/completions", json=LONG) as going,
    ):
        lines, others = ending.iter_lines(), going.iter_lines()
        next(lines), next(others)
        assert run("keys", "rm", "gone")[0] == 0
        last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["message"] == "the API key was revoked or has expired"
        until(lambda: edge.node.pool.active == 1)
        next(others)
        refused = one.post("/v1/chat/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert other.post("/v1/chat/completions", json=SHORT).status_code == 200
    until(lambda: any(getattr(record, "key", "") == "gone" for record in caplog.records))
    for secret in (gone, stays, "secret word"):
        assert secret not in caplog.text
    assert "Traceback" not in caplog.text


def test_tokens_that_were_computed_count_and_those_that_were_reused_do_not(
    serve: Any, run: Run, tmp_path: Path
) -> None:
    key = run("keys", "add", "laptop", "--tokens", "100000", "--requests", "100")[1].strip()
    edge = serve(**{"edge.api_key_file": str(tmp_path / "keys.json")})
    with httpx.Client(base_url=edge.url, headers={"authorization": f"Bearer {key}"}, timeout=patient(60)) as http:
        spent = []
        keys = edge.daemon.reloaded[0]
        rates = keys.rates(keys.find(key))
        rates._buckets["tokens"]._clock, rates._buckets["tokens"]._at = lambda: 0.0, 0.0  # nothing comes back
        for _ in range(2):
            before = rates._buckets["tokens"].level
            answer = http.post("/v1/chat/completions", json=SHORT)
            usage = answer.json()["usage"]
            until(lambda before=before: rates._buckets["tokens"].level < before)
            spent.append(before - rates._buckets["tokens"].level)
            computed = usage["prompt_tokens_details"]["sources"]["compute"] + usage["completion_tokens"]
            assert spent[-1] == computed
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        assert "laptop" not in httpx.get(f"{edge.url}/metrics").text
        scraper = run("keys", "add", "prometheus", "--scope", "metrics")[1].strip()
        until(lambda: httpx.get(f"{edge.url}/metrics").status_code == 401)
        page = httpx.get(f"{edge.url}/metrics", headers={"x-api-key": scraper}).text
        assert 'ctxreuse_key_requests_total{key="laptop"} 2.0' in page
        assert f'ctxreuse_key_tokens_total{{key="laptop"}} {float(sum(spent))}' in page
        assert spent[1] < spent[0] / 4


def test_a_key_that_may_only_ask_forgets_nobody_elses_chats(serve: Any, run: Run, tmp_path: Path) -> None:
    asks, operates = (
        run("keys", "add", name, *(word for scope in scopes for word in ("--scope", scope)))[1].strip()
        for name, scopes in (("asks", ["answers"]), ("operates", ["answers", "status"]))
    )
    edge = serve(**{"edge.api_key_file": str(tmp_path / "keys.json")})

    def forget(key: str, **body: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{edge.url}/api/forget", json=body, headers=headers, timeout=patient(60))

    headers = {"x-api-key": operates}
    said = httpx.post(f"{edge.url}/v1/chat/completions", json=SHORT, headers=headers, timeout=patient(60))
    assert said.status_code == 200
    refused = forget(asks, text="What is in the box?")
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "text")
    assert forget(asks, request="chatcmpl-nobody").json()["requests"] == 0
    assert forget(operates, text="What is in the box?").json()["requests"] == 1
