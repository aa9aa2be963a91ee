"""API keys: their files, scopes, the end of an answer with that of its key, and requests and tokens a minute."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from ctxreuse.daemon.access import Access
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.keys import Keys, given_key
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware, spend
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.rates import Bucket, KeyRates
from ctxreuse.errors import ConfigError
from ctxreuse.metrics import Metrics
from support.waiting import patient, until


class Time:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute() -> None:
    time = Time()
    rates = KeyRates(2, 0, time)
    rates.begin()
    rates.begin()
    assert dict(rates.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    with pytest.raises(ApiError, match="2 requests a minute") as early:
        rates.begin()
    assert (early.value.status, early.value.retry_after, early.value.code) == (429, 30, "rate_limit_exceeded")
    time.now += 29.9
    with pytest.raises(ApiError):
        rates.begin()
    time.now += 0.2  # those that are refused cost nothing
    rates.begin()
    time.now += 3600
    assert dict(rates.headers()) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"0s",
    }


def test_tokens_a_minute_are_taken_when_they_are_known() -> None:
    time = Time()
    rates = KeyRates(0, 600, time)
    rates.begin()
    rates.begin()  # beside the first, whose tokens are not known yet
    rates.spend(500)
    rates.spend(400)
    with pytest.raises(ApiError, match="600 tokens a minute: try again in 31s") as early:
        rates.begin()
    assert (early.value.type, early.value.retry_after) == ("tokens", 31)
    assert dict(rates.headers())[b"x-ratelimit-reset-tokens"] == b"1m30s"
    time.now += 31
    rates.begin()
    free = KeyRates(0, 0, time)
    free.begin()
    free.spend(10**9)
    free.begin()
    assert list(free.headers()) == []


@settings(max_examples=30)
@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3000)), max_size=40))
def test_no_more_is_taken_than_the_limit_allows(limit: int, steps: list[tuple[float, int]]) -> None:
    time = Time(0.0)
    bucket, taken, last = Bucket(limit, time), 0, 0
    for wait, amount in steps:
        time.now += wait
        if not bucket.wait(1.0):
            bucket.take(amount)
            taken, last = taken + amount, amount
        bucket.check()
        # What was taken before the last, which may overdraw.
        assert taken - last <= limit + time.now * limit / 60 + 1e-6
    time.now += bucket.wait(1.0) + 1e-6
    assert not bucket.wait(1.0)


def test_a_file_of_keys_with_scopes_and_an_expiry(tmp_path: Path) -> None:
    time, file = Time(), KeyFile(tmp_path / "keys.json")
    short = file.add("laptop", lasts=60.0, clock=time)
    scraper = file.add("prometheus", ("metrics",), clock=time)
    keys = Keys.from_setting(str(file.path), clock=time)
    assert keys is not None
    found = keys.find(short)
    assert found is not None
    assert (found.tenant, found.scopes, found.expires) == ("laptop", ("answers",), 1060.0)
    assert keys.guard("metrics")
    assert not keys.guard("admin")
    time.now = 1059.9
    assert keys.find(short) is not None
    time.now = 1060.0
    assert keys.find(short) is None
    assert keys.find(scraper) is not None
    assert not keys.refresh()
    file.revoke("prometheus")
    file.revoke("laptop")
    assert keys.refresh()
    assert [keys.find(one) for one in (short, scraper, "", "x" * 600, "ключ")] == [None] * 5
    for broken in (b"{", b'{"version": 1, "secret": "", "keys": [{"tenant": "x", "sha256": "0", "scopes": ["all"]}]}'):
        file.path.write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be read"):
            keys.refresh()
    keys.check()


def test_keys_in_lines_may_ask_and_see_the_state(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo # that of the other\n")
    file.chmod(0o600)
    keys = Keys.from_setting(str(file))
    assert keys is not None
    one, two = keys.find("one"), keys.find("two")
    assert one is not None
    assert two is not None
    assert one.tenant.startswith("key-")
    assert "one" not in one.tenant
    assert one.tenant != two.tenant
    assert set(one.scopes) == {"answers", "status"}
    file.write_text("two\n")
    assert keys.refresh()
    assert [keys.find("one"), keys.find("two")] == [None, two]
    file.write_text("# none\n")
    assert keys.refresh(), "emptied, it revokes all"
    assert keys.find("two") is None
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        keys.refresh()
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.from_setting(str(file))
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        Keys.from_setting(str(file))
    file.write_text("one\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="lines of keys go into another"):
        KeyFile(file).add("laptop")
    assert Keys.from_setting("") is None


def test_where_a_request_has_its_key() -> None:
    assert given_key([(b"authorization", b"Bearer a b "), (b"x-api-key", b"c")]) == "a b"
    assert given_key([(b"x-api-key", b" c "), (b"authorization", b"Basic a")]) == "c"
    assert given_key([(b"x", b"y")]) == ""


class Served:
    """A daemon with a file of keys; what it streams is what the test says."""

    def __init__(self, file: KeyFile) -> None:
        keys = Keys.from_setting(str(file.path))
        assert keys is not None
        self.keys = keys
        self.begun, self.cancelled = 0, 0

        async def hello(request: Request) -> Response:
            spend(request.scope, 100)
            return JSONResponse({"hello": 1})

        async def endless(request: Request) -> Response:
            media = request.query_params["media"]

            async def every() -> AsyncIterator[bytes]:
                yield b'data: {"n": 1}\n\n'
                self.begun += 1
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise

            return StreamingResponse(every(), media_type=media)

        async def slow(_: Request) -> Response:
            self.begun += 1
            await asyncio.Event().wait()
            raise AssertionError

        paths = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")
        routes = [Route(path, endless, methods=["POST"]) for path in paths]
        routes += [Route(path, hello) for path in ("/v1/models", "/metrics", "/api/status", "/api/why", "/healthz")]
        routes.append(Route("/slow", slow))
        access = Access(keys=keys)
        app = ApiMiddleware(Router(routes), metrics=Metrics(), route=str, access=access)
        self.daemon = Daemon("test", drain=0)
        self.daemon.reloaded.append(keys)
        self.url = self.daemon.bind()
        self.thread = threading.Thread(target=self.daemon.run, args=(app, nullcontext))
        self.thread.start()

    def http(self, key: str, header: str = "authorization") -> httpx.Client:
        headers = {header: f"Bearer {key}" if header == "authorization" else key}
        return httpx.Client(base_url=self.url, headers=headers, timeout=patient(5))


@contextmanager
def running(file: KeyFile) -> Iterator[Served]:
    served = Served(file)
    try:
        yield served
    finally:
        served.daemon.stop()
        served.thread.join(patient(20))
        assert not served.thread.is_alive()


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def test_what_each_scope_opens(file: KeyFile) -> None:
    names = ("answers", "status", "metrics", "admin")
    keys = {name: file.add(name, (name,)) for name in names}  # type: ignore[arg-type]
    opened = {}
    with running(file) as served:
        for name, key in keys.items():
            for header in ("authorization", "x-api-key"):
                with served.http(key, header) as http:
                    paths = ("/v1/models", "/api/status", "/api/why", "/metrics")
                    opened[name] = [http.get(path).status_code for path in paths]
        bare = [httpx.get(served.url + path).status_code for path in ("/v1/models", "/metrics", "/healthz")]
    assert opened == {
        "answers": [200, 403, 200, 403],
        "status": [403, 200, 403, 403],
        "metrics": [403, 403, 403, 200],
        "admin": [403, 200, 200, 200],
    }
    assert bare == [401, 401, 200]


def test_metrics_are_open_as_long_as_no_key_is_for_them(file: KeyFile) -> None:
    file.add("one")
    with running(file) as served:
        assert httpx.get(served.url + "/metrics").status_code == 200
        file.add("prometheus", ("metrics",))
        until(lambda: httpx.get(served.url + "/metrics").status_code == 401)


EVENTS, LINES = "text/event-stream", "application/x-ndjson"


@pytest.mark.parametrize(
    ("path", "media"),
    [*((f"/v1/{name}", EVENTS) for name in ("chat/completions", "messages", "responses")), ("/api/chat", LINES)],
)
def test_a_key_that_is_revoked_ends_its_streams_and_no_others(
    file: KeyFile, path: str, media: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gone, stays = file.add("gone"), file.add("stays")
    with running(file) as served, served.http(gone) as one, served.http(stays) as other:
        place = f"{path}?media={media}"
        with one.stream("POST", place) as ending, other.stream("POST", place) as going:
            lines, others = ending.iter_lines(), going.iter_lines()
            assert next(lines) == next(others) == 'data: {"n": 1}'
            until(lambda: served.begun == 2)
            file.revoke("gone")
            rest = [line for line in lines if line]  # ends as a whole answer does, not by a cut
            assert served.cancelled == 1
            assert one.get("/v1/models").status_code == 401
            assert other.get("/v1/models").status_code == 200
            assert served.cancelled == 1
    last = json.loads(rest[-1].removeprefix("data: "))
    said = "the API key was revoked or has expired"
    if media != EVENTS:
        assert last == {"error": said}
    else:
        assert last["error"]["message"] == said
        assert last["error"]["type"] == "authentication_error"
        typed = "chat" not in path
        assert (last.get("type"), rest[0] == "event: error") == ("error" if typed else None, typed)
    assert "Traceback" not in caplog.text
    assert gone not in caplog.text
    assert any(getattr(record, "key", "") == "gone" for record in caplog.records)


def test_a_key_that_expires_ends_what_is_not_a_stream(file: KeyFile) -> None:
    time = Time()
    key = file.add("short", lasts=10, clock=time)
    with running(file) as served, served.http(key) as http:
        served.keys._clock = time
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(http.get("/slow").status_code))
        asking.start()
        until(lambda: served.begun == 1)
        with http.stream("POST", "/v1/chat/completions?media=application/json") as answer:
            pieces = answer.iter_raw()
            next(pieces)
            time.now += 11
            with pytest.raises(httpx.RemoteProtocolError):  # cut: nothing else shows that it is not whole
                list(pieces)
        asking.join(patient(10))
        assert answers == [401]
        assert http.get("/v1/models").status_code == 401


def test_too_many_requests_and_tokens_of_a_key(file: KeyFile) -> None:
    few, little, free = file.add("few", requests=2), file.add("little", tokens=150), file.add("free")
    with running(file) as served:
        with served.http(few) as http:
            answers = [http.get("/v1/models") for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
            assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
            assert 1 <= int(answers[2].headers["retry-after"]) <= 30
            error = answers[2].json()["error"]
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        with served.http(little) as http:
            answers = [http.get("/v1/models") for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert answers[0].headers["x-ratelimit-remaining-tokens"] == "50"
            assert answers[2].json()["error"]["type"] == "tokens"
        with served.http(free) as http:
            answers = [http.get("/v1/models") for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 5
            assert not [name for name in answers[0].headers if "ratelimit" in name]


def test_the_file_has_no_key(file: KeyFile) -> None:
    key = file.add("laptop", ("answers", "metrics"), lasts=3600, requests=60, tokens=1000)
    text = file.path.read_text()
    assert key not in text
    assert key.removeprefix("ctxr-") not in text
    row = msgspec.json.decode(text)["keys"][0]
    assert set(row) == {"tenant", "sha256", "created", "scopes", "expires", "requests", "tokens"}
