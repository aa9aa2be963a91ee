"""A share of the processor for some processes, as if they had a machine of their own, where the system lets us."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ctxreuse.errors import EngineError

__all__ = ["Quota", "quota"]

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
#: Microseconds: a process that has used its share waits no longer for its next one.
_PERIOD = 20_000


class Quota:
    """A control group with a limited share of the processor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, pid: int) -> None:
        """Put a process and all that it has started into the group; what these start later is there too."""
        for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            (self._folder / "cgroup.procs").write_text(str(one.pid))


@contextmanager
def quota(cores: float) -> Iterator[Quota | None]:
    """A group of so many cores, gone when the processes in it have ended; None where none can be made (needs root)."""
    made = next(filter(None, (_made(root, cores) for root in _ROOTS)), None)
    if made is None:
        yield None
        return
    try:
        yield Quota(made)
    finally:
        _remove(made)


def _made(root: Path, cores: float) -> Path | None:
    wanted = round(cores * _PERIOD)
    if not (root / "cgroup.procs").exists() or not os.access(root, os.W_OK):
        return None
    folder = Path(tempfile.mkdtemp(prefix="ctxreuse-bench-", dir=root))
    with suppress(OSError):
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{wanted} {_PERIOD}")
            return folder
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(wanted))
            return folder
    folder.rmdir()
    return None


def _remove(folder: Path) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise EngineError(f"a process of the bench has not ended: {error}", where=str(folder)) from None
            time.sleep(0.1)
