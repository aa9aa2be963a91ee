"""Agent memory: sessions that survive restarts, fork in O(1), and reuse their KV instead of a prefill."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from ctxreuse.block.levels import read_limit
from ctxreuse.config import EngineConfig, load
from ctxreuse.daemon.address import is_url
from ctxreuse.engines import Engine, open_draft_engine, open_engine
from ctxreuse.errors import SessionError
from ctxreuse.html import table, when
from ctxreuse.private import make_private_folder
from ctxreuse.reuse import RecomputeBudget, parse_budget
from ctxreuse.runtime import Runtime, RuntimeOptions, RuntimeProtocol
from ctxreuse.runtime.compaction import compact, finish_deletions
from ctxreuse.store import Hit, Ledger, LedgerStats, NewTurn, Store, StoreStats, TieredStore, open_store
from ctxreuse.store.recall import EmbedderChoice, Filters
from ctxreuse.why import FILE, RequestLog
from ctxreuse_agents import transfer
from ctxreuse_agents._state import MemoryState
from ctxreuse_agents.inputs import check_text
from ctxreuse_agents.recalled import Recalled, SearchLimits, count_tokens, gather
from ctxreuse_agents.retention import KeepLimits, Summarise, lifetime
from ctxreuse_agents.session import Session

__all__ = ["Memory", "MemoryStats"]

_log = logging.getLogger(__name__)

#: Sessions that a notebook shows.
_SHOWN = 20


class MemoryStats(msgspec.Struct, frozen=True):
    """Statistics of text and of the KV store (None without one)."""

    text: LedgerStats
    blocks: StoreStats | None


class _Deprecated(TypedDict, total=False):
    """Keywords of version 0.1.0."""

    repair: str
    lossy: str | None


class Memory:
    """All sessions in one folder. Thread-safe; one process at a time may have it open for writing."""

    def __init__(
        self,
        ledger: Ledger,
        runtime: RuntimeProtocol | None = None,
        *,
        readonly: bool = False,
        max_kl: float | None = None,
        embedder: EmbedderChoice = "auto",
        language: str = "en",
        keep: Mapping[str, KeepLimits] | None = None,
        summarise: Summarise | None = None,
    ) -> None:
        """Use a ledger and a runtime that the caller opens and closes; see `open`."""
        if runtime is not None:
            runtime.check_max_kl(max_kl)
        how: dict[str, Any] = {"readonly": readonly, "max_kl": max_kl, "embedder": embedder, "language": language}
        self._state = MemoryState(ledger, runtime, **how)
        self._state.keep(keep or {}, lambda session: self.delete(session), summarise)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        engine: str | os.PathLike[str] | Engine | RuntimeProtocol | None = None,
        *,
        tenant: str = "default",
        capacity: int | None = None,
        readonly: bool = False,
        max_kl: float | str | None = None,
        recompute: RecomputeBudget | None = None,
        speculate: Literal["auto", "off"] = "off",
        draft_model: str = "",
        exits: float | Literal["off"] = "off",
        embedder: EmbedderChoice = "auto",
        language: str = "en",
        keep: Mapping[str, KeepLimits] | None = None,
        summarise: Summarise | None = None,
        **deprecated: Unpack[_Deprecated],
    ) -> Memory:
        """Open the memory in a folder, which is created if necessary.

        Args:
            path: the folder; default: ``store.path`` of the settings.
            engine: a model name or Hugging Face folder, the address of an edge daemon that computes and caches KV
                (``http://127.0.0.1:7351``), an engine, or a runtime (closed by the caller); None: text
                only, nothing is tokenised or computed.
            tenant: salts the keys of KV; equal text of different tenants shares nothing.
            capacity: bytes of KV on disk; default, as for the rest of the store: the settings.
            readonly: open it for reading beside another process.
            max_kl: largest KL, in nats a token, of the KV that sessions without a limit of their own may reuse; None:
                exact KV only.
            recompute: limit of recomputation for relocated documents, such as ``Share(0.1)``, see `RuntimeOptions`; not
                for a runtime or a daemon, which have their own.
            speculate: ``auto``: draft answers from what was said before, where that is faster; as for ``recompute``.
            draft_model: a smaller model of the same tokenizer that drafts answers too, see `LLM`.
            exits: share of an answer's tokens that may be other than the model's own, such as 0.01, so that some leave
                the model early; ``off``: none; as for ``recompute``. An answer's ``sampling`` may name another.
            embedder: makes the vectors by which `search` finds what is said in other words: ``auto``: that of the extra
                ``embed`` where it is installed; ``multilingual``: that of the extra of this name, which finds what is
                said in other languages, too; ``none``: words alone; or an `Embedder`.
            language: of the texts, as ISO 639-1 has it, such as ``de``: `search` finds a word in its other forms. All
                but ``en`` need the extra ``languages``; if it is another than before, the index is made again.
            keep: by namespace (``""``: all), how much of it is kept and how long; see `tidy`.
            summarise: called with the turns of a session before `tidy` deletes it by age or size; the text that it
                returns is kept in a pinned session ``summary`` of the namespace. Nothing calls a model by itself.
            deprecated: ``repair`` and ``lossy``, the old forms of ``recompute`` and ``max_kl``: ``10%``, ``kl-0.01``.

        Raises StoreOwnedError if another process has it open for writing, StoreError, errors of opening the engine
        (ConfigError, EngineError, LinkDownError), and ConfigError if no profile of the model can keep ``max_kl``.
        """
        if unknown := deprecated.keys() - _Deprecated.__annotations__.keys():
            raise TypeError(f"Memory.open() got an unexpected keyword argument {min(unknown)!r}")
        max_kl = read_limit(_limit(max_kl, deprecated.get("lossy")))
        if repair := deprecated.get("repair"):
            warnings.warn("repair= is now recompute=, such as Share(0.1)", DeprecationWarning, stacklevel=2)
            recompute = parse_budget(repair)
        settings = load().settings.store
        folder = Path(path) if path is not None else settings.folder()
        if path is None and not readonly:
            make_private_folder(folder.parent)
        settings = msgspec.structs.replace(
            settings, path=str(folder), capacity=settings.capacity if capacity is None else capacity
        )
        runs = _opened(engine) if isinstance(engine, str | os.PathLike) else engine
        with ExitStack() as opened:
            ledger = Ledger.open(folder, readonly=readonly)
            opened.callback(ledger.close)
            if runs is None or isinstance(runs, RuntimeProtocol):
                runtime = runs
            else:
                store = open_store(settings, readonly=readonly, memory_fallback=True)
                opened.callback(store.close)
                durable = not readonly and store.disk is not None
                requests = RequestLog(folder / FILE if durable else None).open()
                opened.callback(requests.close)
                draft = open_draft_engine(draft_model, EngineConfig(speculate=speculate))
                options = RuntimeOptions(
                    tenant=tenant,
                    requests=requests,
                    recompute=recompute,
                    speculate=speculate,
                    draft=draft,
                    exits=0.0 if exits == "off" else exits,
                    drafts=folder if durable else None,
                )
                runtime = Runtime(runs, store, options)
                opened.callback(runtime.close)
            if isinstance(runtime, Runtime) and not readonly:
                finish_deletions(ledger, runtime.eraser.carry_out)
            more: dict[str, Any] = {"embedder": embedder, "language": language, "keep": keep, "summarise": summarise}
            memory = cls(ledger, runtime, readonly=readonly, max_kl=max_kl, **more)
            memory._state.owned = opened.pop_all()
        return memory

    def __repr__(self) -> str:
        name = "text only" if self._state.runtime is None else self._state.runtime.space.architecture
        return f"Memory({str(self.ledger.path)!r}, {name})"

    def _repr_html_(self) -> str:
        records = self.ledger.sessions(_SHOWN)
        count = self.ledger.stats().sessions
        rows = [(one.name, one.namespace, when(one.updated), when(one.expires), one.pinned) for one in records]
        more = f", the last changed {len(rows)} of {count:,} sessions" if len(rows) < count else ""
        return table(("session", "namespace", "changed", "expires", "pinned"), rows, f"{self!r}{more}")

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def engine(self) -> Engine | None:
        """The engine in this process; None if this memory holds text only, or a daemon computes."""
        runtime = self._state.runtime
        return runtime.engine if isinstance(runtime, Runtime) else None

    @property
    def runtime(self) -> RuntimeProtocol | None:
        """The runtime, which computes and caches KV; None if this memory holds text only."""
        return self._state.runtime

    @property
    def ledger(self) -> Ledger:
        """The store of sessions, turns and token ids."""
        return self._state.ledger

    def create(
        self,
        name: str | None = None,
        *,
        namespace: str = "",
        max_kl: float | str | None = None,
        ttl: float | timedelta | None = None,
        pin: bool = False,
        turns: Sequence[NewTurn] = (),
        id: str | None = None,
        lossy: str | None = None,
    ) -> Session:
        """Create a session, with its first ``turns`` if any, in one step. Raises SessionError if the name is taken.

        ``namespace``: whose it is, such as ``user/agent/run``: `search`, `recall` and `sessions` can be limited to one
        and those below it. Its forks have the same, and it never changes. ``max_kl``: see `session`. ``ttl``: see
        `Session.set_ttl`; ``pin``: see `Session.pin`. ``id``: 32 hex digits that no session has, for a caller who may
        have to ask again.
        """
        for turn in turns:
            check_text(turn.role, turn.content)
        limit = self._permitted(max_kl, lossy)
        expires = None if ttl is None else self._state.keeper.clock.now() + lifetime(ttl)
        created = self._state.ledger.create(
            name, max_kl=limit, turns=turns, id=id, namespace=namespace, expires=expires, pinned=pin
        )
        return Session(self._state, created.id)

    def session(
        self,
        id_or_name: str,
        *,
        create: bool = True,
        namespace: str | None = None,
        max_kl: float | str | None = None,
        lossy: str | None = None,
    ) -> Session:
        """Return the session with that id or name; ``create``: create it if there is none, else raise SessionError.

        ``namespace``: of a session that is created; one that exists must have it, or SessionError is raised.

        ``max_kl``: limit of the KV that the session may reuse, in nats a token; 0: exact KV only. It is stored with
        the session and inherited by its forks. None leaves it unchanged (initially the memory's ``max_kl``). ``lossy``:
        its old form. Raises ConfigError if no profile of the model can keep it.
        """
        limit = self._permitted(max_kl, lossy)
        found = self._open(id_or_name, create=create, namespace=namespace or "")
        if namespace is not None and found.record.namespace != namespace:
            fix = "Use another name, or the namespace that it was created in"
            raise SessionError(f"session {id_or_name!r} is not in namespace {namespace!r}", fix=fix)
        if limit is not None and found.record.max_kl != limit:
            self._state.ledger.set_max_kl(found.id, limit)
        return found

    def _permitted(self, max_kl: float | str | None, lossy: str | None) -> float | None:
        """Return the requested limit, 0 for exact KV only; None if none is requested."""
        given = _limit(max_kl, lossy)
        limit = read_limit(given)
        self._state.check_max_kl(limit)
        return limit if given is None else limit or 0.0

    def _open(self, id_or_name: str, *, create: bool, namespace: str) -> Session:
        ledger = self._state.ledger
        try:
            return Session(self._state, ledger.session(id_or_name).id)
        except SessionError:
            if not create or _looks_like_id(id_or_name):
                raise
        try:
            return self.create(id_or_name, namespace=namespace)
        except SessionError as error:
            try:  # another thread may have created it since
                return Session(self._state, ledger.session(id_or_name).id)
            except SessionError:
                raise error from None

    def sessions(
        self, limit: int | None = None, offset: int = 0, *, prefix: str = "", namespace: str = ""
    ) -> list[Session]:
        """Return sessions, last changed first, or those whose names start with ``prefix`` in the order of names.

        ``namespace``: only those in it and below it.
        """
        found = self._state.ledger.sessions(limit, offset, prefix=prefix, namespace=namespace)
        return [Session(self._state, record.id) for record in found]

    def search(
        self, query: str, limit: int = 20, *, explain: bool = False, **filters: Unpack[SearchLimits]
    ) -> list[Hit]:
        """Return turns that say what is searched for, best first, each with a session that it is in and a snippet.

        Turns with any of the words are found, in any of their forms (``dogs`` finds ``dog``), those with more and with
        rarer words first (BM25); words in double quotes only as they stand. With an embedder, turns of like meaning are
        found as well, and count in the order (see `open`). Turns that no session reaches any more, and those of
        sessions whose time is over, are not found.

        Args:
            query: words; none: all turns that ``filters`` allow, the newest first.
            limit: hits at most; 1,000 are the most.
            explain: say in `Hit.explain` why each was found.
            filters: ``session`` (id or name), ``namespace`` (it and those below it), ``role``, ``since`` (seconds since
                1970, or a datetime), ``where`` (values of the turn's meta), ``beside`` (a session whose own turns are
                left out).

        Raises SessionError for a session that is not there and for limits that cannot be.
        """
        if not self._state.readonly:
            self._state.keeper.expire()
        return self._state.recall.search(query, Filters(**filters), limit, explain=explain)

    def recall(self, query: str, tokens: int = 1024, *, limit: int = 20, **filters: Unpack[SearchLimits]) -> Recalled:
        """Return what sessions say on ``query``, best first, as documents for `Session.ask`.

        ::

            found = memory.recall(question, tokens=800, beside=session.id)
            session.ask(question, documents=found.documents)

        A turn is always the same document, so its KV is reused wherever it stands, in any order, where the session's
        ``max_kl`` allows that (see `Session.ask`).

        Args:
            query: words; see `search`.
            tokens: of the documents together, at most; counted by the engine's tokenizer, or, without an engine, as a
                quarter of their bytes. A turn that does not fit is left out, but the first is cut.
            limit: documents at most.
            filters: see `search`.
        """
        runtime = self._state.runtime
        count = count_tokens(None if runtime is None else runtime.text)
        return gather(self.search(query, limit, explain=True, **filters), tokens, count)

    def delete(self, session: Session | str) -> None:
        """Delete a session: its text, and what was computed of it, in a daemon and its clouds too.

        Its forks keep their whole history. Waits for an unfinished answer. Files still hold it until `compact`.
        """
        found = session if isinstance(session, Session) else self.session(session, create=False)
        with found._core.lock.hold():
            found._core.delete()

    def tidy(self) -> int:
        """Delete the sessions whose time is over (`Session.set_ttl`), and what is more or older than `open`'s ``keep``.

        In idle time; `search` does the first part, too. Returns the number of sessions. Ages go on evenly while the
        memory is open: a clock that is set, right or wrong, deletes nothing.
        """
        return self._state.keeper.expire() + self._state.keeper.keep_limits()

    def index(self) -> None:
        """Take up what was written since the last search, words and vectors, in idle time: the next search need not."""
        self._state.recall.update()

    def compact(self) -> int:
        """Rewrite the files of this memory, so that nothing that was deleted is in them; some seconds a gigabyte.

        Returns the number of turns that no session reached. Raises StoreError if the disk has no room for it.
        """
        store = self._blocks
        if isinstance(store, TieredStore):
            return compact(self._state.ledger, store)
        return self._state.ledger.compact()

    def export_json(self, session: Session | str) -> dict[str, Any]:
        """Return a session as a JSON-compatible dict: turns, their meta, times and token ids. See `transfer`."""
        return transfer.export(self._state.ledger, session.id if isinstance(session, Session) else session)

    def import_json(self, data: Mapping[str, Any], name: str | None = None) -> Session:
        """Create a session from `export_json`'s dict, which may be untrusted. Raises FormatError if it is malformed."""
        return Session(self._state, transfer.load(self._state.ledger, data, name).id)

    @property
    def _blocks(self) -> Store | None:
        return None if self._state.runtime is None else self._state.runtime.store

    def flush(self) -> None:
        """Wait until all queued KV is in the store. Text is always durable when a method returns."""
        if self._blocks is not None:
            self._blocks.flush()

    def stats(self) -> MemoryStats:
        """Return statistics of text and KV."""
        store = self._blocks
        return MemoryStats(self._state.ledger.stats(), None if store is None else store.stats())

    def gc(self) -> int:
        """Remove turns that no session reaches (rolled back or deleted); returns the number.

        Texts in the request log are removed, too, as they may belong to such turns.
        """
        if self._state.runtime is not None:
            self._state.runtime.forget_requests()
        return self._state.ledger.gc()

    def check(self) -> None:
        """Check all redundant counts and links. Raises AssertionError."""
        self._state.ledger.check()
        if self._blocks is not None:
            self._blocks.check()

    def close(self) -> None:
        """End unfinished answers (what they have is stored), commit queued KV, close. Idempotent.

        Done automatically at interpreter exit.
        """
        self._state.close()


def _opened(engine: str | os.PathLike[str]) -> Engine | RuntimeProtocol:
    """Open an engine by name, folder, or address of a daemon."""
    if isinstance(engine, str) and is_url(engine):
        from ctxreuse_agents.remote_runtime import attach

        return attach(engine)
    return open_engine(os.fspath(engine))


def _limit(max_kl: float | str | None, lossy: str | None) -> float | str | None:
    if lossy is not None:
        warnings.warn("lossy= is now max_kl=, a number", DeprecationWarning, stacklevel=4)
    return max_kl if lossy is None else lossy


def _looks_like_id(text: str) -> bool:
    return len(text) == 32 and all(c in "0123456789abcdef" for c in text)
