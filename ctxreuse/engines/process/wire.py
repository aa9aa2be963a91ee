"""What a process and its engine's process say to each other: calls and answers, arrays, errors."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse import errors
from ctxreuse.block.format import BlockView, Header
from ctxreuse.engines.chunks import RelocationError
from ctxreuse.engines.process.memory import Region, SharedMemory
from ctxreuse.engines.process.pipe import FramePipe, Payload
from ctxreuse.engines.provenance import LevelRun
from ctxreuse.errors import CtxReuseError
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "INLINE",
    "Array",
    "ArraySpec",
    "Call",
    "ContextFacts",
    "EngineMessage",
    "EngineOpened",
    "LayerArrived",
    "LayerUsed",
    "OpenFailed",
    "Opening",
    "Released",
    "Returned",
    "TextFacts",
    "WireError",
    "decode_headers",
    "encode_headers",
    "engine_pipe",
    "pack_arrays",
    "packed_size",
    "unpack_arrays",
]

#: Arrays of a message pass through the pipe up to so many bytes together; a copy into shared memory is faster beyond.
INLINE = 32 << 10

Array: TypeAlias = npt.NDArray[Any]


class ArraySpec(NamedTuple):
    """One array: numpy's name of its type, its shape, and where it lies in the shared memory; -1: in the payload."""

    dtype: str
    shape: tuple[int, ...]
    at: int


class WireError(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An error of the engine. ``kind``: its class in `ctxreuse.errors`; "": any other error, which ``what`` names."""

    kind: str
    what: str
    where: str = ""
    fix: str = ""
    index: int = 0
    key: bytes = b""

    @classmethod
    def of(cls, error: Exception) -> WireError:
        """Describe an error."""
        if isinstance(error, RelocationError):
            return cls("RelocationError", error.what, error.where, error.fix, error.index, error.key)
        if isinstance(error, CtxReuseError):
            known = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
            return cls(known.__name__, error.what, error.where, error.fix)
        return cls("", f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """The error, to be raised here."""
        if self.kind == "RelocationError":
            return RelocationError(self.what, where=self.where, fix=self.fix, index=self.index, key=self.key)
        kind = getattr(errors, self.kind, None) if self.kind else None
        if isinstance(kind, type) and issubclass(kind, CtxReuseError):
            return kind(self.what, where=self.where, fix=self.fix)
        return RuntimeError(f"in the engine's process: {self.what}")


class ContextFacts(msgspec.Struct, frozen=True, array_like=True):
    """What `ctxreuse.engines.base.Context` says of itself, but for its tokens.

    ``free``: what `DeviceMemoryEngine.free_memory` says with it; -1: nothing.
    """

    n: int
    nbytes: int
    states: tuple[int, ...]
    levels: tuple[LevelRun, ...]
    relocated: tuple[tuple[int, int], ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    free: int = -1


class TextFacts(msgspec.Struct, frozen=True):
    """What does not change of a `ctxreuse.engines.text.TextModel`."""

    stop_ids: frozenset[int]
    markers: frozenset[str]
    token_chars: int
    template: str = ""


class Opening(msgspec.Struct, frozen=True, tag="open"):
    """Parent: open an engine. ``opener``: ``module:function`` that returns it, called with ``options``; ``memory``: the
    descriptor of the shared memory."""

    opener: str
    options: dict[str, Any]
    memory: int = -1


class Call(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    """Parent: call ``verb``. ``room``: where arrays of the answer go if they fit; else they are in its payload."""

    number: int
    verb: str
    contexts: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    arrays: tuple[ArraySpec, ...] = ()
    room: Region | None = None


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Parent: this context is not used any more."""

    context: int


class LayerArrived(msgspec.Struct, frozen=True, tag="layer"):
    """Parent: the planes of a layer of a load lie at ``at`` of the shared memory; ``failed``: they will not come."""

    load: int
    layer: int
    at: int
    failed: WireError | None = None


class LayerUsed(msgspec.Struct, frozen=True, tag="used"):
    """Child: the planes at ``at`` have been copied."""

    load: int
    at: int


class EngineOpened(msgspec.Struct, frozen=True, tag="opened"):
    """Child: the engine is open."""

    space: ModelSpace
    batches: bool
    chunks: bool
    codec: bool
    text: TextFacts | None
    least_slice: int = 1


class OpenFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Child: the engine cannot be opened."""

    error: WireError


class Returned(msgspec.Struct, frozen=True, tag="returned", omit_defaults=True):
    """Child: the result of call ``number``, and the facts of its contexts after it."""

    number: int
    value: Any = None
    arrays: tuple[ArraySpec, ...] = ()
    facts: tuple[ContextFacts, ...] = ()
    error: WireError | None = None


EngineMessage: TypeAlias = Opening | Call | Released | LayerArrived | LayerUsed | EngineOpened | OpenFailed | Returned

_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def engine_pipe(end: socket.socket) -> FramePipe[EngineMessage]:
    """The pipe for these messages over one end of a socket pair."""
    return FramePipe(end, _decoder)


_headers: msgspec.msgpack.Decoder[list[Header]] = msgspec.msgpack.Decoder(list[Header])


def encode_headers(views: Sequence[BlockView]) -> Payload:
    """The headers of blocks, as an array."""
    return np.frombuffer(msgspec.msgpack.encode([view.header for view in views]), np.uint8)


def decode_headers(data: Payload) -> list[Header]:
    """What `encode_headers` made."""
    return _headers.decode(data.data)


def packed_size(arrays: Sequence[Array]) -> int:
    """Bytes of shared memory that arrays take, each from the beginning of a cache line."""
    return sum(-(-array.nbytes // 64) * 64 for array in arrays)


def pack_arrays(
    arrays: Sequence[Array], memory: SharedMemory, room: Region | None
) -> tuple[tuple[ArraySpec, ...], Payload | bytes]:
    """Put arrays into ``room``, from its beginning, if they fit and are large, else into a payload."""
    if room is not None and INLINE < packed_size(arrays) <= room.size:
        specs, at = [], room.at
        for array in arrays:
            if array.nbytes:
                memory.view(Region(at, array.nbytes))[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            specs.append(ArraySpec(array.dtype.str, array.shape, at))
            at += packed_size([array])
        return tuple(specs), b""
    specs = [ArraySpec(array.dtype.str, array.shape, -1) for array in arrays]
    return tuple(specs), b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpack_arrays(specs: Sequence[ArraySpec], payload: Payload, memory: SharedMemory) -> list[Array]:
    """The arrays of a message; those in shared memory are views, valid until their region is given back."""
    found, start = [], 0
    for spec in specs:
        dtype = np.dtype(spec.dtype)
        nbytes = dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
        if spec.at >= 0:
            raw = memory.view(Region(spec.at, nbytes))
        else:
            raw = payload[start : start + nbytes]
            start += nbytes
        found.append(raw.view(dtype).reshape(spec.shape))
    return found
