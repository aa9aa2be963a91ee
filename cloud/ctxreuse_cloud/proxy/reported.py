"""The usage that backends report at the end of an answer, in the forms of the APIs that they speak."""

from __future__ import annotations

import json
import re

import msgspec

__all__ = ["ReportedUsage", "usage_of"]

_LONGEST = 1 << 12  # of a usage


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    moved: int | None = None
    mended: int | None = None


class ReportedUsage(msgspec.Struct):
    """The usage at the end of an answer. Only our own daemons report tokens ``moved`` (relocated) and ``mended``
    (recomputed after relocation)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    def counts(self) -> dict[str, int]:
        """Return the tokens by kind, zero where they were not reported."""
        details = self.prompt_tokens_details or _Details()
        return {
            "prompt": self.prompt_tokens,
            "cached": details.cached_tokens or 0,
            "completion": self.completion_tokens,
            "relocated": details.moved or 0,
            "recomputed": details.mended or 0,
        }

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        details = self.prompt_tokens_details
        return details.cached_tokens or 0 if details is not None else 0

    def valid(self) -> bool:
        """Return True if no count is negative."""
        return min(self.counts().values()) >= 0


class _Usage(ReportedUsage):
    """As ``/v1/responses`` (``input_tokens_details``) and ``/v1/messages`` (``cache_…``) report it, too."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def plain(self) -> ReportedUsage | None:
        """Return it in the words of chat completions; None if it counts nothing."""
        if self.input_tokens is None and self.output_tokens is None:
            found = ReportedUsage(self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details)
            return found if found.prompt_tokens or found.completion_tokens else None
        read, written = self.cache_read_input_tokens or 0, self.cache_creation_input_tokens or 0
        details = self.input_tokens_details or _Details(read)
        return ReportedUsage((self.input_tokens or 0) + read + written, self.output_tokens or 0, details)


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """The end of an answer, or an event of its stream; ``response``, ``message``: of ``/v1/responses`` and
    ``/v1/messages``; the counts: Ollama's."""

    usage: _Usage | None = None
    response: msgspec.Raw = msgspec.Raw(b"null")
    message: msgspec.Raw = msgspec.Raw(b"null")
    prompt_eval_count: int = 0
    eval_count: int = 0

    def found(self) -> ReportedUsage | None:
        """Return the usage; None if there is none."""
        if self.prompt_eval_count or self.eval_count:
            return ReportedUsage(self.prompt_eval_count, self.eval_count)
        usage = self.usage
        for raw in (self.response, self.message):
            if usage is None and bytes(memoryview(raw)[:1]) == b"{":
                usage = _message.decode(raw).usage
        return usage.plain() if usage is not None else None


_event, _message = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Message)
_raw_usage = msgspec.json.Decoder(_Usage)
#: The beginning of a usage; in a text of the answer its quotes would be escaped.
_USAGE, _OBJECT = re.compile(rb'"usage"\s*:\s*(?=\{)'), json.JSONDecoder()


def usage_of(tail: bytes, *, events: bool) -> ReportedUsage | None:
    """Return the usage at the end of an answer; None if there is none."""
    if b'"usage"' not in tail and b'"eval_count"' not in tail:
        return None
    lines = [line.removeprefix(b"data:") for line in tail.splitlines()] if events else [tail]
    for line in reversed(lines):
        if b'"usage"' in line or b'"eval_count"' in line:
            try:
                usage = _event.decode(line).found()
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                usage = _last_usage(line)  # the beginning of the line is not in the tail
            if usage is not None and usage.valid():
                return usage
    return None


def _last_usage(line: bytes) -> ReportedUsage | None:
    for found in reversed([*_USAGE.finditer(line)]):
        try:
            text = line[found.end() : found.end() + _LONGEST].decode("utf-8", "replace")
            return _raw_usage.decode(text[: _OBJECT.raw_decode(text)[1]]).plain()
        except (ValueError, RecursionError):
            continue
    return None
