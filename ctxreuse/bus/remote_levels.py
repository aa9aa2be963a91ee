"""At which levels a cloud can send blocks that can be read here, and how large they will be."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ctxreuse.bus.base import Greeting
from ctxreuse.codec import Codec, LevelName, Shelf
from ctxreuse.cost import Level
from ctxreuse.errors import CtxReuseError
from ctxreuse.levels import PACKED
from ctxreuse.model import ModelSpace

__all__ = ["Levels"]

#: Bytes of a coded block beside its streams: head and padding.
_HEAD = 4096
_KEPT = 16


class Levels:
    """What cards of ``shelf`` and clouds have in common. Any thread may call."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()
        self._codecs: OrderedDict[tuple[bytes, str], Codec] = OrderedDict()

    def of(self, space: ModelSpace, greeting: Greeting, encoding: tuple[float, float]) -> tuple[Level, ...]:
        """The levels of ``space`` at which a cloud with this greeting can send, least damage first. ``encoding``:
        seconds in which it encodes a byte of raw planes, packed and lossy."""
        found = []
        packed, lossy = (each * space.token_nbytes * space.block_tokens for each in encoding)
        if PACKED in greeting.packs:
            codec = self._codec(space, "")
            if codec is not None:
                found.append(Level(PACKED, codec.nbytes(PACKED) + _HEAD, packed))
        for theirs, digest in greeting.cards:
            card16 = digest.hex()[:16]
            codec = self._codec(space, card16) if theirs == space.digest else None
            if codec is None:
                continue
            for info in reversed(codec.levels):
                if info.lossy:
                    name = str(LevelName(info.name, card16))
                    found.append(Level(name, codec.nbytes(info.name) + _HEAD, lossy))
        return tuple(found)

    def _codec(self, space: ModelSpace, card16: str) -> Codec | None:
        """With the card of that name, "" for none; None if it is not here (yet)."""
        name = space.digest, card16
        with self._lock:
            codec = self._codecs.get(name)
        if codec is not None:
            return codec
        try:
            card = self._shelf.find(space, card16) if card16 else None
            if card16 and card is None:
                return None
            codec = Codec(space, card)
        except (CtxReuseError, OSError):
            return None
        with self._lock:
            self._codecs[name] = codec
            while len(self._codecs) > _KEPT:
                self._codecs.popitem(last=False)
        return codec
