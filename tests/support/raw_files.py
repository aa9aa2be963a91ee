"""Every file below a folder searched byte by byte: for texts, and for token ids in the forms that programs write."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

__all__ = ["found_in_files"]

#: Token ids in a row that no other text has by chance.
_RUN = 8


def found_in_files(folder: Path, texts: Sequence[str], ids: Sequence[Sequence[int]] = ()) -> list[str]:
    """Return ``file: what`` for each trace of ``texts``, or of eight of ``ids`` in a row, below a folder."""
    wanted = [(repr(text), needle) for text in texts for needle in _texts(text)]
    wanted += [(f"ids from {at}", needle) for run in ids for at, needle in _runs(run)]
    found: list[str] = []
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            raw = file.read_bytes()
            found += [f"{file.relative_to(folder)}: {what}" for what, needle in wanted if needle in raw]
    return list(dict.fromkeys(found))


def _texts(text: str) -> Iterator[bytes]:
    for name in ("utf-8", "utf-16-le"):
        yield text.encode(name)
    yield msgspec.json.encode(text)[1:-1]
    yield zlib.compress(text.encode())[2:-4]


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    for at in range(len(ids) - _RUN + 1):
        run = np.asarray(ids[at : at + _RUN])
        for kind in ("<i4", "<i8", "<u2", ">i4"):
            yield at, run.astype(kind).tobytes()
        yield at, msgspec.msgpack.encode(run.tolist())[1:]
        yield at, msgspec.json.encode(run.tolist())[1:-1]
