"""What is remembered of a request, so that it and later ones can explain their misses."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.store.gone import SHORT

__all__ = ["About", "Entry", "Head", "Lack", "Part", "decoded", "encoded"]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One part of a prompt: its ``name`` (a role, or what its caller calls it) and the token position where it ends."""

    name: str
    end: int


class About(msgspec.Struct, frozen=True):
    """What a caller says of a request. ``request``: its id ("": one is made); ``alias``: another name for it;
    ``session``: the conversation it belongs to; ``parts``: of the prompt, in order (none: it is one part); ``opening``:
    the text of the first one, by which it is known to models with other tokenizers; of it only a keyed hash is kept."""

    request: str = ""
    alias: str = ""
    session: str = ""
    parts: tuple[Part, ...] = ()
    opening: str = ""


class Lack(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``start`` to ``end`` were computed, because of ``reason`` (see `ctxreuse.why.reasons`).

    ``at``, ``rule``, ``by``: when what was held had left, by which rule, and the beginning of a key for which room was
    made then; 0 and "" where that is not so.
    """

    start: int
    end: int
    reason: str
    at: float = 0.0
    rule: str = ""
    by: bytes = b""


class Entry(msgspec.Struct, array_like=True, tag="request"):
    """One request. ``keys``: the first 8 bytes of each of its prefix keys, answer included; ``ids``: all token ids,
    little-endian int32, or nothing where texts are not kept; ``mark`` and ``opening``: keyed hashes of its first
    block's ids and of its first part's text, which are the same in all model spaces and for all tenants. ``tenant``: a
    hash. ``at``: seconds since 1970. ``unit``: tokens of a block. ``moved``, ``mended``, ``gate``: see
    `ctxreuse.runtime.Usage`."""

    request: str
    alias: str
    session: str
    at: float
    tenant: bytes
    space: bytes
    unit: int
    tokens: int
    cached: int
    by_source: dict[str, int]
    why: str
    lossy: str | None
    parts: tuple[Part, ...]
    lacks: tuple[Lack, ...]
    mark: bytes
    opening: bytes
    keys: bytes = b""
    ids: bytes = b""
    moved: int = 0
    mended: int = 0
    gate: str = ""

    @property
    def nbytes(self) -> int:
        """What it takes in memory, about."""
        return 1000 + len(self.keys) + len(self.ids) + 100 * (len(self.parts) + len(self.lacks))

    @property
    def numbers(self) -> Tokens:
        """Its token ids, int32 [n]; none where they are not kept."""
        return np.frombuffer(self.ids, "<i4")

    def named(self, name: str) -> bool:
        """True if it is called so."""
        return bool(name) and name in (self.request, self.alias)


class Head(msgspec.Struct, array_like=True, tag="head"):
    """What the requests in a file refer to: the key of their marks, and the model spaces that computed them."""

    secret: bytes
    spaces: tuple[ModelSpace, ...] = ()


_record = msgspec.msgpack.Decoder(Entry | Head)


def encoded(record: Entry | Head) -> bytes:
    """As it stands in a file."""
    return msgspec.msgpack.encode(record)


def decoded(raw: bytes, path: Path) -> Entry | Head:
    """Read back. Raises FormatError, with advice, for what this version did not write."""
    try:
        record: Entry | Head = _record.decode(raw)
        fault = _fault(record) if isinstance(record, Entry) else "" if len(record.secret) == 16 else "a short secret"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        fault = str(error)
    if fault:
        fix = "Delete the file: nothing but explanations of past misses is lost"
        raise FormatError(f"the record of requests is wrong: {fault}", where=str(path), fix=fix)
    return record


def _fault(entry: Entry) -> str:
    """What no request can be like; "" if it can."""
    n, ends = entry.tokens, [0, *(part.end for part in entry.parts)]
    spans = [edge for lack in entry.lacks for edge in (lack.start, lack.end)]
    if not (1 <= entry.unit <= 1 << 20 and 0 <= entry.cached <= n <= 1 << 31 and math.isfinite(entry.at)):
        return "a number out of range"
    if ends != sorted(ends) or ends[-1] > n or any(part.end < 1 for part in entry.parts):
        return "parts out of order"
    if spans != sorted(spans) or any(not 0 <= edge <= n for edge in spans):
        return "spans out of order"
    if len(entry.keys) % SHORT or len(entry.ids) % 4 or {len(entry.mark), len(entry.opening)} - {0, SHORT}:
        return "keys or ids of another size"
    if min(entry.moved, entry.mended) < 0 or entry.moved > entry.cached:
        return "more moved than reused"
    if entry.ids and (len(entry.ids) < 4 * n or int(entry.numbers.min()) < 0):
        return "ids that are none"
    if any(not math.isfinite(lack.at) for lack in entry.lacks):
        return "a time that is none"
    return ""
