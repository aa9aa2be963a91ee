"""Encoding held values smaller in place, in the writer's thread: what the demotion policy chose, a batch at a time.

A value and its record change in one transaction, so that a death leaves either the old pair or the new one. Until the
commit both take memory only: what is held never exceeds the capacity.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import parse
from ctxreuse.errors import StoreError
from ctxreuse.levels import PACKED, fits, is_exact
from ctxreuse.store.base import Kind
from ctxreuse.store.coding import Coders
from ctxreuse.store.env import Env
from ctxreuse.store.index import Index
from ctxreuse.store.policy.demotion import Candidate, Step, choose
from ctxreuse.store.put import Put
from ctxreuse.store.records import Record, footprint

__all__ = ["Changed", "Demoter"]

#: Bytes of values that are encoded in one transaction: as much as the batches of puts have.
_BATCH = 32 << 20
#: Share of the capacity, the most recently used, that is never coded lossily.
_SPARED = 4


class Changed(NamedTuple):
    """A value that is encoded smaller now: its levels before and since."""

    key: bytes
    before: str
    to: str


class Made(NamedTuple):
    """A value as it will stand: its new bytes and level."""

    step: Step
    data: npt.NDArray[np.uint8]
    level: str

    @property
    def name(self) -> tuple[Kind, bytes]:
        """Which value it is."""
        return self.step.candidate.kind, self.step.candidate.key


class Demoter:
    """Makes room in one store. ``lock`` guards ``index``. `make_room` is the writer thread's; `retry` is anybody's."""

    def __init__(self, env: Env, index: Index, coders: Coders, lock: threading.RLock) -> None:
        self._env, self._index, self._coders, self._lock = env, index, coders, lock
        #: (kind, key, level, to) of values that did not shrink: that is not tried again.
        self._stiff: set[tuple[Kind, bytes, str, str]] = set()

    def retry(self) -> None:
        """A new coder may do better than those before."""
        with self._lock:
            self._stiff.clear()

    def make_room(self, puts: Sequence[Put]) -> Iterator[Sequence[Changed]]:
        """Encode held values smaller until ``puts`` have room, as far as that goes; yields what each commit changed.

        Raises lmdb.Error, StoreError, ValueError (a bad record); what was committed before stays.
        """
        busy = {put.key for put in puts}
        while True:
            with self._lock:
                need, spared = self._index.shortage(puts), self._index.capacity // _SPARED
                if len(self._stiff) > 1000 + 2 * len(self._index.tree):
                    self._stiff.clear()  # most of them are gone
                steps = choose(self._coldest(busy), need, spared, self._coders.ratio) if need > 0 else ()
            if not steps:
                return
            yield self._commit(self._encode(_first(steps)))

    def _coldest(self, busy: set[bytes]) -> Iterator[Candidate]:
        for key in self._index.policy.order():
            node = self._index.tree.get(key)
            if node is None or node.pins or key in busy:
                continue
            values: tuple[tuple[Kind, str, int], ...] = (
                ("state", node.state_level, node.state_nbytes),
                ("block", node.level, node.nbytes),
            )
            for kind, level, nbytes in values:
                if nbytes and is_exact(level):
                    stiff = tuple(to for to in (PACKED, node.lossy) if (kind, key, level, to) in self._stiff)
                    yield Candidate(kind, key, level, nbytes, node.lossy, stiff)

    def _encode(self, steps: Sequence[Step]) -> list[Made]:
        with self._env.read() as txn:
            # Copies: encoding takes longer than a read may.
            found = [txn.get(step.candidate.key, db=self._env.tables[_table(step.candidate.kind)]) for step in steps]
            held = [bytes(raw) if raw is not None else b"" for raw in found]
            del found
        made: list[Made] = []
        for step, raw in zip(steps, held):
            data = self._coders.shrink(memoryview(raw), step.to)
            if data is None or footprint(data.nbytes) >= step.candidate.nbytes:
                self._give_up(step)
            else:
                made.append(Made(step, data, parse(data).header.level))
        return made

    def _give_up(self, step: Step) -> None:
        with self._lock:
            self._stiff.add((step.candidate.kind, step.candidate.key, step.candidate.level, step.to))

    def _commit(self, made: Sequence[Made]) -> list[Changed]:
        with self._lock:
            fresh = [one for one in made if self._wanted(one)]
        records: dict[bytes, Record] = {}

        def work(txn: Any) -> None:
            for one in fresh:
                kind, key = one.name
                raw = txn.get(key, db=self._env.tables["meta"])
                if raw is None:
                    raise StoreError("a held value has no record", where=key.hex()[:16])
                record, size = Record.unpack(raw), footprint(one.data.nbytes)
                if kind == "block":
                    record = record._replace(nbytes=size, level=one.level)
                else:
                    record = record._replace(state_nbytes=size, state_level=one.level)
                txn.put(key, one.data.data, db=self._env.tables[_table(kind)])
                txn.put(key, record.pack(), db=self._env.tables["meta"])
                records[key] = record

        if fresh:
            self._env.write(work)
        with self._lock:
            for one in fresh:
                self._index.reshape(*one.name, records[one.name[1]])
        return [Changed(one.name[1], one.step.candidate.level, one.level) for one in fresh]

    def _wanted(self, made: Made) -> bool:
        """Whether nothing has changed since it was chosen: a reader may have come that allows less, or it was dropped.

        What is not wanted is given up, so that making room ends.
        """
        kind, key = made.name
        node = self._index.tree.get(key)
        level = "" if node is None or node.pins else node.level if kind == "block" else node.state_level
        if node is not None and level == made.step.candidate.level and fits(made.level, node.lossy or None):
            return True
        self._give_up(made.step)
        return False


def _first(steps: Sequence[Step]) -> list[Step]:
    batch, size = [], 0
    for step in steps:
        batch.append(step)
        size += step.candidate.nbytes
        if size >= _BATCH:
            break
    return batch


def _table(kind: Kind) -> str:
    return "blocks" if kind == "block" else "states"
