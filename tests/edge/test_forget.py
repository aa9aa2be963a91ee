"""Deleted is deleted: contexts and chats, and no byte of them is found in any file after compaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_edge.retention import Retention

from ctxreuse.errors import ConfigError
from ctxreuse.store import NewTurn
from ctxreuse.testing.clock import FakeClock
from support.raw_files import found_in_files
from support.waiting import patient

BERTH = "The Aurora lies at the ninth berth behind the blue crane. "
SECRET = "The password of the harbour office is marmalade forty-seven. "
OTHER = "Swallows nest under our roof near a customs house each May. "


def ids_of(edge: Any, text: str) -> list[int]:
    """Ids inside of a text, its ends left out: what stands beside it may change them."""
    return list(edge.http.post("/tokenize", json={"prompt": text}).json()["tokens"])[2:-2]


def ask(edge: Any, *messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], "max_tokens": 4}
    answer = edge.http.post("/v1/chat/completions", json={**body, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def flushed(edge: Any) -> Path:
    edge.node.store.flush()
    return Path(edge.settings.store.folder())


def traces(edge: Any, *texts: str) -> list[str]:
    return found_in_files(flushed(edge), texts, [ids_of(edge, text) for text in texts])


def compact(edge: Any) -> None:
    assert edge.http.post("/api/compact", json={}).json() == {"compacted": True}


def test_a_deleted_context_is_in_no_file(edge: Any) -> None:
    made = edge.http.post(
        "/api/contexts", json={"name": "berths", "messages": [{"role": "system", "content": BERTH * 9}]}
    )
    assert made.status_code == 201
    chat = ask(edge, ("system", BERTH * 9), ("user", "Where is she?"))
    ask(edge, ("system", OTHER * 9), ("user", "What nests there?"))
    assert traces(edge, BERTH)
    assert edge.http.delete("/api/contexts/berths").json()["blocks"] > 0
    assert edge.http.get("/api/contexts/berths").status_code == 404
    assert edge.http.get(f"/api/why/{chat['id']}").status_code == 404
    again = ask(edge, ("system", OTHER * 9), ("user", "What nests there?"))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "others keep their KV"
    compact(edge)
    assert traces(edge, BERTH) == []
    assert traces(edge, OTHER), "the search finds what was not deleted"
    edge.node.store.check()
    edge.node.ledger.check()


def test_a_chat_is_forgotten_by_the_id_of_one_of_its_requests(edge: Any) -> None:
    first = ask(edge, ("system", OTHER * 9), ("user", SECRET * 3))
    said = first["choices"][0]["message"]["content"]
    second = ask(edge, ("system", OTHER * 9), ("user", SECRET * 3), ("assistant", said), ("user", "Say it again. "))
    stays = ask(edge, ("system", OTHER * 9), ("user", "What nests there?"))
    assert traces(edge, SECRET)
    done = edge.http.post("/api/forget", json={"request": second["id"]}).json()
    assert (done["requests"], done["deleted"]) == (2, 0)
    assert done["blocks"] > 0
    assert edge.http.get(f"/api/why/{first['id']}").status_code == 404
    assert edge.http.get(f"/api/why/{stays['id']}").status_code == 200
    compact(edge)
    assert traces(edge, SECRET) == []
    again = ask(edge, ("system", OTHER * 9), ("user", "What nests there?"))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "what the chats shared stays"


def test_chats_are_forgotten_by_their_text(edge: Any) -> None:
    ask(edge, ("user", SECRET))
    ask(edge, ("user", OTHER * 9))
    edge.http.post("/api/contexts", json={"name": "kept", "text": "Notes: " + SECRET})
    done = edge.http.post("/api/forget", json={"text": "marmalade forty-seven"}).json()
    assert done["requests"] >= 1
    assert done["contexts"] == ["kept"], "contexts are deleted by name"
    assert edge.http.delete("/api/contexts/kept").status_code == 200
    compact(edge)
    assert traces(edge, SECRET) == []
    assert edge.http.post("/api/forget", json={"text": "marmalade"}).json()["requests"] == 0


def test_nothing_to_compact(edge: Any) -> None:
    assert edge.http.post("/api/compact", json={}).json() == {"compacted": False}


@pytest.mark.parametrize("body", [{}, {"request": "a", "text": "words"}, {"text": "abc"}, {"context": "nobody"}])
def test_wrong_requests(edge: Any, body: dict[str, str]) -> None:
    answer = edge.http.post("/api/forget", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_what_is_old_is_deleted_by_itself(edge: Any) -> None:
    edge.http.post("/api/contexts", json={"name": "old", "text": SECRET})
    ask(edge, ("user", SECRET))
    clock = FakeClock(time.time())
    retention = Retention(edge.node.forget, 30 * 86400.0, clock=clock)
    assert retention.round() == 0
    clock.advance(29 * 86400.0)
    assert retention.round() == 0
    clock.jump(clock.now() + 10 * 365 * 86400.0)
    clock.advance(3601)
    assert retention.round() == 0, "a clock that is set while the daemon runs deletes nothing"
    clock.jump(clock.now() - 10 * 365 * 86400.0)
    edge.node.ledger.create("new", turns=[NewTurn("text", OTHER)])
    edge.node.ledger._clock = clock  # what is made from now on is young
    edge.node.ledger.rename("new", "young")
    clock.advance(2 * 86400.0)
    assert retention.round() >= 2
    assert [one["name"] for one in edge.http.get("/api/contexts").json()["contexts"]] == ["young"]
    compact(edge)
    assert traces(edge, SECRET) == []
    clock.advance(60)
    assert retention.round() == 0


def test_a_pinned_session_of_the_library_does_not_go_by_age(edge: Any) -> None:
    for name in ("pinned", "loose"):
        edge.node.ledger.create(name, turns=[NewTurn("text", SECRET)], pinned=name == "pinned")
    clock = FakeClock(time.time() + 31 * 86400.0)
    assert Retention(edge.node.forget, 30 * 86400.0, clock=clock).round() == 1
    assert [one.name for one in edge.node.ledger.sessions()] == ["pinned"]
    edge.node.ledger.keep("pinned", pinned=False)
    clock.advance(31 * 86400.0)
    assert Retention(edge.node.forget, 30 * 86400.0, clock=clock).round() == 1
    assert edge.node.ledger.sessions() == []


def test_a_wrong_age_is_an_error_at_the_start(serve: Any) -> None:
    with pytest.raises(ConfigError, match="fortnight"):
        serve(**{"edge.retention": "a fortnight"})


def test_a_person_gets_what_is_kept_of_them(edge: Any) -> None:
    edge.http.post("/api/contexts", json={"name": "mine", "messages": [{"role": "system", "content": SECRET * 4}]})
    chat = ask(edge, ("system", SECRET * 4), ("user", "Where is she?"))
    ask(edge, ("system", OTHER * 4), ("user", "What nests there?"))
    answer = edge.http.get("/api/contexts/mine/export")
    assert answer.status_code == 200
    found = answer.json()
    assert [turn["content"] for turn in found["turns"]] == [SECRET * 4]
    assert found["tokens"] == next(iter(found["turns"][0]["tokens"].values()))[1:]
    assert chat["id"] in [one["id"] for one in found["requests"]]
    assert all(SECRET in one["text"] for one in found["requests"])
    assert OTHER not in answer.text
    assert found["kv"]["tokens"] > 0
    assert edge.http.get("/api/contexts/nobody/export").status_code == 404


@pytest.mark.daemon
def test_a_person_deletes_a_chat_and_grep_does_not_find_it(process: Any, tmp_path: Path) -> None:
    """By the commands that the page on deletion names, on a daemon of its own; it is killed, too."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "CTXREUSE_CONFIG": ""}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=patient(60), check=False)

    def command(*words: str) -> str:
        done = run(sys.executable, "-m", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    store = tmp_path / "store"
    daemon = process()
    with daemon.ready() as http:
        http.post("/api/contexts", json={"name": "diary", "text": SECRET})
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
        chat = http.post("/v1/chat/completions", json=body).json()["id"]
    assert run("grep", "-rac", "marmalade", str(store / "ledger")).stdout.strip() != "0"
    assert "1 requests forgotten" in command("ctxreuse_edge", "forget", chat, "--url", daemon.url)
    assert "diary" in command("ctxreuse_edge", "export", "diary", "--url", daemon.url)
    assert "deleted" in command("ctxreuse_edge", "rm", "diary", "--url", daemon.url)
    assert "rewrote" in command("ctxreuse", "store", "compact", "--path", str(store))
    assert run("grep", "-ra", "marmalade", str(store)).returncode == 1
    daemon.end(signal.SIGKILL)
    assert "Rewritten" in command("ctxreuse", "store", "compact", "--path", str(store))
    assert run("grep", "-ra", "marmalade", str(store)).returncode == 1
