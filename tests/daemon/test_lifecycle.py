"""The life of a daemon as a process: what each signal does, in which order things end, what others see of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctxreuse.daemon.lifecycle import Daemon, read_address
from ctxreuse.daemon.notify import notify, watchdog_seconds
from ctxreuse.errors import ConfigError
from support.waiting import patient, until

pytestmark = pytest.mark.daemon


class Toy:
    def __init__(self, folder: Path, drain: float, linger: float, opening: str, closing: float, **env: str) -> None:
        self.address = folder / "toy.json"
        args = [str(drain), str(linger), str(self.address), opening, str(closing)]
        self.child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("toy.py")), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        assert self.child.stdout is not None
        self.url = self.child.stdout.readline().strip()

    def ready(self) -> None:
        until(lambda: self.address.exists() or self.child.poll() is not None)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.child.send_signal(number)

    def force(self) -> None:
        """Signal until it has ended: two signals within half a second are one."""
        until(lambda: self.child.poll() is not None or self.stop(signal.SIGINT), 60, poll=0.6)

    def end(self) -> tuple[int, str, str]:
        out, err = self.child.communicate(timeout=patient(30))
        return self.child.returncode, out, err


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    started: list[Toy] = []

    def start(drain: float = 20, linger: float = 0, opening: str = "0", closing: float = 0, **env: str) -> Toy:
        started.append(Toy(tmp_path, drain, linger, opening, closing, **env))
        return started[-1]

    yield start
    for one in started:
        if one.child.poll() is None:
            one.child.kill()
            one.end()


def test_answers_under_way_end_and_then_what_they_used_is_closed(toy: Any) -> None:
    daemon = toy()
    daemon.ready()
    found = read_address(daemon.address)
    assert found is not None
    assert (found.url, found.pid, found.name) == (daemon.url, daemon.child.pid, "toy")
    with httpx.stream("GET", daemon.url + "/ticks?n=20", timeout=patient(5)) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "0"
        daemon.stop(signal.SIGSTOP)  # so that both come at one moment
        daemon.stop()
        daemon.stop(signal.SIGINT)  # an echo of the first
        daemon.stop(signal.SIGCONT)
        assert list(lines)[-1] == "19"
    code, out, err = daemon.end()
    assert (code, out) == (0, "closed\n")
    assert not daemon.address.exists()
    assert [json.loads(line)["level"] for line in err.splitlines() if "warn" in line or "error" in line] == []


def test_an_answer_that_takes_too_long_is_cut_at_the_deadline(toy: Any) -> None:
    daemon = toy(drain=1)
    daemon.ready()
    with httpx.stream("GET", daemon.url + "/ticks?n=2000", timeout=patient(5)) as answer:
        lines = answer.iter_lines()
        next(lines)
        daemon.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    code, out, _ = daemon.end()
    assert (code, out) == (0, "cancelled\nclosed\n")


def test_a_second_signal_cancels_and_a_process_that_hangs_is_ended(toy: Any) -> None:
    polite, hanging = toy(drain=60), toy(drain=60, closing=60)
    for daemon in (polite, hanging):
        daemon.ready()
    with httpx.stream("GET", polite.url + "/ticks?n=2000", timeout=patient(5)) as answer:
        lines = answer.iter_lines()  # letting go of it would hang up
        next(lines)
        for daemon in (polite, hanging):
            daemon.stop()
        polite.force()
        code, out, err = polite.end()
    assert (code, out) == (130, "cancelled\nclosed\n")
    assert "Traceback" not in err
    assert [json.loads(line)["message"] for line in err.splitlines() if '"error"' in line] == []
    hanging.force()
    code, out, _ = hanging.end()
    assert (code, out) == (130, "")


def test_not_ready_is_said_before_connections_are_refused(toy: Any) -> None:
    daemon = toy(linger=600)
    daemon.ready()
    with httpx.Client(base_url=daemon.url, timeout=patient(5)) as http:
        assert http.get("/readyz").status_code == 200
        daemon.stop()
        until(lambda: http.get("/readyz").status_code == 503)
        assert http.get("/readyz").json() == {"status": "draining"}
        assert http.get("/healthz").status_code == 200
        refused = http.get("/ticks?n=1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    daemon.force()
    assert daemon.end()[:2] == (130, "closed\n"), "a second signal ends the waiting, and what is open is closed"


def test_while_it_opens_it_is_alive_and_not_ready(toy: Any) -> None:
    daemon = toy(opening="60")
    with httpx.Client(base_url=daemon.url, timeout=patient(5)) as http:
        until(lambda: http.get("/healthz").status_code == 200)
        assert http.get("/readyz").json() == {"status": "starting"}
        refused = http.get("/ticks?n=1")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert not daemon.address.exists()


def test_what_does_not_open_ends_the_process(toy: Any) -> None:
    daemon = toy(opening="broken")
    code, out, err = daemon.end()
    assert (code, out) == (1, "")
    assert "it does not open" in err
    assert not daemon.address.exists()


def test_a_slip_in_code_is_an_answer_and_a_line_in_the_log(toy: Any) -> None:
    daemon = toy()
    daemon.ready()
    answer = httpx.get(daemon.url + "/broken", headers={"x-request-id": "mine"}, timeout=patient(5))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "slip" not in answer.text
    daemon.stop()
    logged = [json.loads(line) for line in daemon.end()[2].splitlines()]
    failed = next(line for line in logged if line["level"] == "error")
    assert failed["request_id"] == "mine"
    assert "a slip in code" in failed["error"]


def test_systemd_hears_of_it(toy: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(patient(30))
        daemon = toy(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="100000")
        assert systemd.recv(1000) == f"READY=1\nSTATUS=Serving on {daemon.url}".encode()
        assert [systemd.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        daemon.stop()
        while (said := systemd.recv(1000)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
    assert daemon.end()[0] == 0


def test_notify_without_systemd() -> None:
    assert not notify("READY=1", env={})
    assert not notify("READY=1", env={"NOTIFY_SOCKET": "nonsense"})
    assert not notify("READY=1", env={"NOTIFY_SOCKET": "/nobody/listens/here"})
    assert watchdog_seconds({}) == 0
    assert watchdog_seconds({"WATCHDOG_USEC": "soon"}) == 0
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, pid=2) == 0
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "2"}, pid=2) == 3


def test_a_port_in_use_and_a_name_that_is_none() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            Daemon("toy", port=taken.getsockname()[1]).bind()
    with pytest.raises(ConfigError, match="cannot listen"):
        Daemon("toy", host="256.256.256.256").bind()


def test_an_address_file_may_hold_anything(tmp_path: Path) -> None:
    file = tmp_path / "address"
    assert read_address(file) is None
    for body in (b"", b"\xff", b"{}", b"[]", b'{"url": 5}'):
        file.write_bytes(body)
        assert read_address(file) is None
