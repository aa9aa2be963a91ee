"""Answers that a running edge daemon makes, read from one connection as they are generated."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import msgspec

from ctxreuse.daemon.client import Client, Events
from ctxreuse.engines.generate import GeneratedToken
from ctxreuse.errors import LinkDownError
from ctxreuse.runtime import Completion, Usage
from ctxreuse.usage import TokenUsage
from ctxreuse.why import Why

__all__ = ["RemoteAnswers", "not_ours", "usage_in"]


class _Daemon(Protocol):
    """What answers need of a `RemoteRuntime`."""

    client: Client

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why: ...


class RemoteAnswers:
    """The answers of a daemon to one prompt. Any thread may use any of them: who reads one reads the connection, and
    the others' pieces wait. When all have ended it disconnects, which cancels what the daemon still makes."""

    def __init__(self, runtime: _Daemon, body: dict[str, Any], count: int) -> None:
        self.runtime, self._body = runtime, body
        self._events: Events | None = None
        self._lock, self._ending = threading.RLock(), threading.Lock()
        self._pieces: list[deque[GeneratedToken]] = [deque() for _ in range(count)]
        self._left = count
        #: What each cost so far; the prompt is the first one's.
        self.usages: list[Usage | None] = [None] * count

    def completions(self, prompt_tokens: int) -> list[Completion]:
        """Return the answers, once."""
        numbers = range(len(self._pieces))
        return [Completion(_Source(self, number), 0 if number else prompt_tokens) for number in numbers]

    def next(self, number: int) -> GeneratedToken | None:
        """Return the next piece of an answer; see `PieceSource.next`."""
        with self._lock:
            client = self.runtime.client
            if self._events is None:
                self._events = client.stream("/api/tokens/complete", self._body)
                usage = usage_in(next(self._events, {}), client.url)
                self.usages = [usage, *[Usage(TokenUsage(), request=usage.request)] * (len(self.usages) - 1)]
            while not self._pieces[number]:
                event = next(self._events, None)
                if event is None:
                    return None
                whose = event.get("number", 0)
                if not isinstance(whose, int) or not 0 <= whose < len(self._pieces):
                    raise not_ours(ValueError(f"there is no answer {whose!r}"), client.url)
                if "usage" in event:
                    self.usages[whose] = usage_in(event, client.url)
                    if whose == number:
                        return None
                    continue
                try:
                    self._pieces[whose].append(msgspec.convert(event, GeneratedToken))
                except msgspec.ValidationError as error:
                    raise not_ours(error, client.url) from None
            return self._pieces[number].popleft()

    def end(self) -> None:
        """One answer has ended."""
        with self._ending:
            self._left -= 1
            if not self._left and self._events is not None:
                self._events.close()


class _Source:
    """One answer as a `PieceSource`."""

    def __init__(self, answers: RemoteAnswers, number: int) -> None:
        self._answers, self._number = answers, number

    @property
    def usage(self) -> Usage | None:
        return self._answers.usages[self._number]

    def next(self) -> GeneratedToken | None:
        return self._answers.next(self._number)

    def cancel(self) -> None:
        """Do nothing: the connection is closed after the daemon's next piece."""

    def end(self, finish: str, text: str, usage: Usage) -> None:
        self._answers.end()

    def why(self, request: str, *, others: bool) -> Why:
        return self._answers.runtime.why(request, others=others)


def usage_in(event: Any, url: str) -> Usage:
    """Return the usage in an event of the daemon at ``url``. Raises LinkDownError."""
    try:
        return Usage.from_wire(event["usage"])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise not_ours(error, url) from None


def not_ours(error: Exception, url: str) -> LinkDownError:
    """Return the error for a server that answers as no daemon of this version does."""
    return LinkDownError(f"the server there is not a daemon of this version: {error}", where=url)
