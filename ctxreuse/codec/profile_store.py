"""Where profiles are kept: one folder a user, a subfolder a model, files named by digest."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import platformdirs

from ctxreuse.codec.profile import CodecProfile, model_digest
from ctxreuse.codec.profile_bytes import MAX_PROFILE, profile_digest, read_profile
from ctxreuse.errors import FormatError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.private import make_private_folder

__all__ = ["ProfileStore", "SingleProfileStore"]

log = logging.getLogger(__name__)

#: Profiles that are in use in this process, by digest: one may weigh a hundred megabytes, and several codecs have it.
_SHARED: WeakValueDictionary[str, CodecProfile] = WeakValueDictionary()


class ProfileStore:
    """The profiles of this user; ``folder`` is $CTXREUSE_CARDS, else ``cards`` in the user's cache folder.

    Any thread and any number of processes may read and add at once: a file appears complete or not at all.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        fallback = os.environ.get("CTXREUSE_CARDS") or Path(platformdirs.user_cache_dir("ctxreuse")) / "cards"
        self.folder = Path(folder or fallback)

    def __fspath__(self) -> str:
        return str(self.folder)

    def paths(self, space: ModelSpace) -> list[Path]:
        """Files of the model's profiles, newest first; [] if there is none."""
        found = self.folder.joinpath(model_digest(space).hex()[:16]).glob("*.card")
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def everything(self) -> Iterator[tuple[str, CodecProfile, int]]:
        """Yield (digest as hex, profile, bytes) of the profiles of all models, newest first; damaged files are skipped.

        Raises OSError for a file that cannot be read.
        """
        paths = self.folder.glob("*/*.card")
        for path in sorted(paths, key=lambda path: (-path.stat().st_mtime_ns, path.name)):
            data = path.read_bytes()
            try:
                yield profile_digest(data).hex(), read_profile(data), len(data)
            except FormatError:
                continue

    def newest(self, space: ModelSpace) -> tuple[str, CodecProfile] | None:
        """(digest as hex, profile) of the newest readable profile of a model, None if there is none."""
        for path in self.paths(space):
            try:
                return self._read(path, space)
            except (FormatError, OSError):
                continue
        return None

    def find(self, space: ModelSpace, digest16: str) -> tuple[str, CodecProfile] | None:
        """The model's profile whose digest begins with these 16 hex digits; FormatError if its file is damaged."""
        return self._read(self._path(space, digest16), space) if self.holds(space, digest16) else None

    def holds(self, space: ModelSpace, digest16: str) -> bool:
        """Return True if there is a file of that name; what is in it was not looked at."""
        return len(digest16) == 16 and digest16.isalnum() and self._path(space, digest16).exists()

    def data(self, space: ModelSpace, digest16: str) -> bytes | None:
        """The bytes of a profile, to hand to a peer; None if it is not here."""
        return self._path(space, digest16).read_bytes() if self.holds(space, digest16) else None

    def add(self, data: bytes) -> Path:
        """Check and keep a profile; returns its file. Raises FormatError for bytes that are none."""
        profile = read_profile(data)
        return _put(self.folder / profile.model.hex()[:16] / f"{profile_digest(data).hex()[:16]}.card", data)

    def _path(self, space: ModelSpace, digest16: str) -> Path:
        return self.folder / model_digest(space).hex()[:16] / f"{digest16}.card"

    def _read(self, path: Path, space: ModelSpace) -> tuple[str, CodecProfile]:
        if path.stat().st_size > MAX_PROFILE:
            raise FormatError("profile is too large", where=str(path))
        data = path.read_bytes()
        digest = profile_digest(data).hex()
        if digest[:16] != path.stem:
            raise FormatError("profile is damaged", where=str(path), fix="Delete it and calibrate again")
        profile = _SHARED.get(digest) or _SHARED.setdefault(digest, read_profile(data))
        if profile.model != model_digest(space):
            raise FormatError("profile belongs to another model", where=str(path))
        return digest, profile


class ModelProfile(Protocol):
    """A profile of one model; ``model``: its `model_digest`."""

    @property
    def model(self) -> bytes: ...


P = TypeVar("P", bound=ModelProfile)


class SingleProfileStore(Generic[P]):
    """This user's profiles of another kind, one file a model beside the codec's; ``folder`` as for `ProfileStore`.

    Any thread and any number of processes may read and add at once: a file appears complete or not at all.
    """

    def __init__(
        self,
        folder: Path | str | None,
        name: str,
        read: Callable[[bytes], P],
        write: Callable[[P], bytes],
        *,
        most: int,
    ) -> None:
        """``name``: of each file, not ``*.card``; ``most``: bytes of one that is read; ``read`` raises FormatError."""
        self.folder = ProfileStore(folder).folder
        self._name, self._read, self._write, self._most = name, read, write, most

    def path(self, space: ModelSpace) -> Path:
        """The file of a model's profile; it need not exist."""
        return self._path(model_digest(space))

    def _path(self, model: bytes) -> Path:
        return self.folder / model.hex()[:16] / self._name

    def find(self, space: ModelSpace) -> P | None:
        """The model's profile; None where none can be read, with a warning if there is a file."""
        path = self.path(space)
        try:
            if path.stat().st_size > self._most:
                raise FormatError("it is too large")
            profile = self._read(path.read_bytes())
            if not self.fits(profile, space):
                raise FormatError("it is of another model")
        except FileNotFoundError:
            return None
        except (FormatError, OSError) as error:
            log.warning("the profile at %s cannot be used: %s", path, error)
            return None
        return profile

    def fits(self, profile: P, space: ModelSpace) -> bool:
        """Return True if the profile is of this model."""
        return profile.model == model_digest(space)

    def add(self, profile: P) -> Path:
        """Keep a profile in the place of an older one of its model; returns its file. Raises FormatError, OSError."""
        return _put(self._path(profile.model), self._write(profile))


def _put(path: Path, data: bytes) -> Path:
    """Write a file that appears complete or not at all; returns it. Raises OSError."""
    make_private_folder(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path
