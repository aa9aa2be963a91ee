"""An edge behind shaped links: the processes, the ways to get a context, and what they took."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.children import Child, relay, sidecar
from benchmarks.single import Single
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.remote import Fetch, FetchRequest
from ctxreuse.bus.transport import BusClient, ClientOptions
from ctxreuse.codec import ProfileStore
from ctxreuse.cost import CostModel, DecisionRecord, LinkEstimate
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.errors import LinkDownError
from ctxreuse.identity.keys import Tokens, prefix_keys
from ctxreuse.peer.fetch.clouds import CloudPool
from ctxreuse.peer.serve.engine import compute_blocks
from ctxreuse.runtime import Runtime, RuntimeOptions, Usage

__all__ = ["FALLEN", "FALLS_AFTER", "PATIENT", "Answer", "Cell", "Edge", "Row"]

_MEGABIT = 1e6 / 8
#: Mbit/s of a link that has failed but is not cut, and seconds after which it does.
FALLEN, FALLS_AFTER = 2, 0.3
#: Seconds that the bytes of a blocking fetch may take to be measured; above the first number it is measured once.
_OFTEN, PATIENT = 2.5, 10.0
_WAIT = 120.0


class Cell(NamedTuple):
    """A kind of link: Mbit/s and seconds."""

    rate: int
    rtt: float

    @property
    def name(self) -> str:
        return f"{self.rate}mbit_{self.rtt * 1e3:.0f}ms"

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.rate * _MEGABIT


class Answer(NamedTuple):
    """One answer of ours."""

    seconds: float
    record: DecisionRecord
    nbytes: int
    beside: float
    same: bool = True


class _Link(NamedTuple):
    """One link that is up: the runtime behind it, its clouds, and the relay's process."""

    cell: Cell
    runtime: Runtime
    cost: CostModel
    clouds: CloudPool
    wire: Child


class Edge:
    """The edge of the measurement: ``engine`` answers a ``prompt`` whose last ``question`` tokens nobody holds.

    Fills the cloud of ``folder`` with the rest and a short other context; close it.
    """

    def __init__(self, engine: Engine, prompt: Tokens, question: int, folder: Path) -> None:
        self.engine, self.prompt = engine, prompt
        space = engine.space
        self.context = prompt[: (len(prompt) - question) // space.block_tokens * space.block_tokens]
        self.other = prompt[::-1][: 2 * space.block_tokens].copy()
        self._cost = CostModel()
        Runtime(engine, None, RuntimeOptions(cost=self._cost)).calibrate()
        self.differs, self.same = [0.0], [1.0]
        self.recomputed: list[float] = []
        self._logits: Logits | None = None
        self.cloud = sidecar(folder)
        try:
            self._fill()
            self.question = self._question()
        except BaseException:
            self.cloud.close()
            raise

    def close(self) -> None:
        """End the cloud."""
        self.cloud.close()

    def _fill(self) -> None:
        """Give the cloud both contexts, as an edge does that has computed them."""
        space = self.engine.space
        with BusClient(self.cloud.said, ClientOptions(spaces=[space.digest])) as client:
            _until(lambda: client.state == "up")
            assert client.welcome is not None
            for ids in (self.context, self.other):
                keys = prefix_keys(space.digest, client.welcome.salt, ids, space.block_tokens)
                made = [made.data for made in compute_blocks(self.engine, client.welcome.salt, ids, 0)]
                client.put(
                    PutRequest(space.digest, keys, [data.nbytes for data in made]), made.__getitem__, timeout=_WAIT
                )

    def _question(self) -> float:
        """Seconds of computing the question, context in memory; also warms what the first prefills set up."""
        context = self.engine.new_context(len(self.prompt))
        self.engine.prefill(context, self.prompt)
        times = []
        for _ in range(5):
            self.engine.crop(context, len(self.context))
            at = time.perf_counter()
            self.engine.prefill(context, self.prompt[len(self.context) :])
            times.append(time.perf_counter() - at)
        return statistics.median(times)

    @contextmanager
    def link(self, cell: Cell, *, warm: bool = True, levels: bool = False) -> Iterator[_Link]:
        """A link of this kind to the cloud, whose announcements have arrived. ``levels``: blocks may come at those."""
        estimate, space = LinkEstimate(), self.engine.space
        with (
            relay(self.cloud.said, cell.bandwidth, cell.rtt) as wire,
            BusClient(
                f"tcp://127.0.0.1:{wire.said}", ClientOptions(name="cloud", models=[space], estimate=estimate)
            ) as client,
        ):
            _until(lambda: client.state == "up" and client.welcome is not None)
            assert client.welcome is not None
            keys = prefix_keys(space.digest, client.welcome.salt, self.context, space.block_tokens)
            _until(lambda: client.announced(keys) == len(keys))
            clouds = CloudPool([(client, estimate)], profiles=ProfileStore() if levels else None)
            if warm:
                self._whole(clouds, self.other)
            cost = CostModel()
            cost.restore(self._cost.dump())
            yield _Link(cell, Runtime(self.engine, None, RuntimeOptions(remote=clouds, cost=cost)), cost, clouds, wire)

    def _whole(self, clouds: CloudPool, ids: Tokens) -> Fetch:
        """Fetch all blocks of ``ids``, in the order of the context, and wait for them."""
        space = self.engine.space
        offer = clouds.offer(space, ids, after=0, timeout=_WAIT)
        assert offer is not None, "the cloud does not hold the context"
        request = FetchRequest(space, ids[: offer.blocks * space.block_tokens], state=space.needs_state)
        fetch = clouds.fetch(offer, request)
        if fetch.tail(fetch.count, _WAIT) < fetch.count:
            raise LinkDownError("a fetch of the bench did not end", where=str(fetch.ended))
        return fetch

    def recompute(self) -> float:
        """Seconds of computing everything."""
        at = time.perf_counter()
        context = self.engine.new_context(len(self.prompt))
        self._logits = self.engine.prefill(context, self.prompt)
        self.recomputed.append(time.perf_counter() - at)
        return self.recomputed[-1]

    def ours(self, link: _Link) -> Answer:
        """One answer over a link; its logits are compared with the last ones that were recomputed."""
        used, at = self.cloud.seconds + link.wire.seconds, time.perf_counter()
        done = link.runtime.prefill(self.prompt)
        seconds = time.perf_counter() - at
        beside = (self.cloud.seconds + link.wire.seconds - used) / seconds
        if self._logits is not None:
            self.differs.append(float(np.abs(done.logits - self._logits).max() / np.abs(self._logits).max()))
            self.same.append(float(np.argmax(done.logits) == np.argmax(self._logits)))
        return Answer(seconds, link.cost.log.records()[-1], done.usage.fetched_bytes, beside)

    def at_level(self, link: _Link, max_kl: float | None, only: str = "") -> tuple[Answer, Usage]:
        """One answer to a request that allows ``max_kl``; ``only``: the one level at which blocks may come."""
        remote = Single(link.clouds, only) if only else link.clouds
        runtime = Runtime(self.engine, None, RuntimeOptions(remote=remote, cost=link.cost))
        at = time.perf_counter()
        done = runtime.prefill(runtime.request(self.prompt, max_kl=max_kl))
        seconds = time.perf_counter() - at
        same = self._logits is None or bool(np.argmax(done.logits) == np.argmax(self._logits))
        return Answer(seconds, link.cost.log.records()[-1], done.usage.fetched_bytes, 0.0, same), done.usage

    def blocking(self, link: _Link) -> float:
        """Seconds of one answer that fetches everything before it loads, and loads before it computes."""
        at, context = time.perf_counter(), self.engine.new_context(len(self.prompt))
        fetch = self._whole(link.clouds, self.context)
        self.engine.load(context, fetch.views(fetch.count), fetch.state(0.0)).wait()
        self.engine.prefill(context, self.prompt[context.n :])
        return time.perf_counter() - at

    @property
    def nbytes(self) -> int:
        """Bytes of the context on the wire, heads left out."""
        return len(self.context) * self.engine.space.token_nbytes

    def bound(self, cell: Cell) -> float:
        """Seconds that no fetch of everything can beat."""
        return max(self.nbytes / cell.bandwidth + cell.rtt, self.question)

    def both(self, cell: Cell) -> float:
        """Seconds if the link brings the end of the context while the engine computes its front, then the question."""
        n, line = len(self.context), self._cost.prefill
        whole = statistics.median(self.recomputed) / (line.seconds(len(self.prompt)) or 1.0)
        meet = min(
            max(whole * (line.seconds(x) or 0.0), self.nbytes * (n - x) / n / cell.bandwidth + cell.rtt)
            for x in range(n + 1)
        )
        return min(self.bound(cell), meet + self.question)

    def cells(self, rate: int, trips: Sequence[float], rounds: int) -> list[Row]:
        """One row a round trip; all ways take turns, in the opposite order every other round."""
        with ExitStack() as stack:
            links = [stack.enter_context(self.link(Cell(rate, rtt))) for rtt in trips]
            rows = [Row(link.cell) for link in links]
            wire = self.nbytes / links[0].cell.bandwidth
            for turn in range(rounds):
                computed = self.recompute()
                for link, row in list(zip(links, rows))[:: -1 if turn % 2 else 1]:
                    row.ours.append(self.ours(link))
                    row.computed.append(computed)
                    if wire <= (_OFTEN if turn else PATIENT):
                        row.blocking.append(self.blocking(link))
            return rows

    def first_contact(self, cell: Cell, rounds: int) -> Row:
        """Links that have carried nothing before."""
        row = Row(cell)
        for _ in range(rounds):
            row.computed.append(self.recompute())
            with self.link(cell, warm=False) as link:
                row.ours.append(self.ours(link))
        return row

    def falling(self, cell: Cell) -> Row:
        """The rate drops in the middle of the fetch; once, as it may take long."""
        row = Row(cell)
        row.computed.append(self.recompute())
        with self.link(cell) as link:
            fall = threading.Timer(FALLS_AFTER, link.wire.order, [f"rate {FALLEN}Mbit/s"])
            fall.start()
            row.ours.append(self.ours(link))
            fall.join()
        return row


class Row:
    """What was measured in one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.ours: list[Answer] = []
        self.computed: list[float] = []
        self.blocking: list[float] = []

    @property
    def seconds(self) -> float:
        return statistics.median(one.seconds for one in self.ours)

    @property
    def slower(self) -> float:
        """Times recomputing, by pairs."""
        return statistics.median(one.seconds / computed for one, computed in zip(self.ours, self.computed))

    @property
    def fetches(self) -> bool:
        return any(one.record.way in ("layers", "tail") for one in self.ours)

    def note(self) -> str:
        """Ways as decided (and as they went), and medians of what else is known."""
        ways = {one.record.way if one.record.way == one.record.took else f"{one.record.way}, then {one.record.took}"
                for one in self.ours}  # fmt: skip
        said = [one.record.predicted for one in self.ours if one.record.predicted is not None]
        parts = [" or ".join(sorted(ways)), f"predicted {statistics.median(said):.3g} s" if said else "no prediction"]
        parts.append(f"{statistics.median(one.nbytes for one in self.ours) / 1e6:.3g} MB")
        parts.append(f"beside {statistics.median(one.beside for one in self.ours):.2g}")
        return ", ".join(parts)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT
    while not true():
        if time.monotonic() > deadline:
            raise LinkDownError("the bench waited in vain for its link")
        time.sleep(0.01)
