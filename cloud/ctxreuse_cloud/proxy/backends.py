"""The backends: what is known of each, which may be asked now, and the pool of connections to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ctxreuse.config import BackendConfig
from ctxreuse.errors import ConfigError
from ctxreuse_cloud.proxy.breaker import Breaker
from ctxreuse_cloud.proxy.routing import choose

__all__ = ["Backend", "Backends", "Standing", "connections"]


class Standing(msgspec.Struct, frozen=True):
    """How one backend stands, for ``status``. ``healthy`` is None until it was looked at once."""

    name: str
    url: str
    healthy: bool | None
    breaker: str
    outstanding: int
    requests: int
    failures: int
    models: tuple[str, ...]
    said: str


class Backend:
    """One backend. One event loop calls."""

    def __init__(self, config: BackendConfig, clock: Callable[[], float] = time.monotonic) -> None:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"a backend cannot be at {config.url!r}", fix="Write it as http://127.0.0.1:8000")
        if parts.username is not None or parts.password is not None:
            # The URL is shown in status, logs and errors.
            raise ConfigError("a backend's URL must hold no password", fix="Put its key in a file: api_key_file")
        self.config = config
        self.url = config.url.rstrip("/").removesuffix("/v1")
        self.name = config.name or parts.netloc
        self.key = _read_key(config.api_key_file)
        self.breaker = Breaker()
        self.healthy: bool | None = None
        self.said = ""
        self.models: tuple[str, ...] = ()
        self.outstanding = self.requests = self.failures = 0
        self.clock = clock

    def ready(self) -> bool:
        """True if it may be asked now: not known to be ill, breaker closed, not full."""
        full = self.config.max_inflight and self.outstanding >= self.config.max_inflight
        return self.healthy is not False and not full and self.breaker.allows(self.clock())

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Counts one request from its start to the last byte of its answer."""
        self.breaker.begin(self.clock())
        self.outstanding += 1
        self.requests += 1
        try:
            yield
        finally:
            self.outstanding -= 1
            self.breaker.gave_up()

    def succeeded(self) -> None:
        """It answered."""
        self.breaker.succeeded()

    def failed(self) -> None:
        """It did not answer, or broke off."""
        self.failures += 1
        self.breaker.failed(self.clock())

    def standing(self) -> Standing:
        """How it stands now."""
        state = self.breaker.state(self.clock())
        counts = (self.outstanding, self.requests, self.failures)
        return Standing(self.name, self.url, self.healthy, state, *counts, self.models, self.said)


def _read_key(file: str) -> str:
    if not file:
        return ""
    try:
        key = Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key of a backend cannot be read: {error}", where=file) from None
    if not key or not key.isprintable():
        raise ConfigError("the key of a backend is no single line of text", where=file)
    return key


class Backends:
    """All backends, in the order of the settings. Raises ConfigError for two of one name."""

    def __init__(self, configs: Sequence[BackendConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self.all = tuple(Backend(config, clock) for config in configs)
        names = [backend.name for backend in self.all]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two backends are called {name!r}", fix="Give each its own name")

    def choose(self, model: str, context: bytes, tried: Sequence[Backend] = ()) -> Backend | None:
        """Where to send a request: not where it was ``tried``, unless nobody else is left.

        Backends that list ``model`` come first. None of them may list it: servers of one model often take any name.
        """
        listing = [backend for backend in self.all if model in backend.models] or self.all
        fresh = [backend for backend in listing if backend not in tried]
        for places in (fresh, listing):
            found = choose(places, context, Backend.ready)
            if found is not None:
                return found
        return None

    def wait(self) -> float:
        """Seconds until some backend may be ready again, for ``Retry-After``."""
        return min((b.breaker.wait(b.clock()) for b in self.all if b.healthy is not False), default=5.0)

    @property
    def healthy(self) -> int:
        """How many may be asked, as far as is known."""
        return sum(backend.healthy is not False for backend in self.all)

    def models(self) -> list[tuple[str, str]]:
        """Names of models and the first backend that lists each, in order."""
        found: dict[str, str] = {}
        for backend in self.all:
            if backend.healthy is not False:
                for model in backend.models:
                    found.setdefault(model, backend.name)
        return list(found.items())


def connections(connect: float, silence: float) -> aiohttp.ClientSession:
    """The pool of connections to all backends; close it. Seconds as in the settings of the same name.

    No limit of its own: callers are admitted before. No cookies, no redirects of secrets, no proxies from the
    environment: a backend is exactly what the settings name.
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
