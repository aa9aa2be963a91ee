"""What the SDKs of OpenAI and Anthropic make of a daemon that refuses them for now, or for good."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from ctxreuse.daemon.access import Access
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.keys import Keys
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.metrics import Metrics
from support.waiting import patient, until

pytestmark = [pytest.mark.clients, pytest.mark.daemon]

CHUNK = b'data: {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}\n\n'
ASKING = """
import sys, {sdk}
client = {sdk}.{name}(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=2)
for _ in range(21):
    client.models.list()
print("all answered")
"""
STREAMING = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
try:
    for chunk in client.chat.completions.create(model="m", messages=[], stream=True):
        print("chunk", flush=True)
except openai.APIError as error:
    print("error:", error.message)
"""


class Refusing:
    """A daemon with keys, without an engine."""

    def __init__(self, file: KeyFile) -> None:
        self.statuses: list[int] = []
        self.begun = 0
        keys = Keys.from_setting(str(file.path))
        assert keys is not None
        self.keys = keys

        async def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [], "has_more": False})

        async def chat(_: Request) -> Response:
            async def every() -> AsyncIterator[bytes]:
                yield CHUNK
                self.begun += 1
                await asyncio.Event().wait()

            return StreamingResponse(every(), media_type="text/event-stream")

        routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
        inner = ApiMiddleware(Router(routes), metrics=Metrics(), route=str, access=Access(keys=keys))

        async def app(scope: dict[str, object], receive: object, send: object) -> None:
            async def noted(message: dict[str, object]) -> None:
                if message["type"] == "http.response.start":
                    self.statuses.append(int(str(message["status"])))
                await send(message)  # type: ignore[operator]

            await inner(scope, receive, noted)  # type: ignore[arg-type]

        self.daemon = Daemon("test", drain=0)
        self.daemon.reloaded.append(keys)
        self.url = self.daemon.bind()
        self.thread = threading.Thread(target=self.daemon.run, args=(app, nullcontext))
        self.thread.start()


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
def daemon(file: KeyFile) -> Iterator[Refusing]:
    file.add("first")
    found = Refusing(file)
    yield found
    found.daemon.stop()
    found.thread.join(patient(20))
    assert not found.thread.is_alive()


def client(program: str, *arguments: str) -> subprocess.Popen[str]:
    python = str(Path(os.environ["CLIENTS"]) / "bin" / "python")
    command = [python, "-W", "ignore", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("sdk", "name", "path"), [("openai", "OpenAI", "/v1"), ("anthropic", "Anthropic", "")])
def test_a_client_waits_as_long_as_it_is_asked_to(
    daemon: Refusing, file: KeyFile, sdk: str, name: str, path: str
) -> None:
    key = file.add("limited", requests=20)  # 20 at once, then one each three seconds
    until(lambda: daemon.keys.find(key))
    asking = client(ASKING.format(sdk=sdk, name=name), daemon.url + path, key)
    out, err = asking.communicate(timeout=patient(60))
    assert out == "all answered\n", err
    refused = [status for status in daemon.statuses if status == 429]
    assert len(refused) in (1, 2)
    assert daemon.statuses.count(200) == 21


def test_a_revoked_key_is_an_error_of_the_client(daemon: Refusing, file: KeyFile) -> None:
    key = file.add("gone")
    until(lambda: daemon.keys.find(key))
    streaming = client(STREAMING, f"{daemon.url}/v1", key)
    until(lambda: daemon.begun == 1 or streaming.poll() is not None, 60)
    file.revoke("gone")
    out, err = streaming.communicate(timeout=patient(60))
    assert out == "chunk\nerror: the API key was revoked or has expired\n", err
