"""An edge of version 0.1.0 talks to a cloud of today, and the reverse: recorded conversations, call by call.

A recording (``data/link/*.jsonl.xz``) is what a client session and a server session of that version said to each other:
first a line with the terms and results, then one for each call that either got, in order: ``do`` (something was
wanted, or happened), or ``by`` (a side was asked for its next message; ``frames`` is null where it had none). Here one
side is of today and the other side's frames come out of the recording. Clock, node ids, salts and epoch are those of
then, so that what today's side says is compared byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ctxreuse.block.format import parse, reseal
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import LevelRequest, Terms
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits, Request
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.profile import ProfileBuffer
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.codec import ProfileStore, profile_digest
from ctxreuse.identity.keys import ROOT
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.encoder import BlockEncoder
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import TieredStore
from support.waiting import patient

DATA = Path(__file__).with_name("data") / "link"
TALKS = sorted(path.name.partition(".")[0] for path in DATA.glob("*.jsonl.xz"))
#: Types of messages, as the prelude has them.
REFUSED, ANNOUNCE = 3, 4


def sha(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def given() -> Any:
    """Who they are, and the blocks that they speak of."""
    head = json.loads((DATA / "given.json").read_text("utf-8"))
    stuff = msgspec.msgpack.decode(lzma.decompress((DATA / "given.msgpack.xz").read_bytes()))
    contexts = {
        name: SimpleNamespace(tokens=np.frombuffer(held["tokens"], "<i4"), keys=held["keys"], blocks=held["blocks"])
        for name, held in stuff["contexts"].items()
    }
    space = msgspec.convert(head["space"], ModelSpace)
    raw = {name: bytes.fromhex(head[name]) for name in ("edge", "cloud", "secret")}
    return SimpleNamespace(
        **raw, space=space, card=stuff["card"], state=stuff["state"], contexts=contexts, epoch=head["epoch"],
        program=head["program"],
    )  # fmt: skip


def told(frames: list[bytes]) -> Any:
    """Frames as they are compared: which of several keys came or went first, and how a refusal is put into words for
    people, is nobody's promise."""
    kind, fields = frames[0][6], msgspec.msgpack.decode(frames[0][8:])
    if kind == ANNOUNCE:
        return [frames[0][:8], *fields[:5], *({row[i : i + 8] for i in range(0, len(row), 8)} for row in fields[5:])]
    if kind == REFUSED:
        return [frames[0][:8], *fields[:2], bool(fields[2]), *fields[3:]]
    return frames


class Side(ABC):
    """One side of today. ``name`` is what the recording calls it."""

    name: str
    session: Any

    def __init__(self) -> None:
        self.now = 0.0

    def replay(self, steps: list[dict[str, Any]]) -> None:
        """Say and hear what was said and heard then."""
        for number, step in enumerate(steps):
            if "do" in step:
                do: Callable[..., None] | None = getattr(self, "do_" + step["do"].replace(" ", "_"), None)
                if do is not None:
                    do(*step["args"])
                continue
            frames = [bytes.fromhex(frame) for frame in step["frames"] or ()]
            if step["by"] != self.name:
                if frames and "lost" not in step:
                    self.session.receive(frames, self.now)
            elif "raw" not in step:
                self.ready()
                said = [bytes(frame) for frame in self.session.next(self.now) or ()]
                assert bool(said) == bool(frames), f"step {number}"
                assert not said or told(said) == told(frames), f"step {number}"
                self.session.check()

    @abstractmethod
    def ready(self) -> None:
        """Wait until what it does beside the session is done."""

    def do_connect(self) -> None:
        self.session.opened(self.now)

    def do_cut(self) -> None:
        self.session.lost(self.now)

    def do_tick(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)

    @abstractmethod
    def close(self) -> None: ...


class ByHand:
    """Computes for peers when it is told to."""

    def __init__(self, given: Any) -> None:
        self.spaces = {given.space.digest: given.space}
        self._blocks = [np.frombuffer(data, np.uint8) for data in given.contexts["made"].blocks]
        self._jobs: list[tuple[Any, list[int]]] = []

    def submit(self, space: bytes, salt: bytes, tokens: Any, first: int, sink: Any, audited: int) -> Any:
        if len(self._jobs) == 2:
            return None
        self._jobs.append((sink, list(range(first, len(tokens) // 16))))
        return lambda: None

    def make(self, job: int, count: int) -> None:
        sink, left = self._jobs[job]
        for _ in range(count):
            number = left.pop(0)
            sink.block(number, self._blocks[number])
        if not left:
            sink.end()


class Cloud(Side):
    """A service over a real store, which encodes with a real card, one block at a time."""

    name = "cloud"

    def __init__(self, given: Any, folder: Path, limits: Limits) -> None:
        super().__init__()
        self._given, self._limits = given, limits
        (folder / "node.secret").write_bytes(given.secret)
        (folder / "node.secret").chmod(0o600)
        shelf = ProfileStore(folder / "cards")
        shelf.add(given.card)
        self._later = 0.0
        self._store, self._maker = TieredStore(16 << 20), ByHand(given)
        self._encoder = BlockEncoder(shelf, threads=1, clock=lambda: self._later)
        self._service = StoreService(
            self._store,
            folder,
            ServeOptions(
                tenant_of={"laptop": "a"}.get,
                encoder=self._encoder,
                prefiller=self._maker,
                clock=lambda: 1_700_000_000.0,
            ),
        )
        self._woken = threading.Event()
        self.do_cloud_knows_user("laptop")

    def ready(self) -> None:
        self._encoder.submit(lambda: None).result(patient(10))

    def do_cloud_knows_user(self, user: str) -> None:
        self.session = ServerSession(
            self._service, user, SendScheduler(), node=self._given.cloud, epoch=self._given.epoch, limits=self._limits,
            wake=self._woken.set,
        )  # fmt: skip

    def do_cloud_drops(self, context: str, at: int) -> None:
        self._store.drop(self._given.contexts[context].keys[at], "test")

    def do_cloud_gets(self, context: str, at: int, other: bool) -> None:
        held = self._given.contexts[context]
        data = held.blocks[at]
        if other:  # the same block with other numbers
            view = parse(data)
            data = reseal(view, {(0, "k"): bytes(view.layout.planes[0].nbytes)}).tobytes()
        assert self._store.put(held.keys[at], data)

    def do_cloud_makes(self, job: int, count: int) -> None:
        self._maker.make(job, count)

    def do_cloud_waits(self, seconds: float) -> None:
        self._later += seconds
        self._woken.clear()
        assert self._woken.wait(patient(10))

    def do_cloud_drains(self, text: str) -> None:
        self.session.drain(text)

    def close(self) -> None:
        self._service.check()
        self._service.close()
        self._encoder.close()
        self._encoder.check()
        self._store.close()


class Edge(Side):
    """A client session and what was wanted of it."""

    name = "edge"

    def __init__(self, given: Any, limits: Limits) -> None:
        super().__init__()
        self._given = given
        self._wanted: dict[str, Any] = {}
        self.session = ClientSession(
            node=given.edge, spaces=[given.space.digest], models=[given.space], limits=limits, bandwidth=lambda: 1000.0
        )
        self.session.program = given.program

    def ready(self) -> None:
        """All that it does is done in the calls."""

    def do_match(self, name: str, context: str) -> None:
        self._wanted[name] = self.session.match(self._given.space.digest, self._given.contexts[context].keys)

    def _buffer(self, context: str, first: int, last: int, refine: bool = False, **options: Any) -> FetchBuffer:
        held = self._given.contexts[context]
        request = FetchRequest(self._given.space, held.tokens[: 16 * last], first, **options)
        return FetchBuffer(request, held.keys[:last], refine=refine)

    def do_fetch(
        self, name: str, context: str, first: int, last: int, order: Any, state: bool, payload: int, window: int,
        wish: Mapping[str, Any],
    ) -> None:  # fmt: skip
        levels, refine = LevelRequest(**wish), wish.get("refine", False)
        wanted = self._buffer(context, first, last, refine, order=order, state=state, levels=levels)
        self._wanted[name] = wanted
        self.session.fetch(wanted, payload=payload, window=window)

    def do_prefill(self, name: str, context: str, first: int, last: int, payload: int, window: int) -> None:
        self._wanted[name] = self._buffer(context, first, last, order="tail")
        self.session.fetch(self._wanted[name], payload=payload, window=window, compute=True)

    def do_card(self, name: str, payload: int, window: int) -> None:
        self._wanted[name] = ProfileBuffer(self._given.space.digest, profile_digest(self._given.card))
        self.session.fetch_profile(self._wanted[name], payload=payload, window=window)

    def do_put(self, name: str, context: str, first: int, last: int, payload: int, lacking: list[int]) -> None:
        held = self._given.contexts[context]
        blocks = held.blocks[first:last]

        def read(i: int) -> bytes:
            if i in lacking:
                raise LookupError(i)
            return bytes(blocks[i])

        self._wanted[name] = self.session.put(
            PutRequest(
                self._given.space.digest,
                held.keys[first:last],
                [*map(len, blocks)],
                parent=held.keys[first - 1] if first else ROOT,
            ),
            read,
            payload=payload,
        )

    def do_put_state(self, name: str) -> None:
        keys, state = self._given.contexts["one"].keys, self._given.state
        self._wanted[name] = self.session.put(
            PutRequest(self._given.space.digest, keys[5:], [len(state)], parent=keys[4], state=True), lambda _: state
        )

    def do_cancel(self, name: str) -> None:
        self.session.cancel(self._wanted[name])

    def do_bye(self, text: str) -> None:
        self.session.bye(text)

    def results(self) -> dict[str, Any]:
        """What became of all that was wanted."""
        return {name: self._result(what) for name, what in self._wanted.items()}

    def _result(self, what: Any) -> Any:
        if isinstance(what, Request):
            return {"error": what.error.what} if what.error else json.loads(msgspec.json.encode(what.result))
        if isinstance(what, ProfileBuffer):
            return {"ended": what.ended, "card": sha(what.data(0))}
        what.check()
        views = what.views(what.tail())
        state = what.state(0) if what.ended == "" else None
        finer = what.refinements(len(views)) if what.refines and views else []
        return {
            "ended": what.ended,
            "received": what.received,
            "blocks": [sha(view.buffer) for view in views],
            "levels": [view.header.level for view in views],
            "state": state and sha(state.buffer),
            "refinements": [view and [view.header.level, sha(view.buffer)] for view in finer],
        }

    def close(self) -> None:
        self.session.close()


def recorded(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *steps = map(json.loads, lzma.decompress((DATA / f"{name}.jsonl.xz").read_bytes()).splitlines())
    return head, steps


@pytest.mark.parametrize("name", TALKS)
def test_an_old_edge_and_a_new_cloud(name: str, given: Any, tmp_path: Path) -> None:
    head, steps = recorded(name)
    cloud = Cloud(given, tmp_path, Limits(terms=Terms(**head["terms"])))
    try:
        cloud.replay(steps)
        assert [cloud.session.dead, cloud.session.reason] == head["end"][4:6]
    finally:
        cloud.close()


@pytest.mark.parametrize("name", TALKS)
def test_a_new_edge_and_an_old_cloud(name: str, given: Any) -> None:
    head, steps = recorded(name)
    edge = Edge(given, Limits(terms=Terms(**head["terms"])))
    edge.replay(steps)
    assert edge.results() == head["results"]
    session = edge.session
    assert [session.draining, session.dead, session.reason, session.announced_count()] == [
        *head["end"][:1],
        *head["end"][2:4],
        head["end"][6],
    ]
    edge.close()


def test_every_message_was_said() -> None:
    """The recordings hold each kind of message there is."""
    kinds = {frames[0][12:14] for name in TALKS for step in recorded(name)[1] if (frames := step.get("frames"))}
    assert kinds == {f"{number:02x}" for number in range(1, 22)}
