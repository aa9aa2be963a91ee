"""The sidecar in front of several backends: which one gets a request, over real sockets, and what `why` says of it."""

from __future__ import annotations

import asyncio
from typing import Any

from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.routes import describe, request_runs

from ctxreuse.routing import Router
from support.scripted import RunningProxy, Scripted, fronted
from support.waiting import async_until

from .test_proxy import run

RULES = "You are the clerk of a harbour office. " * 200


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "system" if n == 0 else ("assistant", "user")[n % 2], "content": t} for n, t in enumerate(texts)]


async def asked(front: RunningProxy, *texts: str) -> str:
    """The name of the backend that answered."""
    status, _, headers = await front.ask(messages=messages(*texts))
    assert status == 200
    found = front.proxy.observers.requests.explain(headers["x-request-id"], None)
    assert found is not None
    assert f"It went to {found.backend}, " in found.text
    return found.backend


async def settled(front: RunningProxy, a: Scripted, b: Scripted) -> tuple[Scripted, Scripted]:
    """Ask once; the backend that answered, which has the rules now, and the other one."""
    return (a, b) if await asked(front, RULES, "Hello.") == a.name else (b, a)


def test_a_conversation_goes_where_its_beginning_is() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            for talk in range(6):
                texts = [RULES + str(talk), "Hello."]
                first = await asked(front, *texts)
                for turn in range(3):
                    texts += ["Yes?", f"Question {turn}?"]
                    assert await asked(front, *texts) == first
            router = front.backends.router
            assert router is not None
            router.check()

    run(test)


def test_a_shared_beginning_is_computed_elsewhere_when_its_backend_is_busy() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            busy, other = await settled(front, a, b)
            busy.steps = asyncio.Semaphore(0)  # answers do not begin
            waiting = [asyncio.create_task(asked(front, RULES, f"Question {n}?")) for n in range(3)]
            await async_until(lambda: busy.open > 0)
            router = front.backends.router
            assert router is not None
            await async_until(lambda: router.load(busy.name).queue(front.backends._clock()) > 1)
            assert await asked(front, RULES, "And I?") == other.name
            assert busy.open > 0, "it was not sent there first"
            for _ in range(100):
                busy.steps.release()
            await asyncio.gather(*waiting)

    run(test)


def test_new_conversations_are_spread() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, Scripted("c") as c, fronted(a, b, c) as front:
            for n in range(40):
                await front.ask(messages=messages(f"You are clerk {n}. " * 4, "Hello."))
            # On a busy machine one may seem slow, and is left alone for some minutes.
            assert sum(len(server.seen) > 2 for server in (a, b, c)) >= 2

    run(test)


def test_a_backend_that_failed_has_nothing() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            failing, other = await settled(front, a, b)
            failing.plan = ["drop"]
            assert await asked(front, RULES, "Again?") == other.name
            router = front.backends.router
            assert router is not None
            router.check()
            assert len(router.known(other.name)) > 0
            assert all(router.load(name).waiting == 0 for name in ("a", "b"))

    run(test)


def test_affinity_sends_one_beginning_to_one_backend() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b, router="affinity") as front:
            for n in range(6):
                await front.ask(messages=messages(RULES, f"Question {n}?"))
            assert sorted((len(a.seen), len(b.seen))) == [0, 6]

    run(test)


def test_runs_of_a_request() -> None:
    def runs(tenant: str, model: str, *texts: str) -> Any:
        body = f'{{"model": "{model}", "messages": ['
        body += ", ".join(f'{{"role": "user", "content": "{text}"}}' for text in texts) + "]}"
        return request_runs(tenant, model, parse_request(body.encode(), tenant).messages())

    long, short = runs("t", "m", "a" * 5000, "b"), runs("t", "m", "a" * 5000)
    assert long[: len(short)] == short
    assert len(short) == 5
    assert sum(run.tokens for run in short) == -(-(5000 + len('{"role": "user", "content": ""}')) // 4)
    assert not {run.key for run in long} & {run.key for run in runs("u", "m", "a" * 5000, "b")}
    assert not {run.key for run in long} & {run.key for run in runs("t", "n", "a" * 5000, "b")}
    assert len(runs("t", "m", "x" * 4_000_000)) < 600


def test_a_route_in_words() -> None:
    router = Router()
    runs = request_runs("t", "m", [("user", b"x" * 4000)])
    router.begin(router.choose(runs, ("a",), 0.0), runs, 0.0)
    text = describe(router.choose(runs, ("a", "b", "c", "d", "e"), 0.0))
    assert text.startswith("It went to ")
    assert "about 1,000 of 1,000 tokens known there" in text
    assert text.endswith("; and 1 more.")
