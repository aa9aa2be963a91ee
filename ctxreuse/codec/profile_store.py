"""Where profiles are kept: one folder a user, a subfolder a model, files named by digest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from ctxreuse.codec.profile import CodecProfile, model_digest
from ctxreuse.codec.profile_bytes import MAX_PROFILE, profile_digest, read_profile
from ctxreuse.errors import FormatError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.private import make_private_folder

__all__ = ["ProfileStore", "put_profile"]


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
        path = self.folder / model_digest(space).hex()[:16] / f"{digest16}.card"
        return self._read(path, space) if len(digest16) == 16 and digest16.isalnum() and path.exists() else None

    def data(self, space: ModelSpace, digest16: str) -> bytes | None:
        """The bytes of a profile, to hand to a peer; None if it is not here."""
        path = self.folder / model_digest(space).hex()[:16] / f"{digest16}.card"
        return path.read_bytes() if len(digest16) == 16 and digest16.isalnum() and path.exists() else None

    def add(self, data: bytes) -> Path:
        """Check and keep a profile; returns its file. Raises FormatError for bytes that are none."""
        profile = read_profile(data)
        return put_profile(self.folder / profile.model.hex()[:16] / f"{profile_digest(data).hex()[:16]}.card", data)

    def _read(self, path: Path, space: ModelSpace) -> tuple[str, CodecProfile]:
        if path.stat().st_size > MAX_PROFILE:
            raise FormatError("profile is too large", where=str(path))
        data = path.read_bytes()
        digest = profile_digest(data).hex()
        if digest[:16] != path.stem:
            raise FormatError("profile is damaged", where=str(path), fix="Delete it and calibrate again")
        profile = read_profile(data)
        if profile.model != model_digest(space):
            raise FormatError("profile belongs to another model", where=str(path))
        return digest, profile


def put_profile(path: Path, data: bytes) -> Path:
    """Write a profile's file, which appears complete or not at all; returns it. Raises OSError."""
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
