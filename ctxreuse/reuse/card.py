"""The chunk card: what calibration measured of a model whose chunks are moved and repaired; written as checked bytes.

::

    offset  size  field (little-endian)
    0       8     magic "CTXRCHNK"
    8       4     version (1)
    12      4     body length b
    16      8     xxh3-64 of the body
    24      b     MessagePack of the card; nothing follows
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import xxhash

from ctxreuse.codec.card import model_digest
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.keys import KEY_BYTES
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.attend.select import Selection
from ctxreuse.reuse.naming import parse

__all__ = ["MAX_CARD", "ChunkCard", "Kind", "Measured", "Read", "card_model", "read_chunk_card", "write_chunk_card"]

#: Where a run stood when it was computed: at the ``head`` of its prompt, holding the tokens that all others attend to
#: (attention sinks), or ``behind`` it.
Kind: TypeAlias = Literal["head", "behind"]

MAGIC, VERSION = b"CTXRCHNK", 1
MAX_CARD = 1 << 20
_PRELUDE = struct.Struct("<8sIIQ")
_MOST = 1024


class Measured(msgspec.Struct, frozen=True):
    """One repair of runs of one kind, measured over ``windows`` texts of ``chunks`` runs of ``tokens`` tokens each.

    ``kl``: nats a token against full prefill, mean over the windows; ``kl_high``: upper bound of that mean (90 %).
    ``top1``: share of equal first choices. ``dnll``: nats a token that the text became less likely. ``recomputed``:
    layer-tokens computed anew, as a share of those of the runs.
    """

    repair: str
    kind: Kind
    chunks: int
    tokens: int
    kl: float
    kl_high: float
    top1: float
    dnll: float
    recomputed: float
    windows: int


class Read(msgspec.Struct, frozen=True):
    """Runs that are attended to where they are held, in ``format``, with all of their pages (``selection`` None) or
    some: measured over ``windows`` texts behind ``tokens`` held ones that were not moved. The figures are `Measured`'s.
    """

    format: Literal["stored", "int8", "int4"]
    selection: Selection | None
    tokens: int
    kl: float
    kl_high: float
    top1: float
    dnll: float
    windows: int

    @property
    def words(self) -> str:
        """For people: ``int8``, ``1/4 of int8``."""
        if self.selection is None:
            return self.format
        return f"{self.selection.share:.0%} of {self.format}, pages of {self.selection.page}"


class ChunkCard(msgspec.Struct, frozen=True):
    """What is known of one model, see `card_model`.

    ``limits``: by kind the largest deviation at which a run may still be used: of probe rows the squared distance of V
    at layer ``probe_layer`` from freshly computed V, over the squared length of that, mean over the run. ``notes``: of
    what, when and by whom, for people. ``reads``: what attending to held runs costs, as far as that was measured.
    """

    model: bytes
    probe_layer: int
    limits: Mapping[Kind, float]
    measured: tuple[Measured, ...]
    notes: Mapping[str, str] = {}
    reads: tuple[Read, ...] = ()


def card_model(space: ModelSpace) -> bytes:
    """32 bytes that name the model a card is of: the same for all numeric types and block sizes of its weights."""
    return model_digest(space)


def write_chunk_card(card: ChunkCard) -> bytes:
    """The bytes of a card. Raises FormatError for a card that could not be read back."""
    body = msgspec.msgpack.encode(card, order="deterministic")
    data = _PRELUDE.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body
    read_chunk_card(data)
    return data


def read_chunk_card(data: bytes | bytearray | memoryview) -> ChunkCard:
    """Read a card; raises FormatError with the reason for bytes that are none."""
    view = memoryview(data)
    if not _PRELUDE.size <= len(view) <= MAX_CARD:
        raise _fail(f"of {len(view)} bytes")
    magic, version, length, check = _PRELUDE.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise _fail(f"has magic {bytes(magic)!r} and version {version}, this reads version {VERSION}")
    body = view[_PRELUDE.size :]
    if length != len(body) or xxhash.xxh3_64_intdigest(body) != check:
        raise _fail("is damaged")
    try:
        card = msgspec.msgpack.decode(body, type=ChunkCard)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _fail(f"is malformed: {error}") from None
    _check(card)
    return card


def _check(card: ChunkCard) -> None:
    if len(card.model) != KEY_BYTES or not 0 <= card.probe_layer < 1 << 16 or len(card.measured) > _MOST:
        raise _fail("has impossible counts")
    if not all(math.isfinite(limit) and limit >= 0 for limit in card.limits.values()):
        raise _fail("has a limit out of range")
    if len(card.notes) > 64 or any(len(text) > 4096 for note in card.notes.items() for text in note):
        raise _fail("has too much to say")
    for one in card.measured:
        try:
            parse(one.repair)
        except ConfigError as error:
            raise _fail(f"names {error.what}") from None
        counts = 0 < one.chunks < 1 << 16 and 0 < one.tokens < 1 << 24 and 0 < one.windows < 1 << 24
        if not (_sound(one) and counts and 0 <= one.recomputed <= 1):
            raise _fail(f"has figures of {one.repair} that cannot be")
    if len({(one.repair, one.kind, one.chunks, one.tokens) for one in card.measured}) != len(card.measured):
        raise _fail("has a measurement twice")
    for read in card.reads:
        pages = read.selection
        if not (_sound(read) and 0 < read.tokens < 1 << 24 and 0 < read.windows < 1 << 24):
            raise _fail(f"has figures of reading {read.format} that cannot be")
        if pages is not None and not (0 < pages.share <= 1 and min(pages.page, pages.least, pages.queries) > 0):
            raise _fail("names a selection that cannot be")
    if len(card.reads) > _MOST or len({(read.format, read.selection) for read in card.reads}) != len(card.reads):
        raise _fail("has a reading twice")


def _sound(one: Measured | Read) -> bool:
    # Comparisons with a NaN are false, so none gets through.
    return 0 <= one.kl <= one.kl_high < 1e4 and 0 <= one.top1 <= 1 and abs(one.dnll) < 1e4


def _fail(what: str) -> FormatError:
    return FormatError(f"chunk card {what}", fix="Calibrate again: `ctxreuse calibrate NAME --chunks`")
