"""mem0's vector store and embedder on a memory: vectors as they were given, searched exactly, in the memory's file."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ctxreuse.embed import Embedder, open_embedder
from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store.items import Items, ItemTable, item_key
from ctxreuse.store.recall.rank import Words
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.adapters.mem0_filters import meets
from ctxreuse_agents.memory import Memory

with framework("mem0ai", "2.0", "2.3"):
    from mem0.embeddings.base import EmbeddingBase
    from mem0.embeddings.configs import EmbedderConfig
    from mem0.utils.factory import EmbedderFactory, VectorStoreFactory
    from mem0.vector_stores.base import VectorStoreBase
    from mem0.vector_stores.configs import VectorStoreConfig

__all__ = ["Mem0Embedder", "Mem0VectorStore"]

_VECTORS, _COLLECTIONS, _PROVIDER = ("mem0", "vectors"), ("mem0", "collections"), "ctxreuse"
_Filters = Mapping[str, Any] | None


class _Collection(msgspec.Struct, frozen=True, array_like=True):
    """``state``: another one after each change. ``newest``: the number of the row that came last."""

    name: str
    dimensions: int = 0
    state: str = ""
    newest: int = 0


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A vector, float32; ``number``: rows that came later have a higher one."""

    id: str
    number: int
    vector: bytes
    payload: dict[str, Any]


class _Found(msgspec.Struct):
    """A row as mem0 reads it."""

    id: str
    score: float | None
    payload: dict[str, Any]


_row, _collection = msgspec.msgpack.Decoder(_Row), msgspec.msgpack.Decoder(_Collection)


class Mem0VectorStore(VectorStoreBase):  # type: ignore[misc]
    """A vector store whose vectors and payloads lie in a memory's folder. Any thread may call.

    All vectors are compared, and filters are met by all that is returned: a filter that few rows meet loses none of
    them. What a method wrote is on the disk when it returns; many rows are one transaction.
    """

    def __init__(self, memory: Memory, collection_name: str = "mem0") -> None:
        """Use a memory, which the caller closes. Several collections may lie in one."""
        self.collection_name = collection_name
        self._items, self._lock, self._loaded = Items(memory.ledger), threading.Lock(), _Loaded("")

    @classmethod
    def config(cls, memory: Memory, collection_name: str = "mem0") -> Any:
        """Return the ``vector_store`` of mem0's ``MemoryConfig``."""
        VectorStoreFactory.provider_to_class[_PROVIDER] = f"{cls.__module__}.{cls.__name__}"
        given = _Settings(memory, collection_name)
        return VectorStoreConfig.model_construct(provider=_PROVIDER, config=given)

    def create_col(self, name: str, vector_size: int | None = None, distance: str | None = "cosine") -> None:
        """Use the collection of that name, which is created if necessary. Raises ConfigError for other distances."""
        if distance is not None and str(distance).lower() != "cosine":
            raise ConfigError(f"vectors are compared by cosine, not by {distance!r}"[:200], fix="Use cosine")
        with self._lock:
            self.collection_name, self._loaded = name, _Loaded("")
        self._change(lambda table, collection: {}, int(vector_size or 0))

    def insert(
        self,
        vectors: Sequence[Sequence[float]],
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[Any] | None = None,
    ) -> None:
        """Add rows; one whose id is there takes that one's place. Raises ConfigError for vectors of another length."""
        names = [str(uuid.uuid4()) for _ in vectors] if ids is None else list(map(str, ids))
        values = [{} for _ in vectors] if payloads is None else payloads
        if not len(names) == len(values) == len(vectors):
            raise ConfigError(f"{len(vectors)} vectors have {len(values)} payloads and {len(names)} ids")
        if not len(vectors):
            return
        table = _vectors(vectors)

        def work(_: ItemTable, collection: _Collection) -> dict[str, _Row | None]:
            rows = zip(names, table, values)
            return {
                name: _Row(name, collection.newest + number, vector.tobytes(), dict(value))
                for number, (name, vector, value) in enumerate(rows, 1)
            }

        self._change(work, table.shape[1])

    def search(self, query: str, vectors: Sequence[Any], top_k: int = 5, filters: _Filters = None) -> list[_Found]:
        """Return the rows nearest to a vector that meet the filters, with their cosines as scores, nearest first."""
        query_vector = _vectors(np.asarray(vectors, np.float32).reshape(1, -1))
        with self._lock:
            loaded = self._current()
            self._same_length(loaded.dimensions, query_vector.shape[1])
            return _first(loaded.nearest(query_vector[0]), top_k, filters)

    def keyword_search(self, query: str, top_k: int = 5, filters: _Filters = None) -> list[_Found]:
        """Return the rows whose texts have any of the words, in any form, by BM25; the best first."""
        with self._lock:
            return _first(self._current().worded(query), top_k, filters)

    def get(self, vector_id: str) -> _Found | None:
        """Return a row; None if there is none."""
        with self._items.read() as table:
            body = table.get(self._key(str(vector_id)))
        row = None if body is None else _row.decode(body)
        return None if row is None else _Found(row.id, None, row.payload)

    def update(
        self, vector_id: str, vector: Sequence[float] | None = None, payload: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the vector of a row, its payload, or both. Raises SessionError if there is none."""
        made = None if vector is None else _vectors([vector])

        def work(table: ItemTable, _: _Collection) -> dict[str, _Row | None]:
            body = table.get(self._key(str(vector_id)))
            if body is None:
                raise SessionError(f"there is no vector {str(vector_id)[:60]!r}", fix="list() has them all")
            old = _row.decode(body)
            new = _Row(
                old.id,
                old.number,
                old.vector if made is None else made[0].tobytes(),
                old.payload if payload is None else dict(payload),
            )
            return {old.id: new}

        self._change(work, 0 if made is None else made.shape[1])

    def delete(self, vector_id: str) -> None:
        """Delete a row, if there is one of that id; `Memory.compact` takes it out of the file."""
        self._change(lambda table, _: {str(vector_id): None}, 0)

    def list_cols(self) -> list[str]:
        """Return the names of all collections in the memory."""
        with self._items.read() as table:
            return [_collection.decode(body).name for _, body in table.scan(item_key(*_COLLECTIONS))]

    def col_info(self) -> dict[str, Any]:
        """Return the collection's name, number of rows, length of vectors, and distance."""
        with self._lock:
            loaded = self._current()
        about = {"count": len(loaded.rows), "dimensions": loaded.dimensions, "distance": "cosine"}
        return {"name": self.collection_name, **about}

    def delete_col(self) -> None:
        """Delete the collection and all that is in it."""

        def work(table: ItemTable) -> None:
            for key in table.keys(item_key(*_VECTORS, self.collection_name)):
                table.delete(key)
            table.delete(item_key(*_COLLECTIONS, self.collection_name))

        self._items.write(work)

    def reset(self) -> None:
        """Delete all that is in the collection."""
        self.delete_col()
        self.create_col(self.collection_name)

    def _key(self, id: str) -> bytes:
        return item_key(*_VECTORS, self.collection_name, id)

    def _stored(self, table: ItemTable) -> _Collection:
        body = table.get(item_key(*_COLLECTIONS, self.collection_name))
        return _Collection(self.collection_name) if body is None else _collection.decode(body)

    def _same_length(self, known: int, given: int) -> None:
        if known and given and known != given:
            what = f"vectors of the collection {self.collection_name[:60]!r} have {known} numbers, not {given}"
            raise ConfigError(what, fix="Give the vectors of another embedder another collection_name")

    def _change(self, work: Callable[[ItemTable, _Collection], dict[str, _Row | None]], length: int) -> None:
        """Write rows, None: delete it, in one transaction, and keep what is loaded up to date."""

        def run(table: ItemTable) -> tuple[str, dict[str, _Row | None], _Collection]:
            before = self._stored(table)
            self._same_length(before.dimensions, length)
            rows = work(table, before)
            newest = max([before.newest, *(row.number for row in rows.values() if row is not None)])
            after = _Collection(before.name, before.dimensions or length, uuid.uuid4().hex, newest)
            table.put(item_key(*_COLLECTIONS, self.collection_name), msgspec.msgpack.encode(after))
            for id, row in rows.items():
                if row is None:
                    table.delete(self._key(id))
                else:
                    table.put(self._key(id), _encoded(row))
            return before.state, rows, after

        with self._lock:
            state, rows, after = self._items.write(run)
            if self._loaded.state == state:
                self._loaded.state, self._loaded.dimensions = after.state, after.dimensions
                self._loaded.apply(rows)

    def _current(self) -> _Loaded:
        """Return the rows as they are on the disk, where another store may have changed them."""
        with self._items.read() as table:
            stored = self._stored(table)
            if self._loaded.state != stored.state:
                self._loaded = _Loaded(stored.state, stored.dimensions)
                prefix = item_key(*_VECTORS, self.collection_name)
                self._loaded.apply({(row := _row.decode(body)).id: row for _, body in table.scan(prefix)})
        return self._loaded

    def list(self, filters: _Filters = None, top_k: int | None = None) -> list[list[_Found]]:
        """Return the rows that meet the filters, the newest first, in a list of one list."""
        with self._lock:
            rows = sorted(self._current().rows.values(), key=lambda row: -row.number)
        return [_first(((row, None) for row in rows), len(rows) if top_k is None else top_k, filters)]


class _Loaded:
    """The rows of a collection in memory: their vectors in one table, each of length 1, and their words."""

    def __init__(self, state: str, dimensions: int = 0) -> None:
        self.state, self.dimensions = state, dimensions
        self.rows: dict[str, _Row] = {}
        self._ids: list[str | None] = []
        self._places: dict[str, int] = {}
        self._table = np.zeros((0, dimensions), np.float32)
        self._words = Words()

    def apply(self, rows: Mapping[str, _Row | None]) -> None:
        """Take over rows; None: deleted."""
        if self._table.shape[1] != self.dimensions:  # it had no rows before
            self._table = np.zeros((0, self.dimensions), np.float32)
        for id, row in rows.items():
            if row is None:
                place = self._places.pop(id, None)
                if place is not None:
                    self._ids[place] = None
                    self._words.remove(place)
                    del self.rows[id]
                continue
            place = self._places.setdefault(id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(id)
            if place >= len(self._table):
                more = np.zeros((max(64, place, len(rows)), self.dimensions), np.float32)
                self._table = np.concatenate([self._table, more])
            vector = np.frombuffer(row.vector, "<f4")
            self._table[place] = vector / max(float(np.linalg.norm(vector)), 1e-12)
            self.rows[id] = row
        self._words.put((self._places[id], _text(row)) for id, row in rows.items() if row is not None)
        if len(self._ids) > 2 * len(self.rows) + 64:  # many were deleted: the next search loads it again
            self.state = ""

    def nearest(self, vector: NDArray[np.float32]) -> Iterator[tuple[_Row, float | None]]:
        """Iterate over the rows and their cosines, the nearest first, then the newest."""
        if not self._ids:
            return
        cosines = self._table[: len(self._ids)] @ (vector / max(float(np.linalg.norm(vector)), 1e-12))
        for place in np.lexsort((-np.arange(len(cosines)), -cosines)):
            if (id := self._ids[place]) is not None:
                yield self.rows[id], max(0.0, float(cosines[place]))

    def worded(self, query: str) -> Iterator[tuple[_Row, float | None]]:
        """Iterate over the rows with any of the words and their scores, the best first."""
        for place, score in self._words.rank(query):
            if (id := self._ids[place]) is not None:
                yield self.rows[id], score


class _Settings:
    """What mem0 makes a store of: it is copied and changed for the collection of entities, the memory is not."""

    def __init__(self, memory: Memory, collection_name: str) -> None:
        self.memory, self.collection_name = memory, collection_name

    def model_dump(self) -> dict[str, Any]:
        """Return the arguments of `Mem0VectorStore`."""
        return {"memory": self.memory, "collection_name": self.collection_name}

    def __deepcopy__(self, known: Any) -> _Settings:
        return _Settings(self.memory, self.collection_name)


class Mem0Embedder(EmbeddingBase):  # type: ignore[misc]
    """An embedder of mem0 that runs in this process and asks no server: that of `Memory.search`, or another one."""

    def __init__(self, config: Any = None, *, embedder: Embedder | None = None) -> None:
        """``embedder``: default: that of the extra ``embed``. Raises ConfigError without it."""
        super().__init__(config)
        self._embedder = open_embedder() if embedder is None else embedder

    @classmethod
    def config(cls) -> Any:
        """Return the ``embedder`` of mem0's ``MemoryConfig``."""
        EmbedderFactory.provider_to_class[_PROVIDER] = f"{cls.__module__}.{cls.__name__}"
        return EmbedderConfig.model_construct(provider=_PROVIDER, config={})

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        """Return the vector of a text."""
        return self.embed_batch([text])[0]

    def embed_batch(self, texts: Sequence[str], memory_action: str | None = "add") -> list[list[float]]:
        """Return the vectors of texts."""
        vectors: list[list[float]] = self._embedder.embed(list(texts)).vectors.tolist()
        return vectors


def _vectors(given: Any) -> NDArray[np.float32]:
    """Return vectors as a table. Raises ConfigError for what is none."""
    try:
        table = np.ascontiguousarray(given, "<f4")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"these are no vectors: {error}"[:200], fix="Give lists of numbers, all as long") from None
    if table.ndim != 2 or not table.shape[1] or not np.isfinite(table).all():
        raise ConfigError("a vector is empty, or has numbers that are not finite", fix="Look at what the embedder gave")
    return table


def _encoded(row: _Row) -> bytes:
    try:
        body = msgspec.msgpack.encode(row)
        _row.decode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        fix = "Use str keys and None, bool, int of 64 bits, float, str, bytes, list or dict as values"
        raise SessionError(f"the payload of {row.id[:60]!r} cannot be stored: {error}", fix=fix) from None
    return body


def _text(row: _Row) -> str:
    text = row.payload.get("data")
    return text if isinstance(text, str) else ""


def _first(found: Iterator[tuple[_Row, float | None]], count: int, filters: _Filters) -> list[_Found]:
    """Return the first so many that meet the filters; their payloads are the caller's to change."""
    kept = list[_Found]()
    wanted = filters or {}
    for row, score in found if count > 0 else ():
        if meets(row.payload, wanted):
            kept.append(_Found(row.id, score, copy.deepcopy(row.payload)))
            if len(kept) == count:
                break
    return kept
