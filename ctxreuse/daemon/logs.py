"""Logs of a daemon: standard logging, as text lines or JSON objects, each with the id of its request.

The ``extra`` of a record and the `fields` around the call appear as ``url=...`` at the end of a text line, or as
members of the JSON object.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

import msgspec

__all__ = ["Lines", "fields", "setup"]

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

# Levels below warning are for our own loggers: libraries log too much.
_OURS = ("ctxreuse", "ctxreuse_agents", "ctxreuse_cloud", "ctxreuse_edge")

_NONE: Mapping[str, Any] = MappingProxyType({})
_fields: ContextVar[Mapping[str, Any]] = ContextVar("ctxreuse_log_fields", default=_NONE)


@contextlib.contextmanager
def fields(**more: Any) -> Iterator[None]:
    """Add fields to all records that this task or thread logs inside the ``with`` block."""
    token = _fields.set({**_fields.get(), **more})
    try:
        yield
    finally:
        _fields.reset(token)


class Lines(logging.Formatter):
    """Formats a record as ``time level logger message field=value …``, or as a JSON object, with times in UTC.

    A traceback follows on separate lines; in JSON it is the member ``error``.
    """

    def __init__(self, form: Literal["text", "json"]) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        level, text = record.levelname.lower(), record.getMessage()
        extra = {**_fields.get(), **{name: value for name, value in vars(record).items() if name not in _OWN}}
        error = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            body = {"time": time, "level": level, "logger": record.name, "message": text, **extra}
            return msgspec.json.encode(body | ({"error": error} if error else {}), enc_hook=repr).decode()
        if not text.isprintable():
            # Input from outside must neither begin a new line nor control a terminal.
            text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        words = [time, f"{level:<7}", record.name, text]
        words += [f"{name}={_shown(value)}" for name, value in extra.items()]
        return " ".join(words) + (f"\n{error}" if error else "")


def _shown(value: Any) -> str:
    text = str(value)
    plain = text and all(char.isprintable() and char not in ' "=' for char in text)
    return text if plain else msgspec.json.encode(text).decode()


def setup(form: Literal["text", "json"] = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs of this process, with warnings of libraries, to ``stream`` (standard error). Repeatable."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler.formatter, Lines):
            root.removeHandler(handler)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(Lines(form))
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
