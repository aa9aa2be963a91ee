"""The sidecar in front of backends that say what they have: requests go there, and where it is not known, by texts."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from ctxreuse_cloud.proxy.backends import Backends
from ctxreuse_cloud.proxy.kv_events import subscribe

from ctxreuse.config import BackendConfig
from ctxreuse.errors import ConfigError
from ctxreuse.routing import Router
from support.scripted import RunningProxy, Scripted, fronted
from support.waiting import async_until, patient

from .test_proxy import run

SIZE = 16


def tokens(body: Any) -> list[int]:
    """A tokenizer: a token for each byte."""
    return list("".join(one["content"] for one in body["messages"]).encode()) if "messages" in body else []


class Publishing(Scripted):
    """A backend that publishes what it has."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tokenize = tokens
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind("tcp://127.0.0.1:*")
        self.events = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.number, self._time = 0, 0.0

    def publish(self, *events: Any) -> None:
        self._time += 1
        data = msgspec.msgpack.encode([self._time, list(events), 0])
        self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), data])
        self.number += 1

    def stores(self, text: str, salt: str = "") -> None:
        """Publish the blocks of a text."""
        ids = list(text.encode())
        ids = ids[: len(ids) // SIZE * SIZE]
        names = [f"{salt}{ids[: at + SIZE]}".encode() for at in range(0, len(ids), SIZE)]
        extra = [[salt] if salt and at == 0 else None for at in range(len(names))]
        self.publish(stored_event(names, ids, extra))

    def end(self) -> None:
        self._context.destroy(0)


def stored_event(names: list[bytes], ids: list[int], extra: list[Any]) -> dict[str, Any]:
    """As vLLM has it."""
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": ids, "block_size": SIZE,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": extra,
    }  # fmt: skip


RULES = "You are the clerk of a harbour office. " * 50


async def subscribed(*backends: Publishing, source: Callable[[str], str]) -> None:
    """Publish until it arrives: what comes before a subscription is lost."""
    for backend in backends:

        def arrived(backend: Publishing = backend) -> bool:
            backend.number = 0
            backend.publish(["AllBlocksCleared"])
            return source(backend.name) == "events"

        await async_until(arrived)
        backend.number = 1
        backend.publish(["AllBlocksCleared"])


@contextlib.asynccontextmanager
async def publishing(**settings: Any) -> AsyncIterator[tuple[RunningProxy, Publishing, Publishing]]:
    """The proxy in front of two backends that publish."""
    async with Publishing("a") as a, Publishing("b") as b:
        rows = [BackendConfig(url=one.url, name=one.name, kv_events=one.events, **settings) for one in (a, b)]
        async with fronted(a, b, rows=rows) as front:
            found = [(backend.config, backend.events) for backend in front.backends.all]
            subscribers = [subscribe(config, events) for config, events in found if events is not None]
            sources = {backend.name: backend for backend in front.backends.all}
            await subscribed(a, b, source=lambda name: sources[name].source)
            try:
                yield front, a, b
            finally:
                for subscriber in subscribers:
                    await asyncio.to_thread(subscriber.close)
                a.end()
                b.end()


async def asked(front: RunningProxy, text: str) -> Any:
    """What `why` says of a request."""
    status, _, headers = await front.ask(messages=[{"role": "user", "content": text}])
    assert status == 200
    found = front.proxy.observers.requests.explain(headers["x-request-id"], None)
    assert found is not None
    return found


def blocks(front: RunningProxy, name: str) -> float:
    return front.count("ctxreuse_router_blocks", backend=name)


def source(front: RunningProxy, name: str) -> str:
    (found,) = (
        one for one in ("events", "both", "text") if front.count("ctxreuse_router_source", backend=name, source=one)
    )
    return found


def test_a_request_goes_where_its_tokens_are() -> None:
    """Even if nothing of it was ever sent through this proxy; and nowhere else after they left."""

    async def test() -> None:
        async with publishing() as (front, a, b):
            for backend, other in ((a, b), (b, a)):
                text = f"{backend.name} " + RULES
                backend.stores(text)
                await async_until(lambda backend=backend: blocks(front, backend.name) > 100)
                found = await asked(front, text + "What now?")
                assert found.backend == backend.name
                assert f"{len(text) // SIZE * SIZE:,} of {len(text) + 9:,} tokens there by its KV events" in found.text
                backend.publish({"type": "AllBlocksCleared"})
                other.stores(text)
                await async_until(
                    lambda other=other, backend=backend: blocks(front, other.name) > 100 > blocks(front, backend.name)
                )
                assert (await asked(front, text + "What now?")).backend == other.name
                other.publish({"type": "AllBlocksCleared"})
                await async_until(lambda other=other: blocks(front, other.name) == 0)
            assert (source(front, "a"), source(front, "b")) == ("events", "events")

    run(test)


def test_what_is_lost_leaves_texts_to_go_by() -> None:
    async def test() -> None:
        async with publishing() as (front, a, b):
            first = (await asked(front, RULES + "One?")).backend
            a.number += 5
            a.publish()
            await async_until(lambda: source(front, "a") == "both")
            assert front.count("ctxreuse_router_lost_batches", backend="a") == 5
            b.end()
            await async_until(lambda: source(front, "b") == "text")
            text = (await asked(front, RULES + "Two?")).text
            found = re.search(rf"\b{first}[:,] [^;]*about ([\d,]+) of ([\d,]+) tokens known there", text)
            assert found is not None, text
            known, total = (int(number.replace(",", "")) for number in found.groups())
            assert total == len(RULES) + 4, "counted by its tokenizer"
            assert known > 0.5 * total, f"its first run is known by its text: {text}"

    run(test)


def test_without_token_ids_it_goes_by_texts() -> None:
    async def test() -> None:
        async with publishing() as (front, a, b):
            a.tokenize = b.tokenize = None
            a.plan = b.plan = [404, "stream"]  # one list: whichever is asked for tokens
            assert "tokens known there" in (await asked(front, RULES)).text
            before = len(a.seen) + len(b.seen)
            assert before == 2
            for n in range(3):
                await asked(front, RULES + f"Question {n}?")
            # The other one was asked, which answers with a stream; then none is for a while.
            assert len(a.seen) + len(b.seen) == before + 4

    run(test)


def test_tenants_with_equal_prompts_have_nothing_of_each_other() -> None:
    """The salt that a backend gets is in its events; a prompt is compared with its own."""

    async def test() -> None:
        async with publishing(cache_salt=True) as (front, a, _):
            a.stores(RULES, salt="another tenant's")
            await async_until(lambda: blocks(front, "a") > 100)
            found = await asked(front, RULES)
            assert f"0 of {len(RULES):,} tokens there by its KV events" in found.text
            assert f"{len(RULES) // SIZE * SIZE:,} of" not in found.text

    run(test)


def test_token_ids_of_a_request_are_compared_as_they_are() -> None:
    async def test() -> None:
        async with publishing() as (front, a, b):
            a.tokenize = b.tokenize = None
            b.stores(RULES)
            await async_until(lambda: blocks(front, "b") > 100)
            for _ in range(3):
                ids = list(RULES.encode())
                status, _, headers = await front.ask("/v1/completions", prompt=ids, messages=None)
                assert status == 200
                found = front.proxy.observers.requests.explain(headers["x-request-id"], None)
                assert found is not None
                assert found.backend == "b"

    run(test)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (({"kv_events": "tcp://h:1"}, {"kv_events": "tcp://h:1"}), "the same kv_events"),
        (({"kv_replay": "tcp://h:1"}, {}), "without kv_events"),
        (({"kv_events": "@tcp://*:5557"}, {}), "on this machine only"),
        (({"kv_events": "@tcp://0.0.0.0:5557"}, {}), "on this machine only"),
    ],
)
def test_settings_that_cannot_be(rows: tuple[dict[str, str], ...], message: str) -> None:
    configs = [BackendConfig(url=f"http://127.0.0.1:{n}", **row) for n, row in enumerate(rows, 1)]
    with pytest.raises(ConfigError, match=message):
        Backends(configs, router=Router())


def test_the_sidecar_follows_what_its_settings_name(sidecar: Callable[..., Any], tmp_path: Path) -> None:
    async def test() -> None:
        async with Publishing("a") as a, Publishing("b") as b:
            rows = "".join(
                f'[[cloud.backends]]\nname = "{one.name}"\nurl = "{one.url}"\nkv_events = "{one.events}"\n'
                for one in (a, b)
            )
            (tmp_path / "settings.toml").write_text(rows)
            running = await asyncio.to_thread(
                sidecar, "--workers", "0", CTXREUSE_CONFIG=str(tmp_path / "settings.toml")
            )

            def status(name: str) -> Any:
                return next(one for one in running.status()["backends"] if one["name"] == name)

            for one in (a, b):
                while (await asyncio.to_thread(status, one.name))["source"] != "events":
                    one.number = 0
                    one.publish(["AllBlocksCleared"])
                    await asyncio.sleep(0.02)
                one.number = 1
                one.publish()
            b.stores(RULES)
            while (await asyncio.to_thread(status, "b"))["blocks"] < 100:
                await asyncio.sleep(0.02)
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": RULES}]}
            async with aiohttp.ClientSession(running.url) as client:
                async with client.post("/v1/chat/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
                    name = response.headers["x-request-id"]
                async with client.get(f"/api/why/{name}") as response:
                    found = await response.json()
                assert "It went to b" in found["text"]
                assert "by its KV events" in found["text"]
                async with client.get("/metrics") as response:
                    assert 'ctxreuse_router_source{backend="b",source="events"} 1.0' in await response.text()
            assert await asyncio.to_thread(running.stop) == 0
            a.end()
            b.end()

    asyncio.run(asyncio.wait_for(test(), patient(30)))
