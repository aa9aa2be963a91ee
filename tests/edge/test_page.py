"""The page of a device's daemon, read from real daemons: what it says of requests, contexts, forks, keys, restarts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ctxreuse.daemon.key_file import KeyFile
from support.waiting import patient, until

QUESTION = "What is in the box? " * 16
NASTY = "<img src=x onerror=alert(1)>\u202e\x07"


def ask(http: httpx.Client, text: str = QUESTION, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 10} | more
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class Page:
    """What a page knows that follows the feed."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self.state = lines, dict[str, Any]()

    def next(self) -> dict[str, Any]:
        end = time.monotonic() + patient(20)
        for line in self._lines:
            assert time.monotonic() < end, self.state
            if line.startswith("data: "):
                break
        message = json.loads(line[6:])
        if message.get("full"):
            self.state = {}
        self.state |= message["set"]
        for name, change in message["rows"].items():
            rows = {} if change.get("all") else self.state[name]
            self.state[name] = {k: v for k, v in rows.items() if k not in change["drop"]} | change["put"]
        return self.state

    def until(self, done: Any) -> dict[str, Any]:
        end = time.monotonic() + patient(20)
        while not (self.state or self.next()) or not done(self.state):
            self.next()
            assert time.monotonic() < end, self.state
        return self.state


@contextmanager
def page(http: httpx.Client, **headers: str) -> Iterator[Page]:
    with http.stream("GET", "/api/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield Page(answer.iter_lines())


def test_it_shows_requests_reuse_contexts_and_forks(edge: Any) -> None:
    http = edge.http
    with page(http) as here:
        first = here.next()
        assert first["daemon"]["kind"] == "edge"
        assert sum(first["tokens"]["sources"].values()) == 0
        assert first["contexts"] == first["requests"] == first["sessions"] == {}
        ask(http)
        ask(http)
        seen = here.until(lambda state: len(state["requests"]) == 2 and state["contexts"])
        tokens = here.until(lambda state: state["tokens"]["requests"]["length"] == 2)["tokens"]
        assert tokens["sources"]["device"] >= 350
        assert tokens["sources"]["compute"] >= 350
        assert tokens["generated"] == 20
        assert tokens["gaps"][-1] == [None, 18]
        assert tokens["saved"] + tokens["lost"] > 0
        new, again = sorted(seen["requests"].values())
        assert (new[3], new[5]) == (0, "new")
        assert again[3] == again[4]["device"] == again[2] - 1
        (run, row), *_ = seen["contexts"].items()
        assert again[6] == run
        assert 64 * row[3] >= row[2] > 64 * (row[3] - 1) >= 320  # the last block is a partial one
        assert row[5] == "device"
        assert row[10] in seen["requests"]
        ways = [one[1] for one in here.state["decisions"].values()]
        assert ways == ["recompute", "recompute"]
        assert [one[2] for one in here.state["chats"].values()] == ["length"]

        made = http.post("/api/contexts", json={"name": "base", "text": "word " * 300, "pin": True}).json()["context"]
        seen = here.until(lambda state: state["sessions"] and any(one[7] & 1 for one in state["contexts"].values()))
        session = seen["sessions"][made["id"]]
        assert (session[0], session[1], session[6]) == ("base", 1, True)
        http.delete("/api/contexts/base")
        seen = here.until(lambda state: not state["sessions"])
        removed = here.until(lambda state: state["removals"])["removals"]
        assert ("dropped", "forgotten") in {(one[1], one[2]) for one in removed.values()}


def test_running_answers_are_seen(edge: Any) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with page(edge.http) as here, edge.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        running = here.until(lambda state: state["running"]["answers"] and state["running"]["answers"][0][4])["running"]
        name, _, prompt, cached, _ = running["answers"][0]
        assert name.startswith(("req-", "chatcmpl-"))
        assert (prompt >= 350, cached, running["active"]) == (True, 0, 1)
        here.until(lambda state: state["running"]["passes"][0] > running["passes"][0])
        answer.close()
        here.until(lambda state: not state["running"]["answers"])


def test_texts_are_shown_only_where_the_settings_say_so(serve: Any, tmp_path: Path) -> None:
    for allowed in (False, True):
        daemon = serve(**{"edge.page_texts": allowed, "store.path": str(tmp_path / str(allowed))})
        daemon.http.post("/api/contexts", json={"name": NASTY[:20], "text": f"secret {NASTY} " * 30})
        ask(daemon.http, f"my secret {NASTY} " * 20)
        with page(daemon.http) as here:
            seen = here.until(lambda state: state["requests"] and state["sessions"])
        assert seen["daemon"]["texts"] is allowed
        assert ("secret" in json.dumps(seen)) is allowed
        assert any("secret" in one[8] for one in seen["sessions"].values()) is allowed
        assert any("secret" in one[8] for one in seen["requests"].values()) is allowed
        assert len(max((one[8] for one in seen["sessions"].values()), key=len)) <= 200


def test_with_keys_the_page_opens_and_its_feed_wants_one(serve: Any, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("chat")
    watch = file.add("watch", ("status",))
    daemon = serve(**{"edge.api_key_file": str(tmp_path / "keys.json")})
    assert daemon.http.get("/").status_code == 200
    assert daemon.http.get("/api/events").status_code == 401
    with page(daemon.http, authorization=f"Bearer {watch}") as here:
        assert here.next()["daemon"]["kind"] == "edge"
        file.revoke("watch")
        for _ in here._lines:  # the key has ended, and so does what it opened
            pass
    assert daemon.http.get("/api/events", headers={"authorization": f"Bearer {watch}"}).status_code == 401


def test_a_drain_ends_feeds_at_once_and_after_a_restart_all_is_there(process: Any) -> None:
    daemon = process("--drain", "60")
    with daemon.ready() as http:
        ask(http)
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        with page(http) as here:
            before = here.until(lambda state: state["contexts"] and state["requests"])
            daemon.child.send_signal(signal.SIGTERM)
            for _ in here._lines:
                pass
    code, _, err = daemon.end(0)
    assert (code, "Traceback" in err) == (0, False)
    again = process()
    with again.ready() as http, page(http) as here:
        after = here.until(lambda state: state["contexts"])
        assert after["daemon"]["pid"] != before["daemon"]["pid"]
        assert after["requests"].keys() == before["requests"].keys()
        rows = {run: (row[2], row[5], row[10]) for run, row in after["contexts"].items()}
        assert rows == {run: (row[2], "disk", row[10]) for run, row in before["contexts"].items()}
