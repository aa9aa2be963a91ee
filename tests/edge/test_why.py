"""Why a request missed, asked of a daemon: another word, eviction, another model, another tenant, after restarts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_agents import Memory

from ctxreuse.engines import open_engine
from ctxreuse.why import Why
from support.waiting import patient

SYSTEM = "You are a careful clerk of the harbour office. Today is Monday and the tide is high. " + (
    "Answer in short sentences, and name the berth of each ship. " * 6
)


def ask(http: Any, system: str = SYSTEM, question: str = "Where is the Aurora?", **headers: str) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def explained(http: Any, name: str) -> Why:
    answer = http.get(f"/api/why/{name}")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Why)


def test_one_word_of_the_system_prompt(edge: Any) -> None:
    first = ask(edge.http)
    other = ask(edge.http, SYSTEM.replace("Monday", "Tuesday"), **{"x-request-id": "tuesday-1"})
    assert other.headers["x-request-id"] == "tuesday-1"
    found = explained(edge.http, "tuesday-1")
    assert found == explained(edge.http, other.json()["id"])
    assert found.reason == "new" == other.json()["usage"]["prompt_tokens_details"]["missed"]
    different = found.difference
    assert different is not None
    assert different.request == first.headers["x-request-id"]
    assert (different.kind, different.part, different.name) == ("changed", 1, "system")
    assert different.character == SYSTEM.index("Monday")
    assert (different.here[: different.changed], different.there[: different.other_changed]) == ("Tues", "Mon")
    assert different.before.endswith("Today is ")
    assert different.alike > 300
    assert "Move what changes" in found.advice
    assert found.cached_tokens == other.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    spans = [(span.start, span.end) for span in found.spans]
    assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), found.prompt_tokens]
    metrics = edge.node.metrics
    assert metrics.read("ctxreuse_misses_total", "new") == 2
    assert metrics.read("ctxreuse_missed_tokens_total", "new") > 300


def test_what_was_reused_and_what_is_not_known(edge: Any) -> None:
    ask(edge.http)
    again = explained(edge.http, ask(edge.http).json()["id"])
    assert again.reason == ""
    assert "There was no miss" in again.text
    assert edge.http.get("/api/why").json()["request"] == again.request
    unknown = edge.http.get("/api/why/never-asked")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "no_such_request"


def test_a_conversation_that_grows_and_an_answer_that_comes_back_otherwise(edge: Any) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is the Aurora? " * 9}]
    body = {"messages": messages, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    answer = edge.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    question = {"role": "user", "content": "And the Boreas? " * 9}
    altered = [*messages, {"role": "assistant", "content": answer[:6] + "#" + answer[7:]}, question]
    found = explained(edge.http, edge.http.post("/v1/chat/completions", json=body | {"messages": altered}).json()["id"])
    assert found.difference is not None
    assert (found.difference.name, found.difference.answer) == ("assistant", True)
    assert "answer back" in found.advice


def test_eviction_says_when_and_for_whom(serve: Any) -> None:
    store = {"store.capacity": "1MiB", "store.recompress": False, "store.policy": "adaptive:lru,arc"}
    edge = serve(**store, **{"edge.context_cache_bytes": 0})
    ask(edge.http)
    edge.node.store.flush()
    for i in range(14):
        ask(edge.http, f"{i} " * 300)
        edge.node.store.flush()
    found = explained(edge.http, ask(edge.http).json()["id"])
    assert found.reason == "evicted"
    span = found.spans[0]
    assert span.start == 0
    assert re.fullmatch(r"adaptive \(\w+ led\)", span.rule)
    assert 0 < span.at <= found.at
    assert explained(edge.http, span.by).prompt_tokens > 0
    assert "store.capacity" in found.advice
    assert edge.node.metrics.read("ctxreuse_misses_total", "evicted") == 1


def test_another_tenant_is_named_to_the_devices_user_only(serve: Any, engine: Any, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "store", engine, tenant="neighbour") as memory:
        session = memory.create("s")
        session.system(SYSTEM)
        assert session.ask("Where is the Aurora?", max_tokens=4, temperature=0.0).usage.why == "new"
        session.close()
        theirs = session.why()
    edge = serve()
    found = explained(edge.http, ask(edge.http).json()["id"])
    assert found.reason == "tenant"
    assert found.difference is None
    assert {(span.at, span.by) for span in found.spans} == {(0.0, "")}
    assert theirs.request not in found.text
    assert edge.http.get(f"/api/why/{theirs.request}").status_code == 404
    # Counters are open to all: they do not tell tenants from each other.
    assert edge.node.metrics.read("ctxreuse_misses_total", "new") == 1
    edge.close()
    (tmp_path / "keys").write_text("a-key\n")
    closed = serve(**{"edge.api_key_file": str(tmp_path / "keys")})
    closed.http.headers["authorization"] = "Bearer a-key"
    assert explained(closed.http, ask(closed.http, SYSTEM + "!").json()["id"]).reason != "tenant"


def test_another_model_names_the_fields(edge: Any, folder: Path) -> None:
    ask(edge.http)
    edge.close()
    again = type(edge)(edge.settings, open_engine(str(folder), dtype="bfloat16"))
    try:
        found = explained(again.http, ask(again.http).json()["id"])
        assert again.node.metrics.read("ctxreuse_misses_total", "space") == 1
    finally:
        again.close()
    assert found.reason == "space"
    assert [(field.name, field.here, field.there) for field in found.fields] == [("KV type", "bfloat16", "float32")]
    assert "KV type (bfloat16 here, float32 there)" in found.text


def test_hashes_only_and_texts_that_shall_go(serve: Any, tmp_path: Path) -> None:
    edge = serve()
    ask(edge.http, SYSTEM + "The password is swordfish.")
    edge.close()
    journal = tmp_path / "store" / "requests.journal"
    needle = edge.node.runtime.text.encode("swordfish").astype("<i4").tobytes()
    assert needle in journal.read_bytes()
    again = serve(**{"edge.request_log": "hashes"})
    assert needle not in journal.read_bytes()
    found = explained(again.http, ask(again.http, SYSTEM + "The password is swordfish?").json()["id"])
    assert found.difference is not None
    assert (found.difference.exact, found.difference.here, found.difference.name) == (False, "", "system")
    assert needle not in journal.read_bytes()


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> Any:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "ctxreuse", "why", "--path", str(tmp_path / "store"), *args]
        env = {**os.environ, "CTXREUSE_ENGINE__MODEL": str(folder), "CTXREUSE_CONFIG": os.devnull, "COLUMNS": "110"}
        return subprocess.run(words, capture_output=True, text=True, env=env, check=False, timeout=patient(60))

    return run


def test_the_command_asks_the_daemon_and_reads_what_it_left(edge: Any, command: Any, tmp_path: Path) -> None:
    ask(edge.http)
    name = ask(edge.http, SYSTEM.replace("Monday", "Tuesday")).json()["id"]
    live = command("--last")
    assert live.returncode == 0, live.stderr
    assert "Today is [Tuesday] and the tide" in live.stdout
    assert "Today is [Monday] and the tide" in live.stdout
    edge.close()
    left = command(name)
    assert left.stdout == live.stdout
    assert command("nobody").returncode == 3
    assert "no request 'nobody'" in command("nobody").stderr
    journal = tmp_path / "store" / "requests.journal"
    raw = bytearray(journal.read_bytes())
    raw[40] ^= 1
    journal.write_bytes(bytes(raw))
    broken = command("--last")
    assert broken.returncode == 3
    assert "Delete the file" in broken.stderr
