"""KV events of an engine, as vLLM and SGLang publish them: batches of MessagePack, read within bounds.

A batch is [time, [event, …], …]; an event is a map with its ``type`` (vLLM) or a list that begins with it (SGLang, and
vLLM until 0.11). Types and fields that are not known here are passed over.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ctxreuse.errors import FormatError

__all__ = ["MOST_BYTES", "BlocksRemoved", "BlocksStored", "Cleared", "EventBatch", "KvEvent", "parse_batch"]

#: Bytes of a batch, which has the tokens of one step.
MOST_BYTES = 8 << 20
#: Kinds of layers whose KV has all of a prefix: what others have says nothing about it.
_WHOLE = frozenset(("full_attention", "mla_attention"))


class BlocksStored(NamedTuple):
    """Blocks of one sequence, in order: ``ids`` name them, ``tokens`` are theirs as bytes.

    ``extra``: what else decides about each one's KV, b"" if nothing does: an adapter, a tenant's salt, images.
    """

    ids: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[bytes, ...]
    extra: tuple[bytes, ...]
    size: int
    place: str
    adapter: str = ""


class BlocksRemoved(NamedTuple):
    """Blocks that are not in ``place`` any more."""

    ids: tuple[bytes, ...]
    place: str


class Cleared(NamedTuple):
    """The engine has nothing any more."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | Cleared


class EventBatch(NamedTuple):
    """Events at an engine's ``time``, in seconds."""

    time: float
    events: list[KvEvent]


# As arrays these have the fields that both engines have in this order; as maps, those of vLLM.
class _Stored(msgspec.Struct):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Tagged(msgspec.Struct):
    type: str = ""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch, _tagged = msgspec.msgpack.Decoder(_Batch), msgspec.msgpack.Decoder(_Tagged)
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_name = msgspec.msgpack.Decoder(str)
_TYPES: dict[str, type[_Stored | _Removed]] = {"BlockStored": _Stored, "BlockRemoved": _Removed}


def parse_batch(data: bytes | memoryview) -> EventBatch:
    """Parse one batch. Raises FormatError if it is none, or larger than MOST_BYTES."""
    if len(data) > MOST_BYTES:
        raise FormatError(f"a batch of KV events has {len(data)} bytes, at most {MOST_BYTES} are read")
    try:
        batch = _batch.decode(data)
        events = [event for raw in batch.events if (event := _event(raw)) is not None]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError, TypeError) as error:
        raise FormatError(f"no batch of KV events: {error}") from None
    return EventBatch(batch.ts, events)


def _event(raw: msgspec.Raw) -> KvEvent | None:
    fields: dict[str, Any] | None = None
    first = memoryview(raw)[0]
    if first >> 4 == 0x9 or first in (0xDC, 0xDD):
        values = _list.decode(raw)
        kind = _name.decode(values[0]) if values else ""
        if kind in _TYPES:
            fields = dict(zip(_TYPES[kind].__struct_fields__, map(msgspec.msgpack.decode, values[1:])))
    else:
        kind = _tagged.decode(raw).type
        if kind in _TYPES:
            fields = msgspec.msgpack.decode(raw, type=dict[str, Any])
    if kind == "AllBlocksCleared":
        return Cleared()
    if fields is None:
        return None
    found = msgspec.convert(fields, _TYPES[kind])
    if isinstance(found, _Removed):
        return BlocksRemoved(tuple(map(_id, found.block_hashes)), _place(found.medium, found.group_idx))
    return _stored(found)


def _stored(event: _Stored) -> BlocksStored | None:
    if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in _WHOLE:
        return None
    size, count = event.block_size, len(event.block_hashes)
    if size <= 0 or len(event.token_ids) != size * count:
        raise ValueError(f"{len(event.token_ids)} tokens in {count} blocks of {size}")
    ids = array("I", event.token_ids).tobytes()
    adapter = event.lora_name or ""
    keys = event.extra_keys if event.extra_keys is not None else [[adapter] if adapter else None] * count
    if len(keys) != count:
        raise ValueError(f"{len(keys)} extra keys of {count} blocks")
    return BlocksStored(
        tuple(map(_id, event.block_hashes)),
        None if event.parent_block_hash is None else _id(event.parent_block_hash),
        tuple(ids[at : at + 4 * size] for at in range(0, len(ids), 4 * size)),
        tuple(b"" if not key else msgspec.msgpack.encode(key) for key in keys),
        size,
        _place(event.medium, event.group_idx),
        adapter,
    )


def _id(value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % value


def _place(medium: str | None, group: int | None) -> str:
    return f"{medium or 'GPU'}/{group or 0}"
