"""The backends: their state, which one gets a request, and the pool of connections to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import aiohttp
import msgspec
import xxhash

from ctxreuse.config import BackendConfig
from ctxreuse.errors import ConfigError
from ctxreuse.private import warn_if_shared
from ctxreuse.routing import PrefixRun, PromptTokens, Route, Router
from ctxreuse_cloud.proxy.breaker import Breaker
from ctxreuse_cloud.proxy.kv_events import BackendEvents, check_events

__all__ = ["TAKES", "Backend", "BackendStatus", "Backends", "Takes", "choose", "connections"]

#: What a backend is sent: ``all``; ``sessions``: of chats only those that go on and were there before, and others where
#: no other backend is ready; ``nothing``: what runs ends, and what it has stored is still asked for there.
Takes: TypeAlias = Literal["all", "sessions", "nothing"]
TAKES: Final[tuple[Takes, ...]] = get_args(Takes)

#: Load relative to the mean above which contexts go elsewhere, and requests that never are too many: a few more in a
#: batch cost an engine little, a lost prefix costs seconds.
_EXCESS, _ALWAYS = 1.25, 4


class BackendStatus(msgspec.Struct, frozen=True):
    """State of one backend, for ``status``; ``healthy`` is None until the first check."""

    name: str
    url: str
    healthy: bool | None
    breaker: str
    outstanding: int
    requests: int
    failures: int
    models: tuple[str, ...]
    error: str
    #: By what it is known what it has cached, and blocks by its events.
    source: str
    blocks: int
    #: What it is sent: `Takes`.
    takes: Takes = "all"


class Backend:
    """One backend; for one event loop."""

    def __init__(self, config: BackendConfig, clock: Callable[[], float] = time.monotonic) -> None:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{config.url!r} is not the address of a backend", fix="Write it as http://127.0.0.1:8000"
            )
        if parts.username is not None or parts.password is not None:
            # The URL appears in status, logs and errors.
            raise ConfigError("a backend's URL must hold no password", fix="Put its key in a file: api_key_file")
        self.config = config
        self.url = config.url.rstrip("/").removesuffix("/v1")
        self.name = config.name or parts.netloc
        self.key = _read_key(config.api_key_file)
        self.breaker = Breaker()
        self.healthy: bool | None = None
        self.error = ""
        self.models: tuple[str, ...] = ()
        self.outstanding = self.requests = self.failures = 0
        self.clock = clock
        self.takes: Takes = "all"
        #: What it says of its cache; None: nothing.
        self.events = BackendEvents(self.name) if config.kv_events else None

    @property
    def source(self) -> str:
        """By what it is known what it has cached: ``events``, ``both`` or ``text``."""
        return self.events.source if self.events is not None else "text"

    def ready(self) -> bool:
        """Return True if it may take a request now: not unhealthy, breaker closed, not full."""
        full = self.config.max_inflight and self.outstanding >= self.config.max_inflight
        return self.healthy is not False and not full and self.breaker.allows(self.clock())

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request from its start to the last byte of its answer."""
        self.breaker.begin(self.clock())
        self.outstanding += 1
        self.requests += 1
        try:
            yield
        finally:
            self.outstanding -= 1
            self.breaker.gave_up()

    def succeeded(self) -> None:
        """Note that it answered."""
        self.breaker.succeeded()

    def failed(self) -> None:
        """Note that it did not answer, or broke off."""
        self.failures += 1
        self.breaker.failed(self.clock())

    def status(self) -> BackendStatus:
        """Return its state."""
        state = self.breaker.state(self.clock())
        counts = (self.outstanding, self.requests, self.failures)
        blocks = self.events.blocks if self.events is not None else 0
        return BackendStatus(
            self.name,
            self.url,
            self.healthy,
            state,
            *counts,
            self.models,
            self.error,
            self.source,
            blocks,
            self.takes,
        )


def _read_key(file: str) -> str:
    if not file:
        return ""
    place = Path(file).expanduser()
    warn_if_shared(place, "the API key in")
    try:
        key = place.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file cannot be read: {error}", where=file) from None
    if not key or not key.isprintable():
        raise ConfigError("an API key file must contain one printable line", where=file)
    return key


class Backends:
    """All backends, in the order of the settings. Raises ConfigError if two have one name.

    ``router``: prices them for requests of known runs; None: a context always goes to the same one.
    """

    def __init__(
        self,
        configs: Sequence[BackendConfig],
        clock: Callable[[], float] = time.monotonic,
        router: Router | None = None,
    ) -> None:
        check_events(configs)
        self.all = tuple(Backend(config, clock) for config in configs)
        self.router, self._clock = router, clock
        names = [backend.name for backend in self.all]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two backends are called {name!r}", fix="Give each its own name")

    def listing(self, model: str) -> Sequence[Backend]:
        """Return the backends that list a model; all, if none does."""
        return [backend for backend in self.all if model in backend.models] or self.all

    @property
    def draining(self) -> bool:
        """True if not every backend takes all."""
        return any(backend.takes != "all" for backend in self.all)

    def find(self, name: str) -> Backend | None:
        """Return the backend of a name."""
        return next((backend for backend in self.all if backend.name == name), None)

    def choose(
        self,
        model: str,
        context: bytes,
        tried: Sequence[Backend] = (),
        runs: Sequence[PrefixRun] = (),
        prompt: PromptTokens | None = None,
        earlier: Sequence[PrefixRun] = (),
    ) -> tuple[Backend, Route | None] | None:
        """Choose a backend for a request, and say why: if possible one not ``tried`` yet, and one that lists ``model``.

        Servers of one model often accept any name, so a model that none lists goes to all. ``prompt``: its tokens, for
        those that say what they have. ``earlier``: the runs of its chat's request before this one, for backends that
        take only sessions. Pure.
        """
        listing = [backend for backend in self.listing(model) if backend.takes != "nothing"]
        open_ = [backend for backend in listing if backend.takes == "all" or self._has(backend, earlier)]
        # A new session goes where it should not rather than nowhere.
        for places in (_without(open_, tried), _without(listing, tried), open_, listing):
            if not places:
                continue
            if runs and (priced := self._cheapest(places, context, runs, prompt)) is not None:
                return priced
            place = choose(places, context, Backend.ready)
            if place is not None:
                return place, None
        return None

    def _has(self, backend: Backend, earlier: Sequence[PrefixRun]) -> bool:
        """Return True if a chat's request before this one went to a backend."""
        if self.router is None or not earlier:
            return False
        return self.router.known(backend.name).match(earlier) == sum(run.tokens for run in earlier)

    def _cheapest(
        self, places: Sequence[Backend], context: bytes, runs: Sequence[PrefixRun], prompt: PromptTokens | None
    ) -> tuple[Backend, Route] | None:
        free = {backend.name: backend for backend in places if backend.ready()}
        if self.router is None or not free:
            return None
        for backend in self.all:
            if backend.healthy is False:
                self.router.known(backend.name).clear()  # it may come back without what it had
        # Answers under way cost a prompt beside them, too, which the price does not know.
        bound = _bound(places)
        names = [name for name, backend in free.items() if backend.outstanding < bound] or list(free)
        reported = {}
        for name in names if prompt is not None else ():
            events = free[name].events
            if events is not None and prompt is not None:
                salted = prompt if free[name].config.cache_salt else msgspec.structs.replace(prompt, salt="")
                if (found := events.match(salted)) is not None:
                    reported[name] = found
        tokens = len(prompt) if prompt is not None else 0
        route = self.router.choose(runs, names, self._clock(), context, tokens=tokens, reported=reported)
        return free[route.chosen.node], route

    def begin(self, route: Route | None, runs: Sequence[PrefixRun], *, streamed: bool) -> int:
        """Note that a request is sent as chosen, for an answer that is ``streamed`` or comes whole; returns its number
        for `first_byte`, 0 without a route."""
        if self.router is None or route is None:
            return 0
        return self.router.begin(route, runs, self._clock(), silent=not streamed)

    def first_byte(self, number: int, *, streamed: bool) -> None:
        """Note that an answer began; ``streamed``: as soon as it could."""
        if self.router is not None:
            self.router.started(number, self._clock(), measured=streamed)

    def no_answer(self, number: int) -> None:
        """Note that none came. Does nothing after `first_byte`."""
        if self.router is not None:
            self.router.failed(number, self._clock())

    def wait(self) -> float:
        """Return the seconds until a backend may be ready, for ``Retry-After``."""
        return min((b.breaker.wait(b.clock()) for b in self.all if b.healthy is not False), default=5.0)

    @property
    def healthy(self) -> int:
        """Number of backends not known to be unhealthy that are sent anything."""
        return sum(backend.healthy is not False and backend.takes != "nothing" for backend in self.all)

    def models(self) -> list[tuple[str, str]]:
        """Return the models and the first backend that lists each."""
        found: dict[str, str] = {}
        for backend in self.all:
            if backend.healthy is not False:
                for model in backend.models:
                    found.setdefault(model, backend.name)
        return list(found.items())


def choose(backends: Sequence[Backend], key: bytes, room: Callable[[Backend], bool] = lambda _: True) -> Backend | None:
    """Choose the backend for the context ``key`` (empty: the least loaded one); None if none has ``room``.

    Rendezvous hashing: each key has its own order of all backends, so one that disappears takes only its own contexts
    with it, and overflow of a context always goes to the same second one. Bounded load: a backend with more than 1.25
    times the mean (and more than 4) is skipped.
    """
    free = [backend for backend in backends if room(backend)]
    if not free:
        return None
    if not key:
        return min(free, key=lambda backend: (backend.outstanding, backend.name))
    bound = _bound(backends)
    ranked = sorted(free, key=lambda backend: _score(key, backend.name), reverse=True)
    return next((backend for backend in ranked if backend.outstanding < bound), None) or min(
        ranked, key=lambda backend: backend.outstanding
    )


def _without(backends: Sequence[Backend], tried: Sequence[Backend]) -> list[Backend]:
    return [backend for backend in backends if backend not in tried]


def _bound(backends: Sequence[Backend]) -> int:
    return max(_ALWAYS, math.ceil(_EXCESS * (sum(backend.outstanding for backend in backends) + 1) / len(backends)))


def _score(key: bytes, name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), xxhash.xxh3_64_intdigest(key))


def connections(connect: float, silence: float) -> aiohttp.ClientSession:
    """Open the pool of connections to all backends, with timeouts in seconds as in the settings; close it.

    It has no limit (requests are admitted before), no cookies, and ignores proxies of the environment.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, enable_cleanup_closed=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect, sock_read=silence),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
        trust_env=False,
        read_bufsize=1 << 16,
    )
