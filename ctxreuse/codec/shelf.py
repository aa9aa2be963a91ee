"""Where cards are kept: one folder a user, a subfolder a model, files named by digest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from ctxreuse.codec.card import Card, model_digest
from ctxreuse.codec.card_bytes import MAX_CARD, card_digest, read_card
from ctxreuse.errors import FormatError
from ctxreuse.model import ModelSpace

__all__ = ["Shelf", "put_card"]


class Shelf:
    """The cards of this user; ``folder`` is $CTXREUSE_CARDS, else ``cards`` in the user's cache folder.

    Any thread and any number of processes may read and add at once: a file appears complete or not at all.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        fallback = os.environ.get("CTXREUSE_CARDS") or Path(platformdirs.user_cache_dir("ctxreuse")) / "cards"
        self.folder = Path(folder or fallback)

    def __fspath__(self) -> str:
        return str(self.folder)

    def paths(self, space: ModelSpace) -> list[Path]:
        """Files of the model's cards, newest first; [] if there is none."""
        found = self.folder.joinpath(model_digest(space).hex()[:16]).glob("*.card")
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def newest(self, space: ModelSpace) -> tuple[str, Card] | None:
        """(digest as hex, card) of the newest readable card of a model, None if there is none."""
        for path in self.paths(space):
            try:
                return self._read(path, space)
            except (FormatError, OSError):
                continue
        return None

    def find(self, space: ModelSpace, digest16: str) -> tuple[str, Card] | None:
        """The model's card whose digest begins with these 16 hex digits; FormatError if its file is damaged."""
        path = self.folder / model_digest(space).hex()[:16] / f"{digest16}.card"
        return self._read(path, space) if len(digest16) == 16 and digest16.isalnum() and path.exists() else None

    def data(self, space: ModelSpace, digest16: str) -> bytes | None:
        """The bytes of a card, to hand to a peer; None if it is not here."""
        path = self.folder / model_digest(space).hex()[:16] / f"{digest16}.card"
        return path.read_bytes() if len(digest16) == 16 and digest16.isalnum() and path.exists() else None

    def add(self, data: bytes) -> Path:
        """Check and keep a card; returns its file. Raises FormatError for bytes that are none."""
        card = read_card(data)
        return put_card(self.folder / card.model.hex()[:16] / f"{card_digest(data).hex()[:16]}.card", data)

    def _read(self, path: Path, space: ModelSpace) -> tuple[str, Card]:
        if path.stat().st_size > MAX_CARD:
            raise FormatError("card is too large", where=str(path))
        data = path.read_bytes()
        digest = card_digest(data).hex()
        if digest[:16] != path.stem:
            raise FormatError("card is damaged", where=str(path), fix="Delete it and calibrate again")
        card = read_card(data)
        if card.model != model_digest(space):
            raise FormatError("card belongs to another model", where=str(path))
        return digest, card


def put_card(path: Path, data: bytes) -> Path:
    """Write a card's file, which appears complete or not at all; returns it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path
