"""Processes of the demo that tell what they do, one JSON line an event."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec

from ctxreuse import errors
from ctxreuse.errors import EngineError

__all__ = ["events"]


def events(module: str, *arguments: str, ends: int = 0) -> Iterator[dict[str, Any]]:
    """Run ``module`` and give its events as they come.

    Raises what it says has failed, EngineError with its last words if it does not end with the code ``ends``. Its
    process is killed when the iteration is given up.
    """
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile() as noise, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                event = msgspec.json.decode(line)
                if event["event"] == "failed":
                    raise getattr(errors, event["error"])(event["what"], where=event["where"], fix=event["fix"])
                yield event
        except BaseException:
            child.kill()
            raise
        code = child.wait()
        if code != ends:
            noise.seek(0)
            tail = noise.read()[-2000:].decode(errors="replace").strip()
            where = f"{module.rpartition('.')[2]} {arguments[0]!r}" if arguments else module
            raise EngineError(f"the demo's process ended with {code}: {tail}", where=where)
