"""Where chunk cards are kept: beside the codec's cards, one file a model, the newest in the place of the one before."""

from __future__ import annotations

import logging
from pathlib import Path

from ctxreuse.codec.shelf import Shelf, put_card
from ctxreuse.errors import FormatError
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.card import MAX_CARD, ChunkCard, card_model, read_chunk_card, write_chunk_card

__all__ = ["ChunkShelf"]

log = logging.getLogger(__name__)


class ChunkShelf:
    """The chunk cards of this user; ``folder`` as for `codec.Shelf`.

    Any thread and any number of processes may read and add at once: a file appears complete or not at all.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Shelf(folder).folder

    def path(self, space: ModelSpace) -> Path:
        """The file of a model's card; it need not exist."""
        return self._path(card_model(space))

    def _path(self, model: bytes) -> Path:
        # Not ``*.card``: those are the codec's.
        return self.folder / model.hex()[:16] / "chunks.measured"

    def find(self, space: ModelSpace) -> ChunkCard | None:
        """The model's card; None, with a warning if there is a file, where none can be read."""
        path = self.path(space)
        try:
            if path.stat().st_size > MAX_CARD:
                raise FormatError("chunk card is too large", where=str(path))
            card = read_chunk_card(path.read_bytes())
        except FileNotFoundError:
            return None
        except (FormatError, OSError) as error:
            log.warning("the chunk card at %s cannot be used: %s", path, error)
            return None
        if card.model != card_model(space):
            log.warning("the chunk card at %s is of another model", path)
            return None
        return card

    def add(self, card: ChunkCard) -> Path:
        """Keep a card in the place of an older one of its model; returns its file. Raises FormatError, OSError."""
        return put_card(self._path(card.model), write_chunk_card(card))
