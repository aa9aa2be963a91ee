"""A model and its KV store in one object: prompts in, text out, KV reused and kept on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import msgspec

from ctxreuse.config import EngineConfig
from ctxreuse.engines import Engine, open_draft_engine, open_engine
from ctxreuse.engines.prompt import encode_prompt
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.runtime import Completion, Request, Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn
from ctxreuse.store import Store, open_store
from ctxreuse.usage import Usage

__all__ = ["LLM", "Generation"]


class Generation(msgspec.Struct, frozen=True):
    """One finished answer.

    Attributes:
        text: the answer.
        tokens: its token ids.
        finish: why it ended: ``stop``, ``length`` or ``stop_string``.
        usage: what it cost and what it reused.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    usage: Usage


class LLM:
    """Generate text with a model, reusing the KV of all earlier prompts in the store.

    Any thread may call. Use it as a context manager or call `close`: blocks still in memory are written then.

    Args:
        model: a known name (``smollm2``), a Hugging Face folder, the ``engine`` section of some settings, or an open
            engine, which stays the caller's.
        store: folder of the KV store; an open store, which stays the caller's; None: host memory only.
        capacity: bytes of KV on disk (default: 8 GB).
        max_kl: how far KV may be from exact, in nats of the next token's distribution; None: exact KV only.
        tenant: whose keys these are; equal text of different tenants shares nothing.
        speculate: ``auto``: draft answers from what was said before, where that is faster.
        exits: share of an answer's tokens that may be other than the model's own, such as 0.01, so that tokens leave
            the model early; ``off``: none.
        settings: fields of `EngineConfig`, such as ``dtype``, ``threads`` or ``draft_model``, a smaller model that
            drafts answers too.

    Raises ConfigError, EngineError, StoreError and StoreOwnedError as `open_engine` and `open_store` do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | Engine | None = None,
        *,
        store: str | os.PathLike[str] | Store | None = None,
        capacity: int = 8_000_000_000,
        max_kl: float | None = None,
        tenant: str = "default",
        speculate: Literal["auto", "off"] = "off",
        exits: float | Literal["off"] = "off",
        **settings: Any,
    ) -> None:
        with ExitStack() as opened:
            own = model if isinstance(model, EngineConfig) else EngineConfig()
            threads = settings.get("threads", own.threads)
            drafted = msgspec.structs.replace(own, speculate=speculate, threads=threads)
            draft = open_draft_engine(settings.pop("draft_model", own.draft_model), drafted)
            if not isinstance(model, Engine):
                model = open_engine(model, **settings)
            elif settings:
                raise ConfigError(f"an open engine takes no settings: {', '.join(settings)}")
            folder = None
            if store is None or isinstance(store, str | os.PathLike):
                folder = None if store is None else Path(store).expanduser()
                store = opened.enter_context(open_store(folder, capacity=capacity))
            share = 0.0 if exits == "off" else exits
            options = RuntimeOptions(tenant=tenant, speculate=speculate, draft=draft, drafts=folder, exits=share)
            self.runtime = Runtime(model, store, options)
            opened.callback(self.runtime.close)
            self.runtime.check_max_kl(max_kl)
            self.engine, self.store, self.max_kl = model, store, max_kl
            self._opened = opened.pop_all()

    @overload
    def generate(
        self, prompt: str, sampling: SamplingParams | None = None, *, n: None = None, priority: int = 0, **params: Any
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: str, sampling: SamplingParams | None = None, *, n: int, priority: int = 0, **params: Any
    ) -> list[Generation]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        n: None = None,
        priority: int = 0,
        **params: Any,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        n: int | None = None,
        priority: int = 0,
        **params: Any,
    ) -> Generation | list[Generation]:
        """Continue a prompt, or each of several, one after another; later ones reuse what earlier ones computed.

        Args:
            prompt: text as it stands; `chat` applies the model's template.
            sampling: how tokens are drawn (default: greedy, 256 tokens).
            n: so many answers to the one prompt, which is computed once; answer i is drawn with seed + i. Their usages
                add up: the first has the prompt.
            priority: the lower, the sooner it is computed beside other threads' requests.
            params: fields of `SamplingParams` that replace those of ``sampling``, such as ``max_tokens``.

        Raises EngineError, ContextTooLongError, and ConfigError for values without a meaning.
        """
        if n is not None:
            if not isinstance(prompt, str) or n < 1:
                raise ConfigError(f"n is {n!r}", fix="Give 1 or more, and one prompt")
            how = _sampling(sampling, params).answers(n)
            found = self.runtime.complete_many(self._request(prompt, priority), how)
            for _ in pieces_in_turn(found):
                pass
            return [_finish(one) for one in found]
        if isinstance(prompt, str):
            return _finish(self.stream(prompt, sampling, priority=priority, **params))
        return [_finish(self.stream(one, sampling, priority=priority, **params)) for one in prompt]

    def stream(
        self, prompt: str, sampling: SamplingParams | None = None, *, priority: int = 0, **params: Any
    ) -> Completion:
        """As `generate`, piece by piece: iterate over the result; its ``usage`` grows with it."""
        return self.runtime.complete(self._request(prompt, priority), _sampling(sampling, params))

    def _request(self, prompt: str, priority: int) -> Request:
        text = self.runtime.text
        if text is None:
            raise EngineError("this model has no tokenizer", fix="Use a folder with tokenizer.json")
        return self.runtime.request(text.encode(prompt), max_kl=self.max_kl, priority=priority)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        **params: Any,
    ) -> Generation:
        """Answer a conversation in the model's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` each, oldest first.
            sampling: see `generate`.
            priority: see `generate`.
            params: see `generate`.
        """
        text = self.runtime.text
        if text is None:
            raise EngineError("this model has no tokenizer", fix="Use a folder with tokenizer.json")
        try:
            given = [one if isinstance(one, Message) else Message(one["role"], one["content"]) for one in messages]
        except KeyError as error:
            raise ConfigError(f"a message has no {error.args[0]}", fix="Give role and content") from None
        prompt = encode_prompt(text, given)
        request = self.runtime.request(
            prompt.ids, parts=prompt.parts, branches=prompt.ends, max_kl=self.max_kl, priority=priority
        )
        return _finish(self.runtime.complete(request, _sampling(sampling, params)))

    def close(self) -> None:
        """Write what is still in memory and close what this object opened. Idempotent."""
        self._opened.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.engine.space.architecture})"


def _sampling(sampling: SamplingParams | None, params: dict[str, Any]) -> SamplingParams:
    try:
        return (
            msgspec.structs.replace(sampling or SamplingParams(), **params) if params else sampling or SamplingParams()
        )
    except TypeError as error:
        fields = ", ".join(SamplingParams.__struct_fields__)
        raise ConfigError(f"no such sampling parameter: {error}", fix=f"There are {fields}") from None


def _finish(completion: Completion) -> Generation:
    text = completion.drain()
    return Generation(text, tuple(completion.tokens), completion.finish or "", completion.usage)
