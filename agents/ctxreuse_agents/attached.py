"""A runtime that lives in a running edge daemon: texts and ids stay here, computing and KV are the daemon's.

Tokenising is local, with the tokenizer of the same model, so no engine is loaded; prompts go out as token ids, pieces
of text and ids come back as they are made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import quote

import msgspec

from ctxreuse import models
from ctxreuse.daemon.client import Client, Events
from ctxreuse.engines import Engine
from ctxreuse.engines.generate import Piece
from ctxreuse.engines.sampling import Sampling
from ctxreuse.engines.text import HFText, tokenizer_digest
from ctxreuse.errors import ConfigError, CtxReuseError, EngineError, LinkDownError
from ctxreuse.keys import Tokens, as_tokens
from ctxreuse.levels import check_lossy
from ctxreuse.model import ModelSpace
from ctxreuse.pauses import Kind
from ctxreuse.runtime import Completion, Prefilled, Runtime, Usage
from ctxreuse.why import About, Why

__all__ = ["AttachedRuntime", "attach"]


class _Served(msgspec.Struct, frozen=True):
    """What the daemon says of its model."""

    space: ModelSpace
    digest: str
    model: str
    folder: str


class _FarEngine:
    """The engine as this process knows it: an identity and a tokenizer."""

    def __init__(self, space: ModelSpace, text: HFText) -> None:
        self.space, self.text = space, text

    def __getattr__(self, name: str) -> NoReturn:
        raise EngineError(f"the engine computes in the daemon: it has no {name!r} here", fix="Open an engine here")


class AttachedRuntime(Runtime):
    """See `Runtime`; what agents use of it, done by a daemon. Any thread may call.

    ``store`` is None: nothing of the daemon's store is owned here. Raises LinkDownError where the daemon is away; what
    it knows stays there, and all text here.
    """

    def __init__(self, client: Client, space: ModelSpace, text: HFText) -> None:
        super().__init__(cast(Engine, _FarEngine(space, text)), None, text=text)
        self.client = client
        # Answers of several sessions wait for the daemon, which takes turns itself: not for each other.
        self.compute = cast(threading.Lock, contextlib.nullcontext())

    def permit(self, lossy: str | None) -> None:
        """See `Runtime.permit`; whether there is a card is the daemon's to say, when it is asked for an answer."""
        if lossy is not None:
            check_lossy(lossy)

    def complete(
        self,
        tokens: Sequence[int] | Tokens,
        sampling: Sampling,
        *,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
        was: Kind | None = None,
    ) -> Completion:
        """See `Runtime.complete`."""
        self.permit(lossy)
        return _FarCompletion(self, self.checked(tokens), sampling, branches, lossy, about, was, parts)

    def warm(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
    ) -> Usage:
        """See `Runtime.warm`."""
        body = {"tokens": self.checked(tokens).tolist(), "branches": list(branches), "parts": list(parts)}
        body |= _said(lossy, about)
        return _usage(self.client.call("POST", "/api/tokens/warm", body), self.client.url)

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """See `Runtime.forget`."""
        found = self.client.call("POST", "/api/tokens/forget", {"tokens": as_tokens(tokens).tolist()})
        return int(found["blocks"])

    def pause(
        self, tokens: Sequence[int] | Tokens, kind: str, *, expect: float | None = None, lossy: str | None = None
    ) -> None:
        """See `Runtime.pause`."""
        body = {"tokens": as_tokens(tokens).tolist(), "kind": kind, "expect": expect, **_said(lossy, None)}
        self.client.call("POST", "/api/tokens/pause", body)

    def resume(self, tokens: Sequence[int] | Tokens) -> None:
        """See `Runtime.resume`."""
        self.client.call("POST", "/api/tokens/resume", {"tokens": as_tokens(tokens).tolist()})

    def hint(self, tokens: Sequence[int] | Tokens, name: str, *, until: float | None = None) -> bool:
        """See `Runtime.hint`."""
        body = {"tokens": as_tokens(tokens).tolist(), "name": name, "until": until}
        return bool(self.client.call("POST", "/api/tokens/hint", body).get("known"))

    def supersede(self, tokens: Sequence[int] | Tokens, keep: int) -> int:
        """See `Runtime.supersede`."""
        body = {"tokens": as_tokens(tokens).tolist(), "keep": keep}
        return int(self.client.call("POST", "/api/tokens/supersede", body)["blocks"])

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why:
        """See `Runtime.why`; the daemon decides whether others' requests may be known of."""
        path = f"/api/why/{quote(request, safe='')}" if request else f"/api/why?session={quote(session, safe='')}"
        try:
            return msgspec.convert(self.client.call("GET", path), Why)
        except msgspec.ValidationError as error:
            raise _stranger(error, self.client.url) from None

    def prefill(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        reserve: int = 0,
        branches: Sequence[int] = (),
        parts: Sequence[int] = (),
        lossy: str | None = None,
        about: About | None = None,
    ) -> Prefilled:
        """Not from here: a context in the daemon's memory cannot be handed out. Raises EngineError."""
        raise EngineError("contexts are computed in the daemon", fix="Use warm() or complete(), or open an engine here")


class _FarCompletion(Completion):
    """See `Completion`; closing it hangs up, which ends the making of it in the daemon."""

    _events: Events | None = None

    def _start(self) -> Iterator[Piece]:
        runtime = cast(AttachedRuntime, self._runtime)
        body = {"tokens": self._prompt.tolist(), "sampling": self._sampling, "branches": list(self._branches)}
        body |= {"parts": list(self._parts)} | _said(self._lossy, self._about)
        self._events = runtime.client.stream("/api/tokens/complete", body)
        self._usage = _usage(next(self._events, {}), runtime.client.url)
        return self._read(self._events)

    def _read(self, events: Events) -> Iterator[Piece]:
        for event in events:
            if "usage" in event:
                self._usage = _usage(event, events.url)
                return
            try:
                yield msgspec.convert(event, Piece)
            except msgspec.ValidationError as error:
                raise LinkDownError(
                    f"what answers there is no daemon of this version: {error}", where=events.url
                ) from None

    def _end(self, finish: str) -> None:
        events, self._events = self._events, None
        super()._end(finish)
        if events is not None:
            events.close()


def attach(url: str) -> AttachedRuntime:
    """The runtime of the daemon at ``url`` (``http://127.0.0.1:7351``; a key may stand before the host: ``KEY@``).

    Raises LinkDownError if none answers, ConfigError if its model's tokenizer is not on this machine.
    """
    client = Client(url)
    try:
        served = msgspec.convert(client.call("GET", "/api/tokens/model"), _Served)
    except msgspec.ValidationError as error:
        raise _stranger(error, client.url) from None
    if served.space.digest.hex() != served.digest:
        raise LinkDownError("the daemon describes its model in another version's way", where=client.url)
    return AttachedRuntime(client, served.space, _text(served, client.url))


def _text(served: _Served, url: str) -> HFText:
    for folder in (Path(served.folder), models.path(served.model) if served.model in models.CATALOG else None):
        if folder is None or tokenizer_digest(folder) != served.space.tokenizer:
            continue
        with contextlib.suppress(CtxReuseError):
            text = HFText.open(folder)
            if text is not None:
                return text
    raise ConfigError(
        f"the tokenizer of the daemon's model {served.model!r} is not on this machine",
        where=url,
        fix=f"Run `ctxreuse model get {served.model}`, or copy the folder {served.folder} here",
    )


def _said(lossy: str | None, about: About | None) -> dict[str, Any]:
    # Only where there is something to say: a daemon that knows no levels answers exactly.
    return ({} if lossy is None else {"lossy": lossy}) | ({} if about is None else {"about": _plain(about)})


def _plain(about: About) -> dict[str, Any]:
    return {"session": about.session, "parts": about.parts, "opening": about.opening}


def _usage(event: Any, url: str) -> Usage:
    try:
        return msgspec.convert(event["usage"], Usage)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise _stranger(error, url) from None


def _stranger(error: Exception, url: str) -> LinkDownError:
    return LinkDownError(f"what answers there is no daemon of this version: {error}", where=url)
