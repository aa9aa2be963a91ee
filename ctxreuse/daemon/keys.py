"""The API keys that a daemon knows: who a caller is, what it may, and the end of answers when its key ends."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ctxreuse.daemon.key_file import ApiKey, KeyList, KeyScope, hash_key, is_json, key_list, read_keys
from ctxreuse.daemon.rates import KeyRates

__all__ = ["KeyEndedError", "Keys", "WatchedRequest", "given_key"]

#: Scopes of keys that stand in lines: their owner may ask, and see status.
_LINES: tuple[KeyScope, ...] = ("answers", "status")
_MAX_KEY = 512


def given_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the key of a request: ``Authorization: Bearer KEY``, else ``X-Api-Key`` as Anthropic's clients send it; ""
    without one. ``headers``: with names in lower case, as in ASGI."""
    other = ""
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                return key.strip()
        elif name == b"x-api-key":
            other = value.decode("latin-1").strip()
    return other


class KeyEndedError(Exception):
    """The key of a request was revoked, or has expired, while it was answered."""

    def __init__(self) -> None:
        super().__init__("the API key was revoked or has expired")


class WatchedRequest:
    """The key of one running request, whose task is cancelled when the key ends."""

    def __init__(self, key: ApiKey) -> None:
        self.key, self.ended = key, False
        self._task = asyncio.current_task()

    def end(self) -> None:
        """Cancel the request."""
        self.ended = True
        if self._task is not None:
            self._task.cancel()

    def was_cancelled(self) -> bool:
        """Return True if the cancellation that was just caught is that of `end`, and no other."""
        return self.ended and self._task is not None and not self._task.uncancel()


class Keys:
    """The keys in a file, or given (``Keys.of``); for one event loop. Raises ConfigError."""

    name = "API keys"

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], KeyList] = lambda path: key_list(path, _LINES),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._read, self._clock = path, read, clock
        self._seen = self._state()
        self._rates: dict[str, KeyRates] = {}
        self._watched: set[WatchedRequest] = set()
        self._use(self._read(path))

    @classmethod
    def of(cls, *keys: str, scopes: tuple[KeyScope, ...] = _LINES) -> Keys:
        """Return these keys."""
        listed = tuple(ApiKey(f"key-{digest[:12]}", digest, scopes=scopes) for digest in map(hash_key, keys))
        return cls(Path(os.devnull), lambda _: KeyList(1, "", listed))

    @classmethod
    def from_setting(
        cls, file: str, scopes: tuple[KeyScope, ...] = _LINES, clock: Callable[[], float] = time.time
    ) -> Keys | None:
        """Return the keys in a file that a setting names; None for ""; ``scopes``: of keys that stand in lines."""
        if not file:
            return None
        path = Path(file).expanduser()
        if not is_json(path):
            read_keys(file)  # must have one at the start; emptied later, it revokes all
        return cls(path, lambda path: key_list(path, scopes), clock)

    def refresh(self) -> bool:
        """Read the file again if it has changed, and end the requests of keys that are no longer valid; returns whether
        it had. On ConfigError the keys that were read before stay."""
        try:
            state = self._state()
            if state == self._seen:
                return False
            self._use(self._read(self._path))
            self._seen = state
            return True
        finally:
            for watched in [one for one in self._watched if not self._valid(one.key)]:
                self._watched.discard(watched)
                watched.end()

    def find(self, key: str) -> ApiKey | None:
        """Return what is known of a key; None if it is not valid."""
        if not 0 < len(key) <= _MAX_KEY:
            return None
        # Hashes are looked up, which a caller cannot choose, so the time tells nothing about keys.
        digest = hash_key(key)
        found = self._known.get(digest)
        matches = found is not None and hmac.compare_digest(found.sha256, digest)
        return found if found is not None and matches and self._valid(found) else None

    def guard(self, scope: KeyScope) -> bool:
        """Return True if some key has this scope, so that callers without a key do not have it."""
        return any(scope in key.scopes for key in self._known.values())

    @contextmanager
    def watch(self, key: ApiKey) -> Iterator[WatchedRequest]:
        """Note that the present task answers a request of this key; until the block is left `refresh` may cancel it."""
        watched = WatchedRequest(key)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    def rates(self, key: ApiKey) -> KeyRates:
        """Return what the key may still take."""
        found = self._rates.get(key.sha256)
        if found is None or found.limits != (key.requests, key.tokens):
            found = self._rates[key.sha256] = KeyRates(key.requests, key.tokens)
        return found

    def used(self) -> dict[str, tuple[int, int, int]]:
        """Return requests, refused ones and tokens by name, of keys in the file. May be called by any thread."""
        found: dict[str, tuple[int, int, int]] = {}
        for key in self._known.values():
            rates, before = self._rates.get(key.sha256), found.get(key.tenant, (0, 0, 0))
            mine = (rates.begun, rates.refused, rates.spent) if rates is not None else (0, 0, 0)
            found[key.tenant] = before[0] + mine[0], before[1] + mine[1], before[2] + mine[2]
        return found

    def _valid(self, key: ApiKey) -> bool:
        now = self._known.get(key.sha256)
        return now is not None and not 0 < now.expires <= self._clock()

    def _use(self, content: KeyList) -> None:
        self.secret = content.secret
        self._known = {key.sha256: key for key in content.keys}
        self._rates = {digest: rates for digest, rates in self._rates.items() if digest in self._known}

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert set(self._rates) <= set(self._known)
        for rates in self._rates.values():
            rates.check()
