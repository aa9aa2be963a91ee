"""Child processes of the demo, which report one JSON line per event."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse import errors
from ctxreuse.errors import EngineError

__all__ = ["events"]


def events(module: str, *arguments: str, ends: int = 0) -> Iterator[dict[str, Any]]:
    """Run ``module`` and yield its events.

    Raises the error that it reports, and EngineError with the end of its output if its exit code is not ``ends``. The
    process is killed when the iteration stops early.
    """
    # -P: what is installed counts, not a source tree in the current folder.
    command = [sys.executable, "-P", "-m", module, *arguments]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path}
    with (
        tempfile.TemporaryFile() as noise,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, env=env) as child,
    ):
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
