"""LMDB in a process of its own: damage that ends a process ends that one, and the caller has an error.

LMDB trusts what it reads: a page that is not what it expects is an assertion or a fault in the address space.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.errors import CtxReuseError, StoreDamagedError, StoreError
from ctxreuse.store.types import Progress

__all__ = ["call", "main"]

_START = "from ctxreuse.store.lmdb.apart import main; main()"


def call(task: str, *words: str, where: Path, progress: Progress | None = None) -> Any:
    """Call ``task`` (``module:function``) with words in a process of its own; returns its result as JSON has it.

    Raises StoreDamagedError if a signal ended the process, and what the function raised as StoreError.
    """
    # The modules that this process has, and none from the folder where it happens to run.
    paths = [str(Path(__file__).parents[3]), *(entry for entry in sys.path if entry)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-P", "-c", _START, task, *words]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=env)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                message = json.loads(line)
                if "progress" in message:
                    if progress is not None:
                        progress(*message["progress"])
                elif "error" in message:
                    what, place, fix = message["error"]
                    raise StoreError(what, where=place, fix=fix)
                else:
                    return message["result"]
        finally:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    last = f": {said[-1][:300]}" if said else ""
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        fix = "`ctxreuse store restore` brings back a backup, `ctxreuse store rescue` saves what can be read"
        raise StoreDamagedError(f"LMDB was ended by {name} while it read the file{last}", where=str(where), fix=fix)
    raise StoreError(f"a process that reads the file ended with code {child.returncode}{last}", where=str(where))


def main() -> None:
    """Run in the child: call the function that the arguments name, and write what it does as lines of JSON."""
    task, *words = sys.argv[1:]
    module, _, name = task.partition(":")

    def say(**message: Any) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    try:
        function = getattr(importlib.import_module(module), name)
        say(result=function(*words, progress=lambda done, total: say(progress=(done, total))))
    except CtxReuseError as error:
        say(error=(error.what, error.where, error.fix))
