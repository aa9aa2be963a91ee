"""What is fuzzed: each parser of bytes from disk or wire, what it may raise, and what must hold of what it accepts."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from ctxreuse.block import format as block_format
from ctxreuse.block.format import parse
from ctxreuse.codec import Codec, ProfileStore, read_profile, write_profile
from ctxreuse.codec import lossless as lossless_codec
from ctxreuse.errors import ConfigError, CtxReuseError, FormatError, ProtocolError, SessionError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels import RansTables, rans_decode, rans_encode
from ctxreuse.testing.clock import FakeClock
from support.fuzz.mutate import Mutator, of_bytes, of_json, of_lines, packed, spoiled
from support.klt_planes import decode_plane

__all__ = ["CORPUS", "TARGETS", "Finding", "Target", "seeds"]

_TESTS = Path(__file__).resolve().parents[2]
_GOLDEN = _TESTS / "golden/data"
#: Seeds and regressions, in a folder for each target.
CORPUS = _TESTS / "fuzz/corpus"


class Finding(AssertionError):
    """An input for which a target's invariant does not hold."""


class Target(NamedTuple):
    """A parser. ``run`` parses, and raises one of ``refusals`` or nothing; `check` holds it to time and memory."""

    name: str
    run: Callable[[bytes], object]
    mutate: Mutator
    golden: tuple[str, ...] = ()
    """Seeds beside those in `CORPUS`: patterns below the golden tests' data."""
    refusals: tuple[type[Exception], ...] = (FormatError,)
    seconds: float = 1.0
    """Processor time of one input at most."""
    memory: int = 64 << 20
    """Growth of the process's peak by one input at most, in bytes."""
    slow: bool = False
    """Takes so long for each input that few are tried."""

    def check(self, data: bytes) -> str:
        """Parse one input and return what came of it, in words without numbers. Raises `Finding`."""
        peak, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
        try:
            self.run(data)
            outcome = "accepted"
        except self.refusals as error:
            outcome = f"{type(error).__name__}: {''.join(c for c in str(error)[:60] if not c.isdigit())}"
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{self.name}: {type(error).__name__}: {str(error)[:300]}") from error
        took = time.thread_time() - begun
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        if took > self.seconds:
            raise Finding(f"{self.name}: {took:.2f} s for {len(data):,} bytes")
        if grown > self.memory:
            raise Finding(f"{self.name}: the process grew by {grown >> 20} MiB for {len(data):,} bytes")
        return outcome


def seeds(target: Target) -> dict[str, bytes]:
    """Valid inputs and regressions, by name."""
    files = [*sorted((CORPUS / target.name).glob("*")), *(f for p in target.golden for f in sorted(_GOLDEN.glob(p)))]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


@cache
def _room() -> Path:
    """A folder in memory, where there is one; removed with the process that made it."""
    import atexit

    shm = Path("/dev/shm")
    room = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    return room


def _file(data: bytes, name: str, mode: int = 0o600) -> Path:
    path = _room() / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


# ---- blocks


def _block(data: bytes) -> None:
    view = parse(data)
    for plane in view.layout.planes:
        at = view.offset(plane.layer, plane.role)
        if not view.start <= at <= at + plane.nbytes <= len(data):
            raise Finding(f"plane of {plane.nbytes} bytes at {at} of {len(data)}")
    view.verify()
    again = parse(block_format.reseal(view, {}))
    if again.header != view.header:
        raise Finding("a block that was sealed again says something else")


def _sealed(data: bytes, other: bytes, chance: Random) -> bytes:
    """Changes of header, planes or anything; checksums fit again, mostly."""
    try:
        head = block_format._PRELUDE.unpack_from(data)
        start, length = block_format._PRELUDE.size, head[3]
        header = msgspec.msgpack.decode(data[start : start + length])
        view = parse(data)
    except (struct.error, ValueError, FormatError, RecursionError):
        return of_bytes(data, other, chance)
    if chance.random() < 0.1:
        return of_bytes(data, other, chance)
    body = bytearray(data[view.start :])
    if chance.random() < 0.5:
        plane = chance.choice(view.layout.planes)
        at = view.layout.offsets[view.layout.index[plane.layer, plane.role]]
        size = plane.nbytes
        changed = of_bytes(bytes(body[at : at + size]), other, chance)[:size]
        body[at : at + len(changed)] = changed
    else:
        raw = packed(msgspec.msgpack.encode(header), b"", chance)
        try:
            header = msgspec.msgpack.decode(raw)
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, list):
        return of_bytes(data, other, chance)
    sums = [
        xxhash.xxh3_64_intdigest(bytes(body[at : at + plane.nbytes]))
        for plane, at in zip(view.layout.planes, view.layout.offsets)
    ]
    if len(header) > 9 and chance.random() < 0.9:
        header[9] = np.array(sums, "<u8").tobytes()
    packed_header = msgspec.msgpack.encode(header)
    padding = bytes(-(start + len(packed_header)) % block_format.ALIGN)
    total = start + len(packed_header) + len(padding) + len(body)
    check = xxhash.xxh3_64_intdigest(packed_header, total & 0xFFFFFFFF)
    prelude = block_format._PRELUDE.pack(*head[:3], len(packed_header), total, check)
    return prelude + packed_header + padding + bytes(body)


@cache
def _codecs() -> dict[bytes, Codec]:
    """The codec of each space that the golden blocks are of."""
    index = json.loads((_GOLDEN / "blocks/index.json").read_text("utf-8"))
    shelf = ProfileStore(_GOLDEN / "cards")
    found: dict[bytes, Codec] = {}
    for entry in index.values():
        space = msgspec.convert(entry["space_fields"], ModelSpace)
        found.setdefault(space.digest, Codec(space, shelf.newest(space), profiles=shelf))
    return found


def _coded(data: bytes) -> None:
    view = parse(data)
    codec = _codecs().get(view.header.space)
    if codec is None:
        raise FormatError("a block of another model")
    parse(codec.decode(view)).verify()


@cache
def _chunk_codec() -> tuple[Any, Any]:
    """A codec of LMCache's chunks by a golden profile, and the shape of those that are decoded."""
    from ctxreuse_cloud.connectors.chunks.codec import ChunkCodec, ChunkShape

    codec = ChunkCodec("kl-0.01", "b863848a2553f97b", ProfileStore(_GOLDEN / "cards"))
    return codec, ChunkShape("bfloat16", (1, 2, 32, 3 * 2 * 16))


def _chunk(data: bytes) -> None:
    codec, shape = _chunk_codec()
    into = np.full(shape.nbytes, 0x55, np.uint8)
    try:
        codec.decode(np.frombuffer(data, np.uint8), shape, bytes(32), into)
    except FormatError:
        if (into != 0x55).any():
            raise Finding("a chunk that was refused was written") from None
        raise


# ---- streams


@cache
def _tables() -> RansTables:
    rows = np.zeros((3, 32), np.int64)
    rows[0, :2] = 128
    rows[1] = 8
    rows[2, :3] = 250, 3, 3
    return RansTables(rows)


def _rans(data: bytes) -> None:
    """Three bytes (symbols, and which table each step takes), then the stream."""
    if len(data) < 3:
        raise FormatError("too short")
    count, seed = int.from_bytes(data[:2], "little") % 5000, data[2]
    steps = ((np.arange(-(-count // 64)) + seed) % 3).astype(np.uint16)
    symbols, seeds_ = rans_decode(data[3:], count, _tables(), steps)
    if count and bytes(rans_encode(symbols, _tables(), steps, seeds_)) != data[3:]:
        raise Finding("rans: a stream that was accepted is not the one that its symbols give")


def _lossless(data: bytes) -> None:
    plane, dtype = lossless_codec.unpack_plane(memoryview(data), limit=1 << 22)
    if not plane.size:  # whatever the other axes say
        return
    again = lossless_codec.encode_plane(plane, dtype, plane.shape)
    back, _ = lossless_codec.unpack_plane(memoryview(bytes(again)))
    if back.tobytes() != plane.tobytes():
        raise Finding("lossless: a plane changed on its way out and in")


def _klt(data: bytes) -> None:
    """Two bytes (which plane, tokens), then a stream; of refining levels two bytes (length of the base's) and both."""
    if len(data) < 2:
        raise FormatError("too short")
    coders = _klt_planes()
    coder, refined = coders[data[0] % len(coders)]
    tokens, stream = 1 + data[1] % 64, data[2:]
    heads, dim = coder.plane.heads, coder.plane.dim
    target = np.full((heads, tokens + 1, dim), 7.0, np.float32)
    angles = coder.ropes[0].span_tables(0, tokens) if coder.ropes[0] is not None else None
    cut = 2 + int.from_bytes(stream[:2], "little")
    base, more = (stream[2:cut], [stream[cut:]]) if refined else (stream, None)
    box = ((tokens + 1) * dim, dim)
    decode_plane(coder.native, target, "fp32", 0, box, [base], [tokens], "fp32", angles=angles, refinements=more)
    if not (target[:, tokens:] == 7.0).all():
        raise Finding("klt: rows beyond the stream's were written")


@cache
def _klt_planes() -> list[tuple[Any, bool]]:
    found = []
    for codec in _codecs().values():
        if codec.profile is None or codec.space.dtype != "float32":
            continue
        coders = codec._coders[codec.digest[:16]]
        for level in codec.profile.levels:
            for plane in codec.profile.planes[:2]:
                coder = coders.plane(level.info.name, plane.layer, plane.role)
                found.append((coder, coder.base is not None))
    return found


# ---- the link


def _frames(data: bytes) -> Iterator[list[bytes]]:
    """Messages as they lie in an input: length of each frame in 3 bytes (ff ff ff: no second), then both."""
    at = 0
    while at + 6 <= len(data):
        first, second = int.from_bytes(data[at : at + 3], "little"), int.from_bytes(data[at + 3 : at + 6], "little")
        at += 6
        frames = [data[at : at + first]]
        at += first
        if second != 0xFFFFFF:
            frames.append(data[at : at + second])
            at += second
        yield frames


def _joined(messages: Sequence[Sequence[bytes]]) -> bytes:
    parts = []
    for frames in messages:
        second = len(frames[1]) if len(frames) > 1 else 0xFFFFFF
        parts += [len(frames[0]).to_bytes(3, "little"), second.to_bytes(3, "little"), *map(bytes, frames[:2])]
    return b"".join(parts)


def _wire(data: bytes) -> None:
    from ctxreuse.bus.protocol import wire

    for frames in _frames(data):
        message, payload = wire.decode(frames)
        again = wire.encode(message, payload)
        back, _ = wire.decode(again)
        if back != message:
            raise Finding(f"wire: {message!r} came back as {back!r}"[:300])


def _messages(data: bytes, other: bytes, chance: Random) -> bytes:
    """Messages left out, doubled, swapped, taken from ``other``; fields changed; frames changed."""
    messages, others = list(_frames(data)), list(_frames(other))
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(messages) + 1)
        if at == len(messages) or chance.random() < 0.1:
            if others:
                messages.insert(at, chance.choice(others))
            continue
        match chance.randrange(10):
            case 0:
                del messages[at]
            case 1:
                messages.insert(chance.randrange(len(messages)), messages[at])
            case 2:
                frames = [*messages[at]]
                which = chance.randrange(len(frames))
                frames[which] = of_bytes(frames[which], b"", chance)
                messages[at] = frames
            case _:
                head = messages[at][0]
                messages[at] = [head[:8] + packed(head[8:], b"", chance), *messages[at][1:]]
    return _joined(messages)


@cache
def _node() -> Any:
    from support import session_pair

    return session_pair


def _server(data: bytes) -> None:
    """What an edge says, to a server that has said hello."""
    pair = _node()
    node = pair.node()
    server = pair.server_of(node)
    try:
        for frames in _frames(data):
            server.receive(frames, 0.0)
            for _ in range(40):
                if server.next(0.0) is None:
                    break
            server.check()
    finally:
        server.lost(0.0)
    held = dict(pair.BLOCKS)
    if any(held.get(key, value) != value for key, value in node.blocks.items()):
        raise Finding("server: a block's bytes are not its own")
    if not all(one.closed for one in (*node.sources, *node.receivers)):
        raise Finding("server: a transfer was left open")


@cache
def _answering() -> Any:
    """A service that decodes answers, and the checker that does."""
    from ctxreuse.bus.protocol.messages import Verify
    from ctxreuse.peer.serve.checker import AnswerChecker
    from ctxreuse.peer.serve.service import ServeOptions, StoreService
    from ctxreuse.peer.serve.verify import VerdictSink
    from ctxreuse.store import TieredStore
    from support.counting import SPACE, CountingEngine

    class Answering:
        def __init__(self) -> None:
            self.checker, self.sinks = AnswerChecker(CountingEngine()), dict[int, VerdictSink]()  # type: ignore[arg-type]
            self.number = 0

        def verifies(self) -> list[ModelSpace]:
            return [SPACE]

        def verify(self, salt: bytes, request: Verify, audited: int, sink: VerdictSink) -> Any:
            self.number += 1
            self.sinks[self.number] = sink
            self.checker.open(self.number, salt, request, audited)
            return _OneAnswer(self.checker, self.number)

        def step(self) -> None:
            for number, verdict, ended, failed in self.checker.step():
                if verdict is not None:
                    self.sinks[number].verdict(verdict)
                if ended:
                    self.sinks.pop(number).end(failed)

    made = Answering()
    options = ServeOptions(tenant_of=lambda user: user, verifier=made)
    return StoreService(TieredStore(16 << 20), _room() / "service", options), made


class _OneAnswer(NamedTuple):
    checker: Any
    number: int

    def draft(self, start: int, tokens: Any) -> None:
        self.checker.draft(self.number, start, tokens)

    def cancel(self) -> None:
        self.checker.close(self.number)


def _answers(data: bytes) -> None:
    """What an edge says that lets answers be decoded: these are what they were to be, whatever is drafted."""
    from ctxreuse.bus.protocol import messages, wire
    from support.counting import next_token

    service, answering = _answering()
    server, last = _node().server_of(service), dict[int, int]()
    try:
        for frames in _frames(data):
            message, _ = wire.decode(frames)
            if isinstance(message, messages.Verify) and message.id not in server._verifying:
                last.pop(message.id, None)
                if message.rule == messages.DrawRule():
                    last[message.id] = int(np.frombuffer(message.tokens, "<i4")[-1])
            server.receive(frames, 0.0)
            for _ in range(4):
                answering.step()
            server.collect()
            while (said := server.next(0.0)) is not None:
                verdict, _ = wire.decode(said)
                if not isinstance(verdict, messages.Verdict) or verdict.id not in last:
                    continue
                for token in np.frombuffer(verdict.tokens, "<i4").tolist():
                    if token != next_token(last[verdict.id]):
                        raise Finding(f"answers: {token} after {last[verdict.id]}")
                    last[verdict.id] = token
            server.check()
    finally:
        server.lost(0.0)
    if answering.checker.busy or service._answers.taken:
        raise Finding("answers: one was left open")


def _client(data: bytes) -> None:
    """What a cloud says, to a client with a match, two fetches, a put and an answer under way."""
    from ctxreuse.bus.protocol.base import PutRequest
    from ctxreuse.bus.protocol.messages import Verify
    from ctxreuse.bus.protocol.verify import PendingVerify

    pair = _node()
    client = pair.client_of()
    client.match(pair.SPACE.digest, pair.KEYS)
    fetches = [pair.buffer(), pair.buffer(order="tail")]
    for fetch in fetches:
        client.fetch(fetch, payload=4096)
    client.put(PutRequest(pair.SPACE.digest, pair.KEYS, pair.SIZES), lambda i: pair.DATA[i])
    answer = PendingVerify(Verify(1, pair.SPACE.digest, bytes(8), 40))
    client.verify(answer)
    try:
        for frames in _frames(data):
            client.receive(frames, 0.0)
            for _ in range(40):
                if client.next(0.0) is None:
                    break
            client.check()
    finally:
        client.lost(0.0)
        client.close()
    said = 0
    while (verdict := answer.take(0.0)) is not None:
        said += len(verdict.tokens) // 4
    if answer.ended is None or said > 40:
        raise Finding("client: an answer without an end")
    for fetch in fetches:
        fetch.check()
        for view in fetch.views(fetch.tail()):
            try:
                view.verify()
            except FormatError:
                continue
            if view.header.key not in pair.KEYS:
                raise Finding("client: a block of another context was taken")


# ---- files


@cache
def _ledger() -> Any:
    from ctxreuse.store import Ledger

    return Ledger.open(_room() / "ledger")


def _import(data: bytes) -> None:
    from ctxreuse_agents import transfer

    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError("not JSON") from None
    ledger = _ledger()
    before = ledger.stats().sessions
    try:
        record = transfer.load(ledger, tree)
    except CtxReuseError:
        if ledger.stats().sessions != before:
            raise Finding("import: a refused session stands in the ledger") from None
        raise
    out = transfer.export(ledger, record.id)
    turns, given = out["turns"], tree["turns"]
    ledger.delete(record.id)
    ledger.gc()
    if [(t["role"], t["content"]) for t in turns] != [(t["role"], t["content"]) for t in given]:
        raise Finding("import: turns changed")


def _pages(data: bytes) -> None:
    """A file of LMDB, which reads without a fear what the walk found sound."""
    import lmdb

    from ctxreuse.store.lmdb.recovery import scan

    home = _room() / "pages"
    home.mkdir(exist_ok=True)
    (home / "data.mdb").write_bytes(data)
    if wrong := scan(home, "meta").wrong:
        raise FormatError(wrong)
    try:
        with lmdb.open(str(home), readonly=True, lock=False, max_dbs=4) as env, env.begin() as txn:
            for name in (b"meta", b"blocks"):
                for key, value in txn.cursor(db=env.open_db(name, txn=txn, create=False)):
                    xxhash.xxh3_64_intdigest(key + value)
    except lmdb.Error as error:
        raise FormatError(str(error)) from None


def _trace(data: bytes) -> None:
    from ctxreuse.lab.opening import open_trace

    trace = open_trace(_file(data, "trace.jsonl"))
    for n, request in enumerate(trace):
        if (len(request.path) and request.tokens < 0) or n > 100_000:
            raise Finding(f"trace: request {n} of {request.tokens} tokens")


def _card(data: bytes) -> None:
    from ctxreuse.codec.codec import _Coders

    profile = read_profile(data)
    _Coders(profile)
    if write_profile(read_profile(write_profile(profile))) != write_profile(profile):
        raise Finding("card: written again it differs")


def _carded(data: bytes, other: bytes, chance: Random) -> bytes:
    """A changed header before the same arrays, or changed bytes."""
    if len(data) > 16 and chance.random() < 0.6:
        size = int.from_bytes(data[12:16], "little")
        header = packed(data[16 : 16 + size], b"", chance)
        return data[:12] + len(header).to_bytes(4, "little") + header + data[16 + size :]
    return of_bytes(data, other, chance)


def _chunk_card(data: bytes) -> None:
    from ctxreuse.reuse.profile import read_chunk_profile, write_chunk_profile

    write_chunk_profile(read_chunk_profile(data))


def _chunk_carded(data: bytes, other: bytes, chance: Random) -> bytes:
    from ctxreuse.reuse import profile

    size = profile._PRELUDE.size
    if len(data) <= size or chance.random() < 0.1:
        return of_bytes(data, other, chance)
    body = packed(data[size:], b"", chance)
    return profile._PRELUDE.pack(profile.MAGIC, profile.VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _key(data: bytes) -> None:
    from ctxreuse.bus.auth.curve import KeyPair, public_key

    path = _file(data, "some.key")
    text = data.decode("utf-8", "replace").replace("\0", "")
    refused = []
    for read in (lambda: KeyPair.read(path), lambda: public_key(str(path)), lambda: public_key(text)):
        try:
            read()
        except ConfigError as error:
            refused.append(error)
    if len(refused) == 3:
        raise refused[0]


def _allow(data: bytes) -> None:
    from ctxreuse.bus.auth.allowlist import AllowList, _read, _text

    entries = AllowList(_file(data, "allow.toml")).entries
    written = "".join(map(_text, entries)).encode()
    if len(_read(_file(written, "again.toml"))) != len(entries):
        raise Finding("allow: written again it differs")


def _config(data: bytes) -> None:
    from ctxreuse.config import load

    load(_file(data, "config.toml"), env={})


def _quarantine(data: bytes) -> None:
    from ctxreuse.peer.quarantine import Quarantine

    Quarantine(_file(data, "quarantine.json"), seconds=1.0, clock=FakeClock(0.0))


def _journal(data: bytes) -> None:
    from ctxreuse.store.journal import read_journal
    from ctxreuse.why.records import decoded

    path = _file(data, "asked.journal")
    for raw in read_journal(path, 1 << 20):
        with contextlib.suppress(FormatError):
            decoded(raw, path)


def _openai(data: bytes) -> None:
    """The first byte says which kind of body the rest is."""
    from ctxreuse_edge.api.chat import EdgeChatRequest
    from ctxreuse_edge.api.contexts import NewContext
    from ctxreuse_edge.api.tokens import TokensRequest

    from ctxreuse.daemon.openai import CompletionRequest, parse
    from ctxreuse.identity.keys import as_tokens

    kinds: tuple[Any, ...] = (EdgeChatRequest, CompletionRequest, TokensRequest, NewContext)
    asked = parse(data[1:], kinds[(data[0] if data else 0) % len(kinds)])
    for message in getattr(asked, "messages", ()):
        message.message()
        message.cuts  # noqa: B018
    if isinstance(asked, TokensRequest):
        as_tokens(asked.tokens)


def _responses(data: bytes) -> None:
    from ctxreuse.daemon.openai import parse
    from ctxreuse.daemon.responses import Item, ResponseObject, ResponsesRequest, chat_fields, input_items, messages_of
    from ctxreuse.store.ledger.records import Links, decode_turn, encode_turn

    asked = parse(data, ResponsesRequest)
    chat_fields(asked)
    msgspec.json.encode(ResponseObject.begun(asked, "resp_1", "m", 1))
    items = input_items(asked.input)
    for id, item in enumerate(items, 1):
        kept = Item.kept(decode_turn(id, encode_turn(id, Links(0, 0, 1), item.turn, 1.0)))
        msgspec.json.encode(kept.plain)
        if kept.message != item.message or (item.id and kept.id != item.id):
            raise Finding("responses: an item is kept otherwise than it was given")
    messages_of(items)


def _doors(data: bytes) -> None:
    """As `_openai`, the bodies of other APIs: what they say is what goes to the chat."""
    from ctxreuse_edge.api.embeddings import texts_of

    from ctxreuse.daemon.anthropic.requests import MessagesRequest
    from ctxreuse.daemon.anthropic.translate import chat_parts, tool_choice_of
    from ctxreuse.daemon.embeddings import EmbeddingsRequest
    from ctxreuse.daemon.ollama import OllamaChatRequest, chat_messages
    from ctxreuse.daemon.openai import parse

    kinds: tuple[Any, ...] = (MessagesRequest, OllamaChatRequest, EmbeddingsRequest)
    asked = parse(data[1:], kinds[(data[0] if data else 0) % len(kinds)])
    if isinstance(asked, EmbeddingsRequest):
        texts_of(asked.input)
        return
    if isinstance(asked, OllamaChatRequest):
        messages = chat_messages(asked.messages or [])
        if len(messages) != len(asked.messages or []):
            raise Finding("doors: a message was lost")
    else:
        found = chat_parts(asked)
        messages = found.messages
        tool_choice_of(asked.tool_choice)
        for mark in found.marks:
            content = messages[mark.message].content if mark.message is not None else found.tools
            if content is None or mark.parts > len(content):
                raise Finding("doors: a mark is behind what it marks")
    for message in messages:
        message.message()
        message.cuts  # noqa: B018


def _calls(data: bytes) -> None:
    """The first byte says which family of models speaks, the second how its answer comes in pieces."""
    from ctxreuse.toolcalls.families import FAMILIES
    from ctxreuse.toolcalls.parser import CallParser, TextDelta

    family = list(FAMILIES.values())[(data[0] if data else 0) % len(FAMILIES)]
    text, chance = data[2:].decode("utf-8", "replace"), Random(data[1] if len(data) > 1 else 0)
    found = []
    for most in (len(text) or 1, 1 + chance.randrange(20)):
        parser, at, events = CallParser(family, lambda family: "id"), 0, []
        while at < len(text):
            size = 1 + chance.randrange(most)
            events += parser.feed(text[at : at + size])
            at += size
        events += parser.finish()
        found.append(("".join(e.text for e in events if isinstance(e, TextDelta)), parser.calls, parser.whole))
    if found[0] != found[1]:
        raise Finding(f"calls: {found[0]} in other pieces are {found[1]}"[:300])
    cut = parser._state in (parser._opening, parser._name)
    if not parser.calls and not cut and found[0][0] != text:
        raise Finding("calls: text without a call is not the answer")


def _api_errors() -> tuple[type[Exception], ...]:
    from ctxreuse.daemon.openai import ApiError

    return (ApiError, CtxReuseError)


def _after_a_byte(mutator: Mutator) -> Mutator:
    def mutate(data: bytes, other: bytes, chance: Random) -> bytes:
        first = data[:1] if chance.random() < 0.95 else chance.randbytes(1)
        return first + mutator(data[1:], other[1:], chance)

    return mutate


def _gguf(data: bytes) -> None:
    from ctxreuse.models.gguf import convert

    folder = _room() / "converted"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made = convert(_file(data, "model.gguf"), folder)
    if made.weights_bytes != (folder / "model.safetensors").stat().st_size:
        raise Finding("gguf: weights are not as long as they say")


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("block", _block, _sealed, ("blocks/*.block",)),
        Target("coded", _coded, _sealed, ("blocks/*.block",)),
        Target("chunk", _chunk, _sealed),
        Target("rans", _rans, of_bytes),
        Target("lossless", _lossless, of_bytes),
        Target("klt", _klt, of_bytes),
        Target("wire", _wire, _messages, refusals=(ProtocolError,)),
        Target("server", _server, _messages, refusals=(ProtocolError,)),
        Target("client", _client, _messages, refusals=(ProtocolError,)),
        Target("answers", _answers, _messages, refusals=(ProtocolError,)),
        Target("import", _import, of_json, refusals=(FormatError, SessionError)),
        Target("pages", _pages, of_bytes),
        Target("trace", _trace, spoiled(of_lines), ("traces/*.jsonl",), refusals=(FormatError, ConfigError)),
        Target("card", _card, _carded, ("cards/*/*.card",)),
        Target("chunkcard", _chunk_card, _chunk_carded, ("cards/*/*.measured",)),
        Target("key", _key, spoiled(of_lines), ("files/*.key", "files/*.pub"), refusals=(ConfigError,)),
        Target("allow", _allow, spoiled(of_lines), ("files/allow.toml",), refusals=(ConfigError,)),
        Target("config", _config, spoiled(of_lines), ("settings/*.toml",), refusals=(ConfigError,)),
        Target("journal", _journal, of_bytes, ("files/*.journal",)),
        Target("quarantine", _quarantine, of_json, ("files/quarantine.json",), refusals=()),
        Target("openai", _openai, _after_a_byte(of_json), refusals=_api_errors()),
        Target("responses", _responses, of_json, refusals=_api_errors()),
        Target("doors", _doors, _after_a_byte(of_json), refusals=_api_errors()),
        Target("calls", _calls, _after_a_byte(of_bytes), refusals=()),
        Target("gguf", _gguf, of_bytes, refusals=(FormatError, ConfigError), seconds=3.0, memory=256 << 20, slow=True),
    )
}
