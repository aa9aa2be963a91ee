"""Files and folders that only their owner may read: what a model was asked, and by whom, is theirs alone."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["make_private_folder", "read_list", "warn_if_shared", "write_private"]

T = TypeVar("T")

log = logging.getLogger(__name__)


def make_private_folder(path: Path) -> None:
    """Create a folder, and those above it that are missing, with mode 0700; one that exists keeps its mode.

    Raises OSError.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Write a file with mode 0600, which appears complete or not at all. Raises OSError."""
    fresh = path.with_name(path.name + ".new")
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        os.fchmod(file, 0o600)  # one that was left behind keeps its mode
        opened.write(data)
    fresh.replace(path)


def read_list(path: Path, kind: type[T], what: str) -> list[T]:
    """Return a JSON list of ``kind`` in a file: empty if there is no file, and, with a warning that names ``what`` was
    in it, if it cannot be read. Raises nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[kind])  # type: ignore[valid-type]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s could not be read: %s", what, error, extra={"file": str(path)})
        return []


def warn_if_shared(path: Path, what: str) -> None:
    """Log a warning if other users may read (or a folder: enter) ``path``; ``what`` it is. Raises nothing."""
    try:
        found = path.stat().st_mode
    except OSError:
        return
    if found & 0o077:
        mode = 0o700 if stat.S_ISDIR(found) else 0o600
        log.warning(
            "other users of this machine may read %s %s (mode %04o): run chmod %o %s",
            what,
            path,
            stat.S_IMODE(found),
            mode,
            path,
        )
