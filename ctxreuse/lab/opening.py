"""Opens a trace of any format that is known, by what its first line looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.lab.lines import UNREADABLE, first_line
from ctxreuse.lab.mooncake import mooncake
from ctxreuse.lab.recording import FORMAT, recording
from ctxreuse.lab.sessions import agent_sessions
from ctxreuse.lab.trace import Trace

__all__ = ["FORMATS", "open_trace"]

_READERS: dict[str, Callable[[Path], Trace]] = {
    "mooncake": mooncake,
    "sessions": agent_sessions,
    "recording": recording,
}

#: Names that ``--format`` takes beside ``auto``.
FORMATS = tuple(_READERS)


def open_trace(path: Path | str, format: str = "auto") -> Trace:
    """Return the trace in a file, packed (.xz, .gz, .bz2) or not. Reads no more than the first line.

    Raises ConfigError for a file that cannot be read or an unknown format, FormatError for one that is not recognised.
    """
    path = Path(path)
    if format == "auto":
        format = _sniff(first_line(path), path)
    if format not in _READERS:
        raise ConfigError(f"no trace format {format!r}", fix=f"Choose one of: auto, {', '.join(FORMATS)}")
    return _READERS[format](path)


def _sniff(line: bytes, path: Path) -> str:
    try:
        fields = msgspec.json.decode(line)
    except UNREADABLE:
        fields = None
    if isinstance(fields, dict):
        if fields.get("format") == FORMAT:
            return "recording"
        if "hash_ids" in fields:
            return "mooncake"
        if "requests" in fields and "block_size" in fields:
            return "sessions"
    raise FormatError(
        "this kind of trace is not recognised", where=path.name, fix=f"Name its --format: {', '.join(FORMATS)}"
    )
