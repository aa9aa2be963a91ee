"""Agent memory: sessions that survive restarts, fork in O(1), and give an engine its KV back instead of a prefill."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ctxreuse.config import StoreConfig, load
from ctxreuse.engines import Engine, open_engine
from ctxreuse.errors import SessionError, StoreError, StoreOwnedError
from ctxreuse.runtime import Runtime
from ctxreuse.store import Hit, Ledger, LedgerStats, StoreStats, TieredStore, WholeStore, open_store
from ctxreuse.why import FILE, RequestBook
from ctxreuse_agents import transfer
from ctxreuse_agents.session import Session
from ctxreuse_agents.shared import Shared

__all__ = ["Memory", "MemoryStats"]

_log = logging.getLogger(__name__)


class MemoryStats(msgspec.Struct, frozen=True):
    """Figures of one moment: how much is remembered, and the KV store's own figures (None without one)."""

    text: LedgerStats
    blocks: StoreStats | None


class Memory:
    """All sessions in one folder. Any thread may call; one process at a time has it open for writing."""

    def __init__(
        self, ledger: Ledger, runtime: Runtime | None = None, *, readonly: bool = False, lossy: str | None = None
    ) -> None:
        """For those who open the parts themselves and close them: see `open`."""
        if runtime is not None:
            runtime.permit(lossy)
        self._shared = Shared(ledger, runtime, readonly=readonly, lossy=lossy)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        engine: str | os.PathLike[str] | Engine | Runtime | None = None,
        *,
        tenant: str = "default",
        capacity: int | None = None,
        readonly: bool = False,
        lossy: str | None = None,
        repair: str = "",
    ) -> Memory:
        """Open the memory in folder ``path`` (default: ``store.path`` of the settings), creating it if need be.

        ``engine``: None (text only: nothing is tokenised or computed), a model's name or folder, the address of a
        running edge daemon (``http://127.0.0.1:7351``; it computes and keeps KV), an engine, or a runtime, which is
        used as it is and stays yours to close. ``tenant`` salts the keys of KV: equal text of
        different tenants shares nothing. ``capacity``: bytes of KV on disk (default, like all else about the store: the
        settings, see ``ctxreuse config show``). ``lossy``: the worst level of KV, such as ``kl-0.01``, that sessions
        may reuse unless they say otherwise (see `session`); None: exact KV only. ``repair``: the most that mending
        moved documents may compute (``10%``, ``64`` tokens, ``200ms``; see `Runtime`, whose own counts where one is
        given; a daemon has its setting ``engine.repair``). Raises StoreOwnedError if another process has it open for
        writing, StoreError, what opening the engine raises (ConfigError, EngineError,
        LinkDownError), and ConfigError for a level that the model has no card for.
        """
        settings = load().settings.store
        folder = Path(path) if path is not None else settings.folder()
        if path is None and not readonly:
            folder.parent.mkdir(parents=True, exist_ok=True)
        runs: Engine | Runtime | None
        if isinstance(engine, str) and engine.startswith("http://"):
            from ctxreuse_agents.attached import attach

            runs = attach(engine)
        elif isinstance(engine, str | os.PathLike):
            runs = open_engine(os.fspath(engine))
        else:
            runs = engine
        with ExitStack() as opened:
            ledger = Ledger.open(folder, readonly=readonly)
            opened.callback(ledger.close)
            if runs is None or isinstance(runs, Runtime):
                runtime = runs
            else:
                if capacity is not None:
                    settings = msgspec.structs.replace(settings, capacity=capacity)
                store = _open_blocks(folder, settings, readonly)
                opened.callback(store.close)
                kept = not readonly and store.disk is not None
                requests = RequestBook(folder / FILE if kept else None).open()
                opened.callback(requests.close)
                runtime = Runtime(runs, store, tenant=tenant, requests=requests, repair=repair)
                opened.callback(runtime.close)
            memory = cls(ledger, runtime, readonly=readonly, lossy=lossy)
            memory.shared.owned = opened.pop_all()
        return memory

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def engine(self) -> Engine | None:
        """The attached engine; None if this memory holds text only."""
        return None if self._shared.runtime is None else self._shared.runtime.engine

    @property
    def runtime(self) -> Runtime | None:
        """What computes and keeps KV; None if this memory holds text only."""
        return self._shared.runtime

    @property
    def shared(self) -> Shared:
        """Ledger, runtime and locks, for those who build other faces on this memory."""
        return self._shared

    def create(self, name: str | None = None, *, lossy: str | None = None) -> Session:
        """A new, empty session; ``lossy``: see `session`. Raises SessionError if the name is taken."""
        self._shared.permit(lossy)
        return Session(self._shared, self._shared.ledger.create(name, lossy=lossy).id)

    def session(self, id_or_name: str, *, create: bool = True, lossy: str | None = None) -> Session:
        """The session of that id or name; made if there is none and ``create``. Raises SessionError otherwise.

        ``lossy``: from now on it may reuse KV down to this level, ``kl-0.01`` or the like, or ``exact`` ones only; kept
        with the session and inherited by its forks. None leaves it as it is, which is the memory's own ``lossy`` for a
        session that never said. Raises ConfigError for a level that the model has no card for.
        """
        self._shared.permit(lossy)
        found = self._open(id_or_name, create=create)
        if lossy is not None and found.record.lossy != lossy:
            self._shared.ledger.allow(found.id, lossy)
        return found

    def _open(self, id_or_name: str, *, create: bool) -> Session:
        ledger = self._shared.ledger
        try:
            return Session(self._shared, ledger.session(id_or_name).id)
        except SessionError:
            if not create or _looks_like_id(id_or_name):
                raise
        try:
            return self.create(id_or_name)
        except SessionError as error:
            try:  # another thread may have made it since
                return Session(self._shared, ledger.session(id_or_name).id)
            except SessionError:
                raise error from None

    def sessions(self, limit: int | None = None, offset: int = 0) -> list[Session]:
        """Sessions, last changed first."""
        return [Session(self._shared, record.id) for record in self._shared.ledger.sessions(limit, offset)]

    def search(self, text: str, limit: int = 20) -> list[Hit]:
        """Turns that contain all words of ``text``, newest first, with the session and a snippet of each."""
        return self._shared.ledger.search(text, limit)

    def delete(self, session: Session | str) -> None:
        """Delete a session; forks of it keep their whole history. Waits for an answer under way."""
        ledger = self._shared.ledger
        session_id = session.id if isinstance(session, Session) else ledger.session(session).id
        with self._shared.gate(session_id).hold():
            ledger.delete(session_id)
            if self._shared.runtime is not None:
                self._shared.runtime.requests.forget_session(session_id)

    def export_json(self, session: Session | str) -> dict[str, Any]:
        """A session as a dict that JSON can hold: turns, their meta, times and token ids. See `transfer`."""
        return transfer.export(self._shared.ledger, session.id if isinstance(session, Session) else session)

    def import_json(self, data: Mapping[str, Any], name: str | None = None) -> Session:
        """A new session from `export_json`'s dict, which may come from anywhere: FormatError if it is malformed."""
        return Session(self._shared, transfer.load(self._shared.ledger, data, name).id)

    @property
    def _blocks(self) -> WholeStore | None:
        return None if self._shared.runtime is None else self._shared.runtime.store

    def flush(self) -> None:
        """Wait until all KV that is queued is in the store. Text never waits: it is durable when a verb returns."""
        if self._blocks is not None:
            self._blocks.flush()

    def stats(self) -> MemoryStats:
        """How much there is."""
        store = self._blocks
        return MemoryStats(self._shared.ledger.stats(), None if store is None else store.stats())

    def gc(self) -> int:
        """Remove turns that no session can reach (rolled back or deleted); returns how many.

        The texts of requests, of which some may have been such turns, are forgotten too.
        """
        if self._shared.runtime is not None:
            self._shared.runtime.requests.forget_texts()
        return self._shared.ledger.gc()

    def check(self) -> None:
        """Compare everything that is counted or linked twice; raises AssertionError at a difference."""
        self._shared.ledger.check()
        if self._blocks is not None:
            self._blocks.check()

    def close(self) -> None:
        """End unfinished answers (what they have is stored), commit KV that is queued, close. Idempotent.

        Happens by itself when the interpreter exits.
        """
        self._shared.close()


def _open_blocks(folder: Path, settings: StoreConfig, readonly: bool) -> TieredStore:
    room = settings.host_bytes
    try:
        return open_store(
            folder,
            capacity=settings.capacity,
            host_bytes=room,
            policy=settings.policy,
            level=settings.level,
            demote=settings.demote,
            readonly=readonly,
        )
    except StoreOwnedError:
        raise
    except StoreError as error:
        # KV is a cache: without it all works, only slower.
        _log.warning("KV is kept in memory only: %s", error)
        return open_store(None, host_bytes=room)


def _looks_like_id(text: str) -> bool:
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)
