"""Chunks of LMCache as blocks of our codec: coded by a model's calibration profile, or packed without loss."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import MAX_TOKENS, BlockView, BlockWriter, Plane, block_layout, layout_of, parse
from ctxreuse.block.levels import EXACT, PACKED, parse_level
from ctxreuse.codec import Codec, CodecProfile, ProfileStore, model_digest
from ctxreuse.dtypes import BITS, FLOATS, ITEM_BYTES
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.identity.keys import ROOT
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse_cloud.connectors.chunks.place import PlaceFinder, join_planes, split_planes

__all__ = ["ChunkCodec", "ChunkShape", "chunk_key"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

#: More than the head of a block of one plane, with its padding, and the head of a packed plane.
_HEAD_BYTES = 8192
_ROLE = "chunk"
#: Magic, version and flags, and header length stand before a block's total length.
_TOTAL = struct.Struct("<16xQ")


class ChunkShape(NamedTuple):
    """What a chunk's bytes are: ``dtype`` as in a model space, or ``uint8`` for bytes that are no KV."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ChunkCodec:
    """Encodes chunks at a level, and decodes those of any level and of any profile of the model. Any thread may call.

    A chunk that the profile does not describe (another shape, or numbers whose position it cannot find) is packed
    without loss.

    Args:
        level: ``exact+rans``, or one of the profile's.
        model: what was calibrated, by name or folder, or the first digits of a profile's digest; "" for exact+rans.
        store: where profiles are kept; by default the user's.

    Raises ConfigError for a level that there is not, a model without a profile, or one that cannot be coded in chunks.
    """

    def __init__(self, level: str, model: str = "", store: ProfileStore | None = None) -> None:
        self._level = level
        self._profiles = _profiles_of(model, store or ProfileStore()) if model else {}
        self._finder: PlaceFinder | None = None
        self._codecs: dict[tuple[str, str], Codec] = {}
        self._packer = Codec(_space(1, 1, 1, "", FLOATS[0]))
        self._reported: set[str] = set()
        if self._profiles:
            self._newest = next(iter(self._profiles))
            self._finder = PlaceFinder(self._profiles[self._newest])
            self._codec(self._newest, FLOATS[0]).info(level)  # raises for a level that there is not
        elif level != PACKED:
            raise ConfigError(
                f"level {level!r} needs the profile of a model",
                fix=f"Add the setting 'model', what `ctxreuse calibrate` was given, or choose level {PACKED}",
            )
        if level == EXACT:
            raise ConfigError(f"level {EXACT} codes nothing", fix=f"Choose {PACKED}, or leave the serde out")

    def most_bytes(self, chunk: ChunkShape) -> int:
        """Return how many bytes an encoded chunk of this shape takes at most."""
        return chunk.nbytes + _HEAD_BYTES

    def encode(self, data: Bytes, chunk: ChunkShape, key: bytes, into: Bytes) -> int:
        """Encode a chunk of ``chunk.nbytes`` bytes to ``into``, of `most_bytes`; returns how many bytes it took.

        ``key``: what the bytes belong to, 32 bytes; they decode under no other.
        """
        coded = self._coded(data, chunk, key)
        if coded is None or coded.nbytes > into.nbytes:
            layout = layout_of((Plane(0, _ROLE, *chunk),))
            writer = BlockWriter(
                layout, kind="block", space=_digest(chunk), key=key, parent=ROOT, end=1, tokens=np.zeros(1, np.int32)
            )
            writer.plane(0, _ROLE)[:] = data
            coded = self._packer.encode(parse(writer.seal()), PACKED)
        into[: coded.nbytes] = coded
        return coded.nbytes

    def decode(self, data: Bytes, chunk: ChunkShape, key: bytes, into: Bytes) -> None:
        """Decode a chunk to ``into``, of ``chunk.nbytes`` bytes; ``data`` may have more bytes behind the chunk.

        Raises FormatError for bytes that are no chunk of this shape and key, are damaged, or were coded with a profile
        that is not here; nothing was written to ``into`` then.
        """
        if data.nbytes < _TOTAL.size:
            raise FormatError(f"{data.nbytes} bytes are too few for a chunk")
        view = parse(data[: _TOTAL.unpack_from(data.data)[0]])
        if view.header.key != key:
            raise FormatError("bytes are those of another chunk", where=view.header.key.hex()[:16])
        name = parse_level(view.header.level)
        if name.name == PACKED:
            if view.header.space != _digest(chunk):
                raise FormatError("chunk has another shape or type than it is wanted in", where=str(chunk))
            found = parse(self._packer.decode(view))
            if found.layout.planes != (Plane(0, _ROLE, *chunk),):
                raise FormatError("packed chunk has another shape than its head says", where=str(chunk))
            into[:] = np.frombuffer(found.plane(0, _ROLE, verify=False), np.uint8)
            return
        if name.profile not in self._profiles or chunk.dtype not in FLOATS:
            raise FormatError(f"chunk of level {view.header.level!r} cannot be decoded here: no such profile")
        self._decode(view, self._codec(name.profile, chunk.dtype), chunk, into)

    def _coded(self, data: Bytes, chunk: ChunkShape, key: bytes) -> Bytes | None:
        """Return a chunk coded by the newest profile; None, with a warning, if it cannot be."""
        finder = self._finder
        if self._level == PACKED or finder is None:
            return None
        if not _fits(chunk, finder):
            self._warn(
                f"chunks of {chunk.dtype} {list(chunk.shape)} are not those of a model with {finder.layers} layers of "
                f"{finder.heads} heads of {finder.dim}"
            )
            return None
        bits = data.view(BITS[chunk.dtype]).reshape(chunk.shape)
        place = finder.find(bits, chunk.dtype)
        if place is None:
            self._warn("a chunk's position was not found; is it KV of the model that was calibrated?")
            return None
        codec, tokens = self._codec(self._newest, chunk.dtype), chunk.shape[2]
        writer = BlockWriter(
            block_layout(codec.space, tokens), kind="block", space=codec.space.digest, key=key, parent=ROOT,
            end=place.position + tokens, tokens=np.zeros(tokens, np.int32), rope_at=place.position,
            extra={"halves": chunk.shape[0], "page": place.page},
        )  # fmt: skip
        for role, planes in zip("kv", split_planes(bits, finder.heads, finder.dim, place.page)):
            for layer, plane in enumerate(planes):
                writer.plane(layer, role).view(bits.dtype).reshape(plane.shape)[:] = plane
        return codec.encode(parse(writer.seal()), self._level)

    def _decode(self, view: BlockView, codec: Codec, chunk: ChunkShape, into: Bytes) -> None:
        head, finder = view.header, self._finder
        assert finder is not None  # there is a profile
        page = head.extra.get("page", -1)
        if (
            head.space != codec.space.digest
            or not _fits(chunk, finder)
            or head.extra.get("halves") != chunk.shape[0]
            or len(head.tokens) != 4 * chunk.shape[2]
            or not (page == 0 or (page > 0 and chunk.shape[0] == 1 and chunk.shape[2] % page == 0))
        ):
            raise FormatError("coded chunk has another shape or type than it is wanted in", where=str(chunk))
        found = parse(codec.decode(view))
        if found.layout.planes != block_layout(codec.space, chunk.shape[2]).planes:
            raise FormatError("coded chunk has other planes than its model", where=str(chunk))
        k, v = (np.stack([found.array(layer, role, verify=False) for layer in range(finder.layers)]) for role in "kv")
        bits = BITS[chunk.dtype]
        join_planes(k.view(bits), v.view(bits), into.view(bits).reshape(chunk.shape), page)

    def _codec(self, digest: str, dtype: str) -> Codec:
        made = self._codecs.get((digest, dtype))
        if made is None:
            profile, shape = self._profiles[digest], self._finder
            assert shape is not None
            # The space names the profile's model, whose own space a server of LMCache does not know.
            space = _space(shape.layers, shape.heads, shape.dim, profile.model.hex(), dtype)
            renamed = msgspec.structs.replace(profile, model=model_digest(space))
            made = self._codecs.setdefault((digest, dtype), Codec(space, (digest, renamed)))
        return made

    def _warn(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            log.warning("%s. Such chunks are kept without loss", why)


def _fits(chunk: ChunkShape, finder: PlaceFinder) -> bool:
    """True if a chunk has the shape of a whole model's K and V."""
    width = 2 * finder.heads * finder.dim
    return (
        chunk.dtype in FLOATS
        and len(chunk.shape) == 4
        and chunk.shape[0] in (1, 2)
        and chunk.shape[1] == finder.layers
        and 0 < chunk.shape[2] <= MAX_TOKENS
        and chunk.shape[0] * chunk.shape[3] == width
    )


def _space(layers: int, heads: int, dim: int, model: str, dtype: str) -> ModelSpace:
    return ModelSpace(
        weights=f"profile:{model}", architecture="lmcache", tokenizer="none", dtype=dtype, rope="null", vocab_size=1,
        layers=(LayerSpec("full", heads, dim, dim),) * layers, max_tokens=1 << 40, attention="lmcache",
    )  # fmt: skip


def _digest(chunk: ChunkShape) -> bytes:
    return hashlib.sha256(f"ctxreuse/chunk/1 {chunk.dtype} {list(chunk.shape)}".encode()).digest()


def _profiles_of(model: str, store: ProfileStore) -> dict[str, CodecProfile]:
    """Return the profiles of the model that one was made of last under this name, by 16 digits of their digest."""
    name, found = Path(model).name, dict[str, CodecProfile]()
    names: list[str] = []
    for digest, profile, _ in store.everything():
        if found and profile.model != next(iter(found.values())).model:
            continue
        called = profile.notes.get("model", "")
        names.append(called)
        if found or called == name or (len(model) >= 8 and digest.startswith(model.lower())):
            found[digest[:16]] = profile
    if not found:
        raise ConfigError(
            f"there is no calibration profile of {model!r}",
            where=str(store.folder),
            fix=f"Run `ctxreuse calibrate {model}` here, or copy that folder; "
            f"there are profiles of {', '.join(sorted(set(names))) or 'no model'}",
        )
    return found


def chunk_key(facts: Sequence[str | int | bytes]) -> bytes:
    """Return the digest of all that names a chunk, 32 bytes."""
    return hashlib.sha256(b"ctxreuse/chunk" + msgspec.msgpack.encode(list(facts))).digest()
