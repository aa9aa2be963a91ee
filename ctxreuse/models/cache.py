"""Where converted models live on disk: list, resolve and remove them, and know the digest of their weights."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.models.catalog import CATALOG, ModelEntry, find

__all__ = [
    "RECORD_FILE",
    "RECORD_SCHEMA",
    "Listed",
    "ModelRecord",
    "exclusive",
    "file_digest",
    "ls",
    "path",
    "record_of",
    "resolve",
    "rm",
    "root",
    "stage",
    "weights_digest",
]

RECORD_FILE = "ctxreuse.json"
RECORD_SCHEMA = 1
_RECORD_LIMIT = 1 << 20
_HASH_CHUNK = 1 << 22


class ModelRecord(msgspec.Struct, frozen=True):
    """What a converted folder says about itself (``ctxreuse.json``). Digests are SHA-256 in hex.

    ``weights_sha256`` is that of ``model.safetensors``; it stands for the file only while the file still has
    ``weights_bytes`` and ``weights_mtime_ns``. ``files`` maps each file of the folder to its size in bytes.
    """

    schema: int
    name: str
    title: str
    source: tuple[str, ...]
    licence: str
    gguf_sha256: str
    weights_sha256: str
    weights_bytes: int
    weights_mtime_ns: int
    tokenizer_sha256: str
    files: dict[str, int]


class Listed(msgspec.Struct, frozen=True):
    """One line of `ls`: a catalog model and what of it is on this machine.

    ``record`` is None unless it was converted, ``gguf`` unless the GGUF is there.
    """

    entry: ModelEntry
    path: Path
    bytes: int
    record: ModelRecord | None
    gguf: Path | None


class _Memo(msgspec.Struct, frozen=True):
    """A digest computed earlier, with the state of the files it was computed from: (name, size, mtime_ns)."""

    files: tuple[tuple[str, int, int], ...]
    digest: str


def root() -> Path:
    """The folder that holds all models: ``$CTXREUSE_MODELS``, else ``models`` in the user's cache of ctxreuse."""
    override = os.environ.get("CTXREUSE_MODELS")
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ctxreuse")) / "models"


def path(name: str) -> Path:
    """Where the catalog model `name` lives or would live. Raises ConfigError for an unknown name."""
    return root() / find(name).name


def stage(name: str) -> Path:
    """The folder in which `name` is built; only the holder of `exclusive(name)` may touch it."""
    return root() / f".{name}.stage"


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock that serialises all changes to the model `name`, across threads and processes; blocks.

    Raises EngineError if the cache folder cannot be written.
    """
    try:
        root().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root() / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EngineError(
            f"the model cache cannot be written: {error.strerror}",
            where=str(root()),
            fix="Point CTXREUSE_MODELS at a folder that can be written",
        ) from error
    try:
        # The lock file is never deleted: deleting it would let two processes lock two different files of one name.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def record_of(folder: Path) -> ModelRecord | None:
    """The record of a converted folder, or None if it has none of this schema or a file it names is missing or cut."""
    try:
        with open(folder / RECORD_FILE, "rb") as file:
            record = msgspec.json.decode(file.read(_RECORD_LIMIT), type=ModelRecord)
        if record.schema != RECORD_SCHEMA or not record.files:
            return None
        if any((folder / name).stat().st_size != size for name, size in record.files.items()):
            return None
    except (OSError, msgspec.DecodeError, ValueError):
        return None
    return record


def ls() -> tuple[Listed, ...]:
    """Every catalog model, in catalog order, with what is on this machine."""
    lines = []
    for entry in CATALOG.values():
        folder = path(entry.name)
        size = sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
        gguf = folder / f"{entry.name}.gguf"
        lines.append(Listed(entry, folder, size, record_of(folder), gguf if gguf.is_file() else None))
    return tuple(lines)


def rm(name: str) -> bool:
    """Delete the model `name` and whatever an interrupted fetch left of it; False if there was nothing.

    A process that has the weights open or mapped keeps its copy until it closes them.
    Raises ConfigError for an unknown name, EngineError if the cache cannot be written.
    """
    folder = path(name)
    with exclusive(name):
        targets = [item for item in (folder, stage(name)) if item.exists()]
        try:
            for target in targets:
                shutil.rmtree(target)
        except OSError as error:
            raise EngineError(f"model {name!r} could not be removed: {error}", where=str(root())) from error
    return bool(targets)


def resolve(name_or_folder: str | os.PathLike[str]) -> Path:
    """The Hugging Face folder meant by a catalog name or a path; a catalog name wins over a folder called the same.

    Never fetches. Raises ConfigError if the model has not been fetched or the folder has no ``config.json``.
    """
    text = os.fspath(name_or_folder)
    if text in CATALOG:
        folder = path(text)
        if record_of(folder) is None:
            fix = f"Run: ctxreuse model get {text} --engine torch"
            raise ConfigError(f"model {text!r} is not converted on this machine", where=str(folder), fix=fix)
        return folder
    folder = Path(text).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{text!r} is neither a known model nor a folder with a config.json",
            fix=f"Known models: {', '.join(CATALOG)}; or name a Hugging Face folder",
        )
    return folder


def weights_digest(folder: str | os.PathLike[str], patterns: Sequence[str] = ("*.safetensors", "*.bin")) -> str:
    """SHA-256 (64 hex digits) over all files that match one of ``patterns``, one after the other by name.

    For a single file it is that file's own SHA-256. The files are read once; later calls recognise them by path, size
    and mtime (a converted model's digest comes from its record on the same terms), so a change that keeps both the
    size and the mtime goes unseen. ``config.json`` is not covered. Raises ConfigError if there are no weights.
    """
    base = Path(folder).absolute()
    files = sorted({item for pattern in patterns for item in base.glob(pattern) if item.is_file()})
    if not files:
        raise ConfigError(f"the folder holds no {' or '.join(patterns)} file", where=str(base))
    state = _state(files)
    record = record_of(base)
    if record is not None and state == (("model.safetensors", record.weights_bytes, record.weights_mtime_ns),):
        return record.weights_sha256
    return _digest(files, base)


def file_digest(file: str | os.PathLike[str]) -> str:
    """SHA-256 (64 hex digits) of one file, such as a GGUF; later calls recognise it as `weights_digest` does."""
    return _digest([Path(file).absolute()], Path(file).absolute())


def _digest(files: list[Path], of: Path) -> str:
    """SHA-256 of files one after the other, remembered under the path ``of``."""
    state = _state(files)
    note = root() / ".digests" / f"{hashlib.sha256(os.fsencode(of.resolve())).hexdigest()}.json"
    known = _recall(note)
    if known is not None and known.files == state:
        return known.digest
    digest = hashlib.sha256()
    for item in files:
        with open(item, "rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
    if _state(files) == state:  # a file that changed while it was read must not be remembered
        _remember(note, _Memo(state, digest.hexdigest()))
    return digest.hexdigest()


def _state(files: list[Path]) -> tuple[tuple[str, int, int], ...]:
    stats = [(item.name, item.stat()) for item in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _recall(note: Path) -> _Memo | None:
    try:
        with open(note, "rb") as file:
            return msgspec.json.decode(file.read(_RECORD_LIMIT), type=_Memo)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def _remember(note: Path, memo: _Memo) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=note.parent)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(memo))
        os.replace(temporary, note)
    except OSError:
        pass  # the memo only saves time: a read-only cache must not stop a digest
