"""The daemon as a process: signals, crashes, two of them on one store, settings from everywhere, the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from ctxreuse_edge.cli import main

from support.waiting import patient, until

QUESTION = {"messages": [{"role": "user", "content": "What is in the box? " * 16}], "temperature": 0, "max_tokens": 10}


def ask(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=QUESTION | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_killed_and_started_again_it_answers_from_disk(process: Any) -> None:
    daemon = process()
    with daemon.ready() as http:
        first = ask(http)
        marked = QUESTION | {"model": "", "cache_control": {"type": "ephemeral"}}
        assert http.post("/v1/messages", json=marked).status_code == 200
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        pinned = until(lambda: (found := http.get("/api/status").json()["pinned"])["prefixes"] and found)
    assert daemon.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert (daemon.store / "edge.json").exists()

    daemon = process()
    with daemon.ready() as http:
        assert http.get("/api/status").json()["pinned"] == pinned
        again = ask(http)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["sources"]["disk"] >= 256
    code, out, err = daemon.end()
    assert (code, "Traceback" in err) == (0, False)
    assert daemon.url in out
    assert not (daemon.store / "edge.json").exists()


def test_the_engine_killed_in_mid_answer_ends_the_answer_and_not_the_daemon(process: Any) -> None:
    daemon = process()
    with daemon.ready() as http:
        first = ask(http)
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        engine = http.get("/api/status").json()["engine"]
        assert (engine["state"], engine["restarts"]) == ("up", 0)
        assert engine["pid"] not in (0, daemon.child.pid)
        body = QUESTION | {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine["pid"], signal.SIGKILL)
            last = [line for line in lines if line][-1]
        error = json.loads(last[6:])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_died")
        assert "killed by SIGKILL" in error["message"]
        again = ask(http)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["sources"]["disk"] >= 256
        after = http.get("/api/status").json()["engine"]
        assert (after["state"], after["restarts"]) == ("up", 1)
        assert after["pid"] != engine["pid"]
        assert http.get("/readyz").status_code == 200
    code, _, err = daemon.end()
    assert (code, "Traceback" in err) == (0, False)
    with pytest.raises(ProcessLookupError):
        os.kill(after["pid"], 0)


def test_sigterm_lets_an_answer_end_and_refuses_new_ones(process: Any) -> None:
    daemon = process("--log-format", "json")
    body = QUESTION | {"stream": True, "max_tokens": 300, "ignore_eos": True}
    with daemon.ready() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        daemon.child.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 300
    code, _, err = daemon.end(0)  # no second signal
    assert code == 0
    logged = [json.loads(line) for line in err.splitlines()]
    assert [line["message"] for line in logged if "life" in line["logger"]] == [
        "listening",
        "ready",
        "draining",
        "stopped",
    ]
    assert next(line for line in logged if line["message"].startswith("POST"))["status"] == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(daemon.url + "/healthz")
    with process().ready() as http:  # nothing that was computed is lost
        assert ask(http)["usage"]["prompt_tokens_details"]["sources"]["disk"] >= 256


def test_nobody_else_may_read_what_it_writes(process: Any, tmp_path: Path) -> None:
    """Whatever the umask, and in the folder of an older version, too, of which it warns."""
    before = os.umask(0o022)
    try:
        (tmp_path / "store").mkdir(mode=0o755)
        keys = tmp_path / "keys"
        keys.write_text("k\n")
        daemon = process("--record", str(tmp_path / "made" / "record.jsonl"), CTXREUSE_EDGE__API_KEY_FILE=str(keys))
    finally:
        os.umask(before)
    with daemon.ready() as http:
        http.headers["authorization"] = "Bearer k"
        body = {"name": "m", "messages": [{"role": "user", "content": "word " * 200}], "pin": True}
        assert http.post("/api/contexts", json=body).status_code == 201
        ask(http)
        assert stat.S_IMODE((tmp_path / "store" / "edge.json").stat().st_mode) == 0o600
    _, _, log = daemon.end()
    assert f"other users of this machine may read the store {tmp_path / 'store'} (mode 0755): run chmod 700" in log
    assert f"the API keys in {keys} (mode 0644): run chmod 600" in log
    written = [*(tmp_path / "store").rglob("*"), *(tmp_path / "made").rglob("*"), tmp_path / "made"]
    assert {"pins.json", "cost.bin", "sum", "blocks", "ledger", "record.jsonl"} <= {path.name for path in written}
    modes = {str(path): oct(stat.S_IMODE(path.stat().st_mode)) for path in written}
    assert {path: mode for path, mode in modes.items() if int(mode, 8) & 0o077} == {}


def test_two_daemons_on_one_store(process: Any) -> None:
    first, second = process(), None
    with first.ready() as http:
        second = process()
        second.child.wait(patient(60))
        code, _, err = second.end()
        assert code == 3
        assert "StoreOwnedError" in err
        assert str(first.child.pid) in err.replace("\n", "")
        assert ask(http)
        # The second one's end has not taken the first one's address away.
        assert (first.store / "edge.json").exists()


def test_a_port_in_use(process: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = process("--port", str(taken.getsockname()[1]))
        daemon.child.wait(patient(60))
        code, _, err = daemon.end()
    assert code == 2
    assert "--port" in err
    assert not daemon.store.exists()


def test_settings_come_from_file_variables_and_flags(process: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    file = tmp_path / "settings.toml"
    file.write_text(f'[edge]\napi_key_file = "{keys}"\nmax_waiting = 3\n[log]\nformat = "json"\n')
    daemon = process("--log-level", "debug", CTXREUSE_CONFIG=str(file), CTXREUSE_EDGE__MAX_WAITING="5")
    with daemon.ready() as http:
        assert http.get("/api/status").status_code == 401
        found = http.get("/api/status", headers={"authorization": "Bearer sesame"}).json()
        assert found["requests"]["most"] == 5
        http.get("/healthz")
    err = daemon.end()[2]
    assert any(json.loads(line)["level"] == "debug" for line in err.splitlines())


def run(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    return int(stopped.value.code or 0), *capfd.readouterr()


def test_verbs_talk_to_the_daemon_of_the_store(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CTXREUSE_CONFIG", os.devnull)
    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "store"))
    monkeypatch.setenv("CTXREUSE_EDGE__PORT", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for verb in (["status"], ["ls"], ["sync"], ["pin", "x"], ["rm", "x"]):
        code, _, err = run(capfd, *verb)
        assert (code, "ctxreuse-edge serve" in err) == (3, True), verb
    edge = serve()
    made = {"name": "manual", "text": "press the red button " * 10}
    edge.http.post("/api/contexts", json=made)
    assert "manual" in run(capfd, "ls")[1]
    code, out, _ = run(capfd, "pin", "manual")
    assert (code, "manual: pinned" in out) == (0, True)
    assert "not pinned" in run(capfd, "pin", "--undo", "manual")[1]
    assert json.loads(run(capfd, "ls", "--json")[1])["total"] == 1
    assert "KV" in run(capfd, "status")[1]
    assert json.loads(run(capfd, "status", "--json", "--url", edge.url)[1])["contexts"] == 1
    assert "No cloud is configured" in run(capfd, "sync")[1]
    assert "deleted" in run(capfd, "rm", "manual")[1]
    code, _, err = run(capfd, "rm", "manual")
    assert (code, "SessionError" in err) == (3, True)
    edge.http.post("/v1/chat/completions", json=QUESTION).raise_for_status()
    code, out, _ = run(capfd, "doctor", "--json")
    found = {f["name"]: f for f in json.loads(out)["findings"] if f["area"] == "daemon"}
    assert found["address"]["value"] == edge.url
    assert re.fullmatch(r"in memory: \d+ of [\d,]+ tokens exact", found["contexts"]["value"])
    assert run(capfd, "serve", "--drain", "soon")[0] == 2


def test_help_names_every_verb() -> None:
    done = subprocess.run([sys.executable, "-m", "ctxreuse_edge", "--help"], capture_output=True, text=True, check=True)
    for verb in ("serve", "status", "ls", "pin", "rm", "sync", "doctor"):
        assert verb in done.stdout
