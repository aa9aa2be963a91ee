"""A runtime behind a running edge daemon: texts and ids stay here; the daemon computes and caches KV.

Tokenising is local, with the tokenizer of the same model, so no engine is loaded; prompts go out as token ids, pieces
of text and ids come back as they are generated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ctxreuse import models
from ctxreuse.block.levels import check_limit, limit_name
from ctxreuse.daemon.client import Client
from ctxreuse.engines.registry import read_text
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import HFText, tokenizer_digest
from ctxreuse.errors import ConfigError, CtxReuseError, LinkDownError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.pauses import PauseKind
from ctxreuse.planner import Part, Permutation, Plan
from ctxreuse.runtime import Completion, PromptLike, Request, Usage
from ctxreuse.runtime.request import validate_tokens
from ctxreuse.why import RequestInfo, Why
from ctxreuse_agents.remote_answers import RemoteAnswers, not_ours, usage_in

__all__ = ["RemoteRuntime", "attach"]


class _Served(msgspec.Struct, frozen=True):
    """The daemon's description of its model."""

    space: ModelSpace
    digest: str
    model: str
    folder: str


class RemoteRuntime:
    """`RuntimeProtocol` over an edge daemon. Thread-safe.

    The daemon owns its store; this side keeps all text.
    """

    store = None

    def __init__(self, client: Client, space: ModelSpace, text: HFText) -> None:
        self.client, self.space, self.text = client, space, text

    def check_max_kl(self, max_kl: float | None) -> None:
        """Check that it is a valid limit; the daemon checks it against its profiles at each request."""
        check_limit(max_kl)

    def request(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        parts: Sequence[int] = (),
        branches: Sequence[int] = (),
        max_kl: float | None = None,
        about: RequestInfo | None = None,
        priority: int = 0,
        caller: str = "",
    ) -> Request:
        """See `RuntimeProtocol.request`; the daemon hashes the keys, and knows the caller."""
        ids, limit = validate_tokens(self.space, tokens), check_limit(max_kl)
        return Request(ids, (), tuple(parts), tuple(branches), limit, about or RequestInfo(), priority, caller)

    def plan(self, parts: Sequence[Part], max_kl: float | None = None) -> Plan:
        """Return the order given: the daemon knows what is cached."""
        return Plan(Permutation.identity(len(parts)))

    def _body(self, prompt: PromptLike) -> dict[str, Any]:
        request = prompt if isinstance(prompt, Request) else self.request(prompt)
        about = request.about
        return {
            "tokens": request.ids.tolist(),
            "branches": list(request.branches),
            "parts": list(request.parts),
            "about": {"session": about.session, "parts": about.parts, "opening": about.first_message},
            **_lossy(request.max_kl),
            **({"priority": request.priority} if request.priority else {}),
        }

    def complete(self, prompt: PromptLike, sampling: SamplingParams, *, was: PauseKind | None = None) -> Completion:
        """See `RuntimeProtocol.complete`; the daemon learns pauses by itself."""
        return self.complete_many(prompt, [sampling], was=was)[0]

    def complete_many(
        self, prompt: PromptLike, samplings: Sequence[SamplingParams], *, was: PauseKind | None = None
    ) -> list[Completion]:
        """See `RuntimeProtocol.complete_many`: one request, whose answers share a connection."""
        first, *more = samplings
        body = self._body(prompt) | {"sampling": first, **({"more": more} if more else {})}
        return RemoteAnswers(self, body, len(samplings)).completions(len(body["tokens"]))

    def warm(self, prompt: PromptLike) -> Usage:
        """See `RuntimeProtocol.warm`."""
        return usage_in(self.client.call("POST", "/api/tokens/warm", self._body(prompt)), self.client.url)

    def forget(self, tokens: Sequence[int] | Tokens) -> int:
        """See `RuntimeProtocol.forget`."""
        return int(self._call("forget", tokens)["blocks"])

    def erase(self, tokens: Sequence[int] | Tokens, *, session: str = "", keep: Iterable[Tokens] = ()) -> int:
        """See `RuntimeProtocol.erase`; the daemon knows what its other contexts need, and not ``keep``."""
        body = {"tokens": as_tokens(tokens).tolist(), "session": session}
        return int(self.client.call("POST", "/api/forget", body)["blocks"])

    def pause(
        self, tokens: Sequence[int] | Tokens, kind: str, *, expect: float | None = None, max_kl: float | None = None
    ) -> None:
        """See `RuntimeProtocol.pause`."""
        self._call("pause", tokens, kind=kind, expect=expect, **_lossy(max_kl))

    def resume(self, tokens: Sequence[int] | Tokens) -> None:
        """See `RuntimeProtocol.resume`."""
        self._call("resume", tokens)

    def hint(self, tokens: Sequence[int] | Tokens, name: str, *, until: float | None = None) -> bool:
        """See `RuntimeProtocol.hint`."""
        return bool(self._call("hint", tokens, name=name, until=until).get("known"))

    def supersede(self, tokens: Sequence[int] | Tokens, keep: int) -> int:
        """See `RuntimeProtocol.supersede`."""
        return int(self._call("supersede", tokens, keep=keep)["blocks"])

    def _call(self, verb: str, tokens: Sequence[int] | Tokens, **more: Any) -> Any:
        return self.client.call("POST", f"/api/tokens/{verb}", {"tokens": as_tokens(tokens).tolist(), **more})

    def why(self, request: str = "", *, session: str = "", others: bool = False) -> Why:
        """See `RuntimeProtocol.why`; the daemon decides whether other tenants' requests may be revealed."""
        path = f"/api/why/{quote(request, safe='')}" if request else f"/api/why?session={quote(session, safe='')}"
        try:
            return msgspec.convert(self.client.call("GET", path), Why)
        except msgspec.ValidationError as error:
            raise not_ours(error, self.client.url) from None

    def forget_requests(self, session: str | None = None) -> None:
        """Do nothing: the daemon owns the request log."""

    def close(self) -> None:
        """Do nothing: each request has its own connection."""


def attach(url: str) -> RemoteRuntime:
    """Return the runtime of the daemon at ``url`` (``http://127.0.0.1:7351``, with an API key ``http://KEY@…``).

    Raises LinkDownError if none answers, ConfigError if its model's tokenizer is not on this machine.
    """
    client = Client(url)
    try:
        served = msgspec.convert(client.call("GET", "/api/tokens/model"), _Served)
    except msgspec.ValidationError as error:
        raise not_ours(error, client.url) from None
    if served.space.digest.hex() != served.digest:
        raise LinkDownError("the daemon describes its model as another version does", where=client.url)
    return RemoteRuntime(client, served.space, _text(served, client.url))


def _text(served: _Served, url: str) -> HFText:
    places = [Path(served.folder)]
    if served.model in models.CATALOG:
        places += [models.path(served.model), models.path(served.model) / f"{served.model}.gguf"]
    for place in places:
        if tokenizer_digest(place) != served.space.tokenizer:
            continue
        with contextlib.suppress(CtxReuseError):
            text = read_text(place)
            if text is not None:
                return text
    raise ConfigError(
        f"the tokenizer of the daemon's model {served.model!r} is not on this machine",
        where=url,
        fix=f"Run `ctxreuse model get {served.model}`, or copy {served.folder} here",
    )


def _lossy(max_kl: float | None) -> dict[str, str]:
    # Omitted without a limit: a daemon without levels answers exactly.
    return {"lossy": limit_name(max_kl)} if max_kl else {}
