"""Encoding values: new ones at the store's level, and cold stored ones smaller before anything is evicted.

A value and its record change in one transaction, so that a crash leaves either the old pair or the new one. Until the
commit both are in memory only: the stored bytes never exceed the capacity.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, Kind, parse
from ctxreuse.block.levels import EXACT, PACKED, allowed_by, check_lossy, expected_kl, is_exact
from ctxreuse.errors import ConfigError, CtxReuseError, FormatError, StoreError
from ctxreuse.store.base import BlockCodec
from ctxreuse.store.blocks.index import Index
from ctxreuse.store.blocks.pending import Put
from ctxreuse.store.blocks.tables import table_of
from ctxreuse.store.lmdb.env import Env
from ctxreuse.store.lmdb.records import Record, footprint
from ctxreuse.store.policy.recompress import Candidate, Step, choose

__all__ = ["BlockCodecs", "Recompressed", "Recompressor", "check_level"]

log = logging.getLogger(__name__)

#: Bytes of values that are encoded in one transaction: as much as a batch of puts has.
_BATCH = 32 << 20
#: Share of the capacity, the most recently used, that is never coded lossily.
_SPARED = 4


def check_level(level: str) -> str:
    """Return a level that blocks may be stored at: ``exact``, ``exact+rans`` or a lossy one. Raises ConfigError."""
    try:
        return level if level in (EXACT, PACKED) else check_lossy(level)
    except ConfigError as error:
        fix = f"Use {EXACT}, {PACKED} or the name of a lossy level, such as kl-0.01"
        raise ConfigError(f"no such level: {level[:64]!r}", fix=fix) from error


class BlockCodecs:
    """Codecs by the digest of their space; ``level`` is the store's. Any thread may call.

    A block whose space has no codec is stored as it came.
    """

    def __init__(self, level: str) -> None:
        self._level = check_level(level)
        self._codecs: dict[bytes, BlockCodec] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._codecs)

    def register(self, codec: BlockCodec) -> None:
        """Encode blocks of its space with it; the last one of a space is used."""
        with self._lock:
            self._codecs[codec.space.digest] = codec

    def ratio(self, level: str) -> float | None:
        """Return the expected size at a level as a share of the exact size; None if no codec can make it."""
        with self._lock:
            codecs = list(self._codecs.values())
        shares = [share for share in (_share(codec, level) for codec in codecs) if share is not None]
        return min(shares, default=None) if level != EXACT else 1.0

    def smallest(self, max_kl: float | None) -> str:
        """Return the smallest lossy level that some codec can make within ``max_kl``; "" if there is none."""
        with self._lock:
            found = {info.name for codec in self._codecs.values() for info in codec.levels if not is_exact(info.name)}
        allowed = (name for name in found if allowed_by(name, max_kl))
        return max(allowed, key=lambda name: (expected_kl(name), -(self.ratio(name) or 1.0)), default="")

    def target(self, put: Put) -> str:
        """Return the level at which a put will be stored, if that makes it smaller."""
        codec = self._codecs.get(put.view.header.space)
        if codec is None or not is_exact(put.level) or self._level == EXACT or _is_partial(put.view, codec):
            return put.level
        if self._level != PACKED and allowed_by(self._level, put.max_kl) and _share(codec, self._level) is not None:
            return self._level
        return PACKED if _share(codec, PACKED) is not None else put.level

    def encoded(self, put: Put) -> Put:
        """Return the put as it will be stored: encoded now if that makes it smaller. Takes time; never raises."""
        target = self.target(put)
        # A value that is no smaller at its target still replaces what it would have replaced there.
        for to in dict.fromkeys((target, PACKED)) if target != put.level else ():
            made = self.shrink(put.view, to) if to != put.level else None
            if made is None:
                continue
            again = Put.parse(put.key, made, put.kind, put.replace, put.max_kl, put.giver)
            if again is not None and again.size < put.size:
                return again
        return put

    def shrink(self, view: BlockView, to: str) -> npt.NDArray[np.uint8] | None:
        """Encode a block or state at the level ``to``, or at the stricter one that keeps for it what ``to`` promises.

        None if no codec can, or the result is no smaller.
        """
        try:
            codec = self._codecs.get(view.header.space)
            if codec is None or expected_kl(to) < expected_kl(view.header.level) or _share(codec, to) is None:
                return None
            if _is_partial(view, codec):
                return None
            raw = view if view.header.level == EXACT else parse(codec.decode(view))
            made = codec.encode(raw, codec.level_for(raw, to))
        except CtxReuseError as error:
            log.warning("a value is not encoded: %s", error)
            return None
        except Exception:
            # Whatever is wrong with a codec, the writer must get its batch to the disk.
            log.exception("a value is not encoded: its codec failed")
            return None
        return made if made.nbytes < len(view.buffer) else None


def _is_partial(view: BlockView, codec: BlockCodec) -> bool:
    """Return True for a block with fewer tokens than codecs encode: the end of a context."""
    return view.header.kind == "block" and len(view.header.tokens) < 4 * codec.space.block_tokens


def _share(codec: BlockCodec, level: str) -> float | None:
    if level != EXACT and all(info.name != level for info in codec.levels):
        return None
    exact = codec.nbytes(EXACT)
    return codec.nbytes(level) / exact if exact else None


class Recompressed(NamedTuple):
    """A value that was encoded smaller: its levels before and after."""

    key: bytes
    before: str
    after: str


class _Made(NamedTuple):
    """A value to write: its new bytes and level."""

    step: Step
    data: npt.NDArray[np.uint8]
    level: str

    @property
    def kind(self) -> Kind:
        return self.step.candidate.kind

    @property
    def key(self) -> bytes:
        return self.step.candidate.key


class Recompressor:
    """Makes room in one store. ``lock`` guards ``index``. Only the writer's thread calls `make_room`."""

    def __init__(self, env: Env, index: Index, codecs: BlockCodecs, lock: threading.RLock) -> None:
        self._env, self._index, self._codecs, self._lock = env, index, codecs, lock
        #: (kind, key, level, to) of values that did not shrink: not tried again.
        self._stiff: set[tuple[Kind, bytes, str, str]] = set()

    def retry(self) -> None:
        """Try all values again: a new codec may do better."""
        with self._lock:
            self._stiff.clear()

    def make_room(self, puts: Sequence[Put]) -> Iterator[Sequence[Recompressed]]:
        """Encode stored values smaller until ``puts`` have room, as far as possible; yields the values of each commit.

        Raises lmdb.Error, StoreError, ValueError (a bad record); what was committed before stays.
        """
        busy = {put.key for put in puts}
        while True:
            with self._lock:
                need, spared = self._index.shortage(puts), self._index.capacity // _SPARED
                if len(self._stiff) > 1000 + 2 * len(self._index.tree):
                    self._stiff.clear()  # most of them are gone
                steps = choose(self._coldest(busy), need, spared, self._codecs.ratio) if need > 0 else ()
            if not steps:
                return
            yield self._commit(self._encode(_first(steps)))

    def _coldest(self, busy: set[bytes]) -> Iterator[Candidate]:
        smallest: dict[float | None, str] = {}
        for key in self._index.policy.order():
            node = self._index.tree.get(key)
            if node is None or node.pins or key in busy:
                continue
            if node.max_kl not in smallest:
                smallest[node.max_kl] = self._codecs.smallest(node.max_kl)
            lossy = smallest[node.max_kl]
            values: tuple[tuple[Kind, str, int], ...] = (
                ("state", node.state_level, node.state_nbytes),
                ("block", node.level, node.nbytes),
            )
            for kind, level, nbytes in values:
                if nbytes and is_exact(level):
                    stiff = tuple(to for to in (PACKED, lossy) if (kind, key, level, to) in self._stiff)
                    yield Candidate(kind, key, level, nbytes, lossy, stiff)

    def _encode(self, steps: Sequence[Step]) -> list[_Made]:
        with self._env.read() as txn:
            # Copies: encoding takes longer than a read may.
            found = [txn.get(step.candidate.key, db=self._env.tables[table_of(step.candidate.kind)]) for step in steps]
            raws = [bytes(raw) if raw is not None else b"" for raw in found]
            del found
        made: list[_Made] = []
        for step, raw in zip(steps, raws):
            try:
                data = self._codecs.shrink(parse(raw), step.to)
            except FormatError:
                data = None
            if data is None or footprint(data.nbytes) >= step.candidate.nbytes:
                self._give_up(step)
            else:
                made.append(_Made(step, data, parse(data).header.level))
        return made

    def _give_up(self, step: Step) -> None:
        with self._lock:
            self._stiff.add((step.candidate.kind, step.candidate.key, step.candidate.level, step.to))

    def _commit(self, made: Sequence[_Made]) -> list[Recompressed]:
        with self._lock:
            fresh = [one for one in made if self._unchanged(one)]
        records: dict[bytes, Record] = {}

        def work(txn: Any) -> None:
            for one in fresh:
                raw = txn.get(one.key, db=self._env.tables["meta"])
                if raw is None:
                    raise StoreError("a stored value has no record", where=one.key.hex()[:16])
                record, size = Record.unpack(raw), footprint(one.data.nbytes)
                if one.kind == "block":
                    record = record._replace(nbytes=size, level=one.level)
                else:
                    record = record._replace(state_nbytes=size, state_level=one.level)
                txn.put(one.key, one.data.data, db=self._env.tables[table_of(one.kind)])
                txn.put(one.key, record.pack(), db=self._env.tables["meta"])
                records[one.key] = record

        if fresh:
            self._env.write(work)
        with self._lock:
            for one in fresh:
                self._index.update(one.kind, one.key, records[one.key])
        return [Recompressed(one.key, one.step.candidate.level, one.level) for one in fresh]

    def _unchanged(self, made: _Made) -> bool:
        """Return False if a reader that allows less has come meanwhile, or the value was dropped; then give it up."""
        node = self._index.tree.get(made.key)
        level = "" if node is None or node.pins else node.level if made.kind == "block" else node.state_level
        if node is not None and level == made.step.candidate.level and allowed_by(made.level, node.max_kl):
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
