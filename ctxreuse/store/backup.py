"""Backups of a store's ledger: copied while it is written, checked, and brought back."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec

from ctxreuse.errors import StoreDamagedError, StoreError
from ctxreuse.store.ledger.opening import TABLES, damaged
from ctxreuse.store.lmdb import apart
from ctxreuse.store.lmdb.env import explain, open_beside
from ctxreuse.store.lmdb.owner import attended, claim, folder
from ctxreuse.store.lmdb.recovery import examine, metas, tables_in
from ctxreuse.store.types import Progress
from ctxreuse.store.verify import verify

__all__ = ["Backup", "backup", "copy_ledger", "restore"]

_COPY_MAP = 1 << 36
_POLL = 0.1


class Backup(msgspec.Struct, frozen=True):
    """A checked copy of a ledger: its store's folder, counts, and bytes; ``replaced``: the file that it replaced."""

    path: str
    sessions: int
    turns: int
    bytes: int
    replaced: str = ""


def backup(path: str | os.PathLike[str], dest: str | os.PathLike[str], progress: Progress | None = None) -> Backup:
    """Copy the ledger of the store in folder ``path``, compacted, into a new store in folder ``dest``, and check it.

    Works beside the process that writes; the copy is of the newest commit when it starts. Raises StoreError if ``dest``
    is in use already, StoreDamagedError if the ledger or what was copied is damaged.
    """
    place, new = folder(path, readonly=True), Path(dest).expanduser().absolute()
    home = place / "ledger"
    if not (home / "data.mdb").exists():
        raise StoreError("there is no ledger here", where=str(home), fix="Name the store's folder with --path")
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise StoreError("there is something here already", where=str(new), fix="Name a folder that is new or empty")
    wrong = examine(home)
    if wrong:
        raise damaged(home, wrong)
    if tables_in(home) < len(TABLES):
        raise StoreError("there is nothing in the ledger yet", where=str(home))
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        copy = folder(new, readonly=False) / "ledger"
        half = copy.with_name("ledger.new")
        half.mkdir(mode=0o700)
        apart.call(f"{__name__}:copy_ledger", str(home), str(half), where=home, progress=progress)
        half.rename(copy)
        found = _checked(new, progress)
        _sync(copy / "data.mdb", copy, new, new.parent)
    except OSError as error:
        raise _failed(error, new) from None
    return found


def copy_ledger(home: str, dest: str, *, progress: Progress) -> None:
    """Copy an environment whose pages are sound, without its free pages. See `apart.call`."""
    env = open_beside(Path(home), TABLES, map_size=_COPY_MAP)
    failed: list[BaseException] = []

    def copy() -> None:
        try:
            env._env.copy(dest, compact=True)
        except BaseException as error:
            failed.append(error)

    try:
        total = env.file_bytes()
        worker = threading.Thread(target=copy)
        worker.start()
        while worker.is_alive():
            worker.join(_POLL)
            with contextlib.suppress(OSError):
                progress(min(total, (Path(dest) / "data.mdb").stat().st_size), total)
        progress(total, total)
        if failed:
            raise explain(failed[0], Path(dest))
    finally:
        env.close()


def restore(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    replace: bool = False,
) -> Backup:
    """Bring the ledger of a backup in folder ``source`` into the store in folder ``path``, after checking it.

    ``replace``: also where there is a ledger; its file is kept beside the new one. The cache of blocks stays: it is
    found by content. Raises StoreError if there is a ledger and ``replace`` is False, StoreOwnedError while a process
    has the store open, StoreDamagedError if the backup is damaged.
    """
    backed, place = folder(source, readonly=True), folder(path, readonly=False)
    if not (backed / "ledger" / "data.mdb").exists():
        fix = "Name a folder that `ctxreuse store backup` or `ctxreuse store rescue` made"
        raise StoreError("there is no backup here", where=str(backed), fix=fix)
    if backed.samefile(place):
        raise StoreError("the backup is the store itself", where=str(place), fix="Name another folder with --path")
    if attended(backed):
        raise StoreError("this store is in use", where=str(backed), fix="Make a backup of it, and restore that")
    found = _checked(backed, progress)
    owner = claim(place, "ledger")
    try:
        home = place / "ledger"
        file = home / "data.mdb"
        there = file.exists() and (tables_in(home) > 0 or not metas(home)) and file.stat().st_size > 0
        if there and not replace:
            fix = "--replace puts the backup in its place and keeps the file, or name another folder with --path"
            raise StoreError("there is a ledger already", where=str(home), fix=fix)
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            half = home / "data.mdb.new"
            shutil.copyfile(backed / "ledger" / "data.mdb", half)
            half.chmod(0o600)
            _sync(half)
            replaced = ""
            if there:
                replaced = str(_keep(file))
            # One step: until then the old file is in its place, from then on the new one.
            half.replace(file)
            (home / "lock.mdb").unlink(missing_ok=True)
            _sync(home, place)
        except OSError as error:
            raise _failed(error, home) from None
    finally:
        owner.end("ledger", clean=False, stamp="")
    return msgspec.structs.replace(found, path=str(place), replaced=replaced)


def _checked(place: Path, progress: Progress | None) -> Backup:
    verdict = verify(place, progress, parts=("ledger",))
    home = place / "ledger"
    (home / "lock.mdb").unlink(missing_ok=True)
    if verdict.not_begun:
        raise StoreError("there is nothing in this ledger", where=str(home), fix="Use another backup")
    if verdict.problems:
        fix = "Use another backup, or save what can be read with `ctxreuse store rescue`"
        raise StoreDamagedError(f"the ledger is damaged: {verdict.problems[0]}", where=str(home), fix=fix)
    return Backup(str(place), verdict.sessions, verdict.turns, (home / "data.mdb").stat().st_size)


def _keep(file: Path) -> Path:
    """Give ``file`` a second name, by the time and beside it, that nothing else has; return that name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for n in itertools.count():
        name = file.with_name(f"{file.name}.{stamp}" + (f"-{n}" if n else ""))
        with contextlib.suppress(FileExistsError):  # replaced before in this second
            os.link(file, name)
            return name
    raise AssertionError


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _failed(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"cannot write: {error.strerror}", where=str(path), fix="Choose a folder with room that you may write"
    )
