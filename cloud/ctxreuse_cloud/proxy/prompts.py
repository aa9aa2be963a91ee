"""The token ids of a request, as the backend's own tokenizer makes them: without these KV events say nothing of it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import aiohttp
import msgspec

from ctxreuse.routing import PromptTokens
from ctxreuse_cloud.proxy.backends import Backend, Backends
from ctxreuse_cloud.proxy.request import ProxyRequest
from ctxreuse_cloud.proxy.stream import read_whole

__all__ = ["PromptReader"]

#: Seconds in which a backend must answer, and for which one that did not is not asked again.
_PATIENCE, _AGAIN = 0.25, 30.0
#: Token ids of requests that are kept: a request is often tried again, or sent by several.
_KEPT = 1 << 20
#: Fields of a chat that its template or tokenizer reads.
_CHAT = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs",
)  # fmt: skip
_TEXT = ("model", "prompt", "add_special_tokens")


class _Answer(msgspec.Struct):
    tokens: list[int]


_answer = msgspec.json.Decoder(_Answer)
_ids = msgspec.json.Decoder(list[int])


class PromptReader:
    """Asks backends for token ids; for one event loop."""

    def __init__(
        self, backends: Backends, pool: aiohttp.ClientSession, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backends, self._pool, self._clock = backends, pool, clock
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._tokens = 0
        self._not_before: dict[str, float] = {}

    async def read(self, path: str, request: ProxyRequest, salt: str) -> PromptTokens | None:
        """Return a prompt's tokens; None if no backend's events are known, or none says them in time."""
        if not any(backend.events is not None and backend.events.source != "text" for backend in self._backends.all):
            return None
        body = self._body(path, request)
        if body is None:
            return None
        try:
            if isinstance(body, list):
                return PromptTokens.of(body, request.model, salt)
            key = hashlib.blake2b(body, digest_size=16).digest()
            ids = self._known.get(key)
            if ids is None:
                found = await self._ask(body, request.model)
                if found is None:
                    return None
                prompt = PromptTokens.of(found, request.model, salt)
                self._keep(key, prompt.ids)
                return prompt
        except OverflowError:
            return None
        self._known.move_to_end(key)
        return PromptTokens(ids, request.model, salt)

    @staticmethod
    def _body(path: str, request: ProxyRequest) -> bytes | list[int] | None:
        """Return what to ask for, or token ids that the request has itself."""
        if path == "/v1/chat/completions":
            return request.only(_CHAT, "messages")
        if path != "/v1/completions":
            return None
        raw = request.field("prompt")
        if raw[:1] == b'"':
            return request.only(_TEXT, "prompt")
        try:
            return _ids.decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            return None  # several prompts

    async def _ask(self, body: bytes, model: str) -> list[int] | None:
        backend = self._place(model)
        if backend is None:
            return None
        headers = {"content-type": "application/json"}
        if backend.key:
            headers["authorization"] = f"Bearer {backend.key}"
        try:
            async with (
                asyncio.timeout(_PATIENCE),
                self._pool.post(
                    backend.url + "/tokenize", data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                answer, whole = await read_whole(response)
            if response.status == 200 and whole:
                return _answer.decode(answer).tokens
            late = response.status not in (400, 422)  # these are the request's fault
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
            late = True
        if late:
            self._not_before[backend.name] = self._clock() + _AGAIN
        return None

    def _place(self, model: str) -> Backend | None:
        """Return the least busy backend of a model whose events are known: its tokenizer is that of the others."""
        now = self._clock()
        able = [
            backend
            for backend in self._backends.listing(model)
            if backend.events is not None and backend.ready() and self._not_before.get(backend.name, now) <= now
        ]
        return min(able, key=lambda backend: backend.outstanding, default=None)

    def _keep(self, key: bytes, ids: bytes) -> None:
        self._known[key] = ids
        self._tokens += len(ids) // 4
        while self._known and self._tokens > _KEPT:
            self._tokens -= len(self._known.popitem(last=False)[1]) // 4
