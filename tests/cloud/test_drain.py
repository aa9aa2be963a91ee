"""A backend that is drained: no new sessions go there, those that it has go on, and what is asked for it says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from ctxreuse_cloud.cli import main

from ctxreuse.daemon.client import Client
from ctxreuse.errors import CtxReuseError
from support.scripted import Scripted, fronted
from support.sidecar import Sidecar
from support.waiting import patient

from .test_proxy import run
from .test_router import asked

RULES = "You are the clerk of a harbour office. " * 30


def test_sessions_go_on_and_new_ones_go_elsewhere() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            talk = [RULES, "A long question. " * 1000]
            drained = front.backends.find(await asked(front, *talk))
            assert drained is not None
            drained.takes = "sessions"
            other = "b" if drained.name == "a" else "a"
            assert front.count("ctxreuse_proxy_backend_takes", backend=drained.name, takes="sessions") == 1
            for turn in range(3):
                assert await asked(front, RULES, f"Something else {turn}") == other, "only the rules are there"
                talk += ["Yes?", f"Question {turn}?"]
                assert await asked(front, *talk) == drained.name
            drained.takes = "nothing"
            talk += ["Yes?", "And now?"]
            assert await asked(front, *talk) == other
            drained.takes = "all"
            assert front.count("ctxreuse_proxy_backend_takes", backend=drained.name, takes="all") == 1

    run(test)


def test_a_drained_backend_is_better_than_none() -> None:
    """Unless it takes nothing."""

    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            one, two = front.backends.all
            one.takes, two.healthy = "sessions", False
            assert await asked(front, RULES, "Hello.") == "a"
            one.takes = "nothing"
            status, body, headers = await front.ask()
            assert (status, "retry-after" in headers) == (503, True), body
            assert not front.backends.healthy

    run(test)


def test_of_its_failure_a_session_is_answered_elsewhere() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            talk = [RULES, "Hello."]
            name = await asked(front, *talk)
            broken, other = (a, b) if name == "a" else (b, a)
            drained = front.backends.find(name)
            assert drained is not None
            drained.takes = "sessions"
            broken.plan += [500, 500]
            assert await asked(front, *talk, "Yes?", "More?") == other.name

    run(test)


@pytest.mark.daemon
def test_the_command(
    sidecar: Callable[..., Sidecar], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the real process: drain, what status and metrics say, and back; wrong names are named."""
    monkeypatch.setenv("COLUMNS", "200")

    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b:
            rows = [{"url": a.url, "name": "a"}, {"url": b.url, "name": "b"}]
            running = await asyncio.to_thread(sidecar, CTXREUSE_CLOUD__BACKENDS=json.dumps(rows))
            client = Client(running.url)

            def call(*args: str) -> str:
                with pytest.raises(SystemExit) as end:
                    main([*args, "--url", running.url])
                assert not end.value.code
                return capsys.readouterr().out

            def steps() -> None:
                assert "takes only sessions that it has, 0 running" in call("drain", "a", "--wait")
                assert [one["takes"] for one in running.status()["backends"]] == ["sessions", "all"]
                assert "takes only sessions that it has" in call("status")
                assert json.loads(call("drain", "a", "--now", "--json"))["takes"] == "nothing"
                assert json.loads(call("drain", "b", "--now", "--json"))["takes"] == "nothing"
                assert running.status()["state"] == "no healthy backend"
                for name in "ab":
                    assert "takes all" in call("undrain", name)
                for path, said in (
                    ("c/all", "no backend 'c'; known: a, b"),
                    ("a/some", "takes all, sessions, nothing"),
                ):
                    with pytest.raises(CtxReuseError, match=said):
                        client.call("POST", f"/api/backends/{path}")

            await asyncio.to_thread(steps)

    asyncio.run(asyncio.wait_for(test(), patient(60)))
