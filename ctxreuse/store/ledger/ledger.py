"""Sessions, turns and token ids on disk, durable when a call returns; all KV can be rebuilt from them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import lmdb
from msgspec import UNSET, UnsetType

from ctxreuse.block.levels import EXACT, limit_name
from ctxreuse.errors import CtxReuseError, SessionError, StoreDamagedError, StoreError, StoreReadOnlyError
from ctxreuse.store.ledger.collect import collect
from ctxreuse.store.ledger.deletions import Deletions
from ctxreuse.store.ledger.derived import drop_index
from ctxreuse.store.ledger.history import History, turn_key
from ctxreuse.store.ledger.migrate import migrate_records
from ctxreuse.store.ledger.opening import checked_from, open_env
from ctxreuse.store.ledger.reading import check_records, read_records
from ctxreuse.store.ledger.recent import RecentSessions
from ctxreuse.store.ledger.records import (
    FIX,
    DamagedTurnError,
    LedgerStats,
    LedgerVerdict,
    NewTurn,
    Session,
    Turn,
    check_namespace,
    decode_id,
    decode_session,
    encode_id,
    encode_turn,
)
from ctxreuse.store.ledger.sessions import SessionTable
from ctxreuse.store.ledger.snapshot import LedgerSnapshot
from ctxreuse.store.ledger.tokens import TokenTable
from ctxreuse.store.lmdb.env import Env, explain
from ctxreuse.store.lmdb.owner import Owner, attended, boot_id, claim, folder, last_use
from ctxreuse.store.lmdb.recovery import stamp
from ctxreuse.store.lmdb.rewrite import rewrite
from ctxreuse.store.types import Progress

__all__ = ["Ledger", "new_session_id"]

T = TypeVar("T")

_MAP_SIZE = 1 << 36
_NOT_IN = "List the session's turns for the ids it has"


def new_session_id() -> str:
    """Return an id that no session has."""
    return uuid.uuid4().hex


class Ledger:
    """The durable part of a store. Any thread may call; every change is on disk when its call returns.

    Use `open`. A session is named by its id or its name. All methods raise SessionError for an unknown session or turn
    and StoreClosedError; those that write also StoreReadOnlyError and StoreFullError (nothing acknowledged is lost, and
    the call may be repeated when there is room).
    """

    def __init__(self, env: Env, owner: Owner | None, clock: Callable[[], float]) -> None:
        self._env, self._owner, self._clock = env, owner, clock
        self._checked_from = checked_from(env)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        map_size: int = _MAP_SIZE,
        boot: str | None = None,
    ) -> Ledger:
        """Open the ledger in a store's folder (its files lie in ``ledger``), creating it if need be.

        Args:
            path: the store's folder.
            readonly: open beside the process that writes.
            clock: seconds since 1970.
            map_size: bytes of address space.
            boot: the machine's boot id, if not the real one.

        Raises:
            StoreOwnedError: another process writes here.
            StoreDamagedError: the ledger is damaged; it is never dropped or changed.
            StoreError: the path cannot hold a store.
        """
        place = folder(path, readonly=readonly)
        home = place / "ledger"
        if readonly:
            use = last_use(place, "ledger")
            trusted = attended(place) or use.left_as(stamp(home), boot_id() if boot is None else boot)
            return cls(open_env(home, map_size, readonly=True, trusted=trusted, stamp=use.stamp), None, clock)
        owner = claim(place, "ledger", boot=boot, clock=clock)
        try:
            trusted, before = owner.left_as("ledger", stamp(home)), owner.before("ledger").stamp
            ledger = cls(open_env(home, map_size, readonly=False, trusted=trusted, stamp=before), owner, clock)
        except BaseException:
            owner.end("ledger", clean=False)
            raise
        ledger._update_recent()
        return ledger

    def _recent_is_current(self) -> bool:
        with self._read() as (txn, _):
            return self._sessions(txn).recent.current

    def _update_recent(self) -> None:
        """Fill the order of sessions where a program wrote last that does not know it; lists work without it too."""
        if not self._recent_is_current():
            with suppress(StoreError):  # no room on the disk
                self._write(lambda txn, history: None)

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._env.path.parent

    @contextmanager
    def _read(self) -> Iterator[tuple[Any, History]]:
        try:
            with self._env.read() as txn:
                history = History(txn, self._env.tables["turns"])
                try:
                    yield txn, history
                except DamagedTurnError as error:
                    raise self._damaged_turn(txn, history, error) from None
        except lmdb.Error as error:
            raise explain(error, self._env.path) from None

    def _write(self, work: Callable[[Any, History], T]) -> T:
        if self._owner is None:
            fix = "Open it without readonly=True, or ask the process that owns it"
            raise StoreReadOnlyError("the ledger was opened for reading", where=str(self._env.path), fix=fix)

        def run(txn: Any) -> T:
            history = History(txn, self._env.tables["turns"])
            try:
                RecentSessions(txn, self._env.tables, writing=True).begin()
                return work(txn, history)
            except DamagedTurnError as error:
                raise self._damaged_turn(txn, history, error) from None

        try:
            return self._env.write(run)
        except lmdb.Error as error:
            raise explain(error, self._env.path) from None

    def _damaged_turn(self, txn: Any, history: History, error: DamagedTurnError) -> StoreDamagedError:
        names: list[str] = []
        for id, raw in txn.cursor(db=self._env.tables["sessions"]):
            with suppress(StoreDamagedError):
                session = decode_session(bytes(id), raw)
                if history.reaches(session.head, {error.id}):
                    names.append(repr(session.name))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        where = f"session {', '.join(sorted(names)[:3])}{more} in {self._env.path}" if names else str(self._env.path)
        return StoreDamagedError(str(error), where=where, fix=FIX)

    @contextmanager
    def snapshot(self) -> Iterator[LedgerSnapshot]:
        """Read one state of the ledger, whatever is written meanwhile."""
        with self._read() as (txn, history):
            yield LedgerSnapshot(txn, history, self._sessions(txn))

    def _sessions(self, txn: Any) -> SessionTable:
        return SessionTable(txn, self._env.tables)

    def check_name(self, name: str) -> None:
        """Raise SessionError if a session cannot have this name, or one has it already."""
        with self._read() as (txn, _):
            self._sessions(txn).free_name(name)

    def _create(
        self,
        txn: Any,
        name: str | None,
        head: int,
        origin: str | None,
        lossy: str | None = None,
        id: str | None = None,
        namespace: str = "",
        expires: float | None = None,
        pinned: bool = False,
    ) -> Session:
        id = new_session_id() if id is None else id
        name = f"session-{id[:8]}" if name is None else name
        now = self._clock()
        start = head if origin else 0
        session = Session(id, name, head, origin, start, now, now, lossy, namespace, expires, pinned)
        return self._sessions(txn).add(session)

    def create(
        self,
        name: str | None = None,
        head: int = 0,
        max_kl: float | None = None,
        *,
        turns: Sequence[NewTurn] = (),
        tokens: Sequence[Mapping[bytes, bytes]] = (),
        id: str | None = None,
        origin: str | None = None,
        namespace: str = "",
        expires: float | None = None,
        pinned: bool = False,
    ) -> Session:
        """Create a session, with its first turns if any, in one transaction: all of it or nothing.

        Args:
            name: its name; default: ``session-`` and part of its id.
            head: the turn that it starts at.
            max_kl: see `set_max_kl`.
            turns: turns to append.
            tokens: for each of them token ids in further model spaces, by digest.
            id: 32 hex digits that no session has, for a caller who needs them before.
            origin: the session that it is forked from, at ``head``.
            namespace: whose it is, such as ``user/agent/run``; see `check_namespace`.
            expires: see `keep`.
            pinned: see `keep`.

        Raises:
            SessionError: the name is taken or cannot be one, ``head`` is not in the origin, or a turn cannot be stored.
        """

        check_namespace(namespace)

        def work(txn: Any, history: History) -> Session:
            history.links(head)
            found = self._sessions(txn).find(origin) if origin is not None else None
            if found is not None and not history.ancestor(head, found.head):
                raise SessionError(f"turn {head} is not in session {found.name!r}", fix=_NOT_IN)
            parent = found.id if found is not None else None
            session = self._create(txn, name, head, parent, _stored(max_kl), id, namespace, expires, pinned)
            added = self._append(txn, history, head, turns)
            for turn, more in zip(added, tokens):
                for space, ids in more.items():
                    TokenTable(txn, self._env.tables).put(turn.id, space, ids)
            return self._sessions(txn).change(session, head=added[-1].id) if added else session

        return self._write(work)

    def append(
        self, session: str, turns: Sequence[NewTurn], *, after: int | None = None, expected_head: int | None = None
    ) -> list[Turn]:
        """Append turns to a session, all or none; returns them with their ids.

        ``after``: the turn of its history that they follow (0: none), in place of those behind it; default: the head.
        Raises SessionError if the head is not ``expected_head`` (another caller appended meanwhile), or ``after`` is
        not in the history.
        """

        def work(txn: Any, history: History) -> list[Turn]:
            found = self._expect(txn, session, expected_head)
            start = found.head if after is None else after
            if not history.ancestor(start, found.head):
                raise SessionError(f"turn {start} is not in session {found.name!r}", fix=_NOT_IN)
            added = self._append(txn, history, start, turns)
            head = added[-1].id if added else start
            self._sessions(txn).change(found, head=head, updated=self._clock())
            return added

        return self._write(work)

    def _append(self, txn: Any, history: History, head: int, turns: Sequence[NewTurn]) -> list[Turn]:
        added: list[Turn] = []
        now, id = self._clock(), self._next_id(txn)
        for new in turns:
            raw = encode_turn(id, history.child_of(head), new, now if new.created is None else new.created)
            if not txn.put(turn_key(id), raw, db=self._env.tables["turns"], append=True):
                raise StoreDamagedError(f"there is a turn {id} before it is made", where=str(self._env.path), fix=FIX)
            if new.tokens is not None:
                TokenTable(txn, self._env.tables).put(id, new.space or b"", new.tokens)
            added.append(history.turn(id))
            head, id = id, id + 1
        if added:
            txn.put(b"next", encode_id(b"next", id), db=self._env.tables["info"])
        return added

    def commit(self, fork: str, *, onto: bool) -> Session:
        """Bring a fork's own turns to the session that it was forked from, in one transaction; returns that session.

        Where that one has moved on since, ``onto`` appends copies of the fork's turns after its head, and the fork
        moves there too. Raises SessionError if it has moved and ``onto`` is False, and for a session that is no fork.
        """

        def work(txn: Any, history: History) -> Session:
            found = self._sessions(txn).find(fork)
            if found.origin is None:
                raise SessionError("a session that is not a fork has no origin to commit to", where=found.name)
            origin = self._sessions(txn).find(found.origin)
            # What was collected is in no history any more.
            start = history.common(found.forked_at, found.head) if history.has(found.forked_at) else 0
            now = self._clock()
            if history.ancestor(start, origin.head) and history.ancestor(origin.head, found.head):
                return self._sessions(txn).change(origin, head=found.head, updated=now)
            if not onto:
                raise SessionError(
                    f"{origin.name!r} has new turns since {found.name!r} was forked from it",
                    where=f"head {origin.head}, forked at {found.forked_at}",
                    fix="commit(onto=True) appends the fork's own turns after the origin's head",
                )
            shared = max(history.links(start).depth, history.links(history.common(origin.head, found.head)).depth)
            own = [history.turn(id) for id in history.up(found.head)][::-1][shared:]
            added = self._append(txn, history, origin.head, [NewTurn(one.role, one.content, one.meta) for one in own])
            head = added[-1].id if added else origin.head
            self._sessions(txn).change(found, head=head, updated=now)
            return self._sessions(txn).change(origin, head=head, updated=now)

        return self._write(work)

    def _next_id(self, txn: Any) -> int:
        # Ids are never used twice, not even when gc() removed the last ones.
        raw = txn.get(b"next", db=self._env.tables["info"])
        return decode_id(b"next", raw) if raw is not None else 1

    def _expect(self, txn: Any, session: str, head: int | None) -> Session:
        found = self._sessions(txn).find(session)
        if head is not None and found.head != head:
            fix = "Read the session again and repeat, or fork it"
            raise SessionError(f"session {found.name!r} is at turn {found.head}, not {head}", fix=fix)
        return found

    def fork(self, session: str, name: str | None = None, at: int | None = None) -> Session:
        """Create a session that shares all turns up to ``at`` (default: the head), and the first one's ``max_kl``.

        O(log length), one small record. Raises SessionError if ``at`` is not in the session's history.
        """

        def work(txn: Any, history: History) -> Session:
            found = self._sessions(txn).find(session)
            head = found.head if at is None else at
            if not history.ancestor(head, found.head):
                raise SessionError(f"turn {head} is not in session {found.name!r}", fix=_NOT_IN)
            return self._create(txn, name, head, found.id, found.lossy, None, found.namespace, found.expires)

        return self._write(work)

    def set_head(self, session: str, head: int, *, expected_head: int | None = None) -> Session:
        """Set a session's head to any turn, or to 0: rollback, or taking over the turns of a fork."""

        def work(txn: Any, history: History) -> Session:
            found = self._expect(txn, session, expected_head)
            history.links(head)
            return self._sessions(txn).change(found, head=head, updated=self._clock())

        return self._write(work)

    def set_max_kl(self, session: str, max_kl: float | None) -> Session:
        """Set the largest KL of KV that a session allows; 0: exact only, None: the default of the memory."""

        def work(txn: Any, _: History) -> Session:
            found = self._sessions(txn).find(session)
            return self._sessions(txn).change(found, lossy=_stored(max_kl))

        return self._write(work)

    def keep(
        self, session: str, *, expires: float | UnsetType | None = UNSET, pinned: bool | UnsetType = UNSET
    ) -> Session:
        """Set when a session is to be deleted, in seconds since 1970 (None: never), or whether it is pinned, or both.

        The ledger deletes nothing by itself: its callers do, by these.
        """
        given = {name: value for name, value in (("expires", expires), ("pinned", pinned)) if value is not UNSET}

        def work(txn: Any, _: History) -> Session:
            found = self._sessions(txn).find(session)
            return self._sessions(txn).change(found, **given, updated=self._clock())

        return self._write(work)

    def rename(self, session: str, name: str) -> Session:
        """Rename a session. Raises SessionError if the name is taken."""

        def work(txn: Any, _: History) -> Session:
            found = self._sessions(txn).find(session)
            if name == found.name:
                return found
            return self._sessions(txn).change(found, name=name, updated=self._clock())

        return self._write(work)

    def delete(self, session: str, *, note: bytes = b"") -> None:
        """Delete a session. Its turns stay until `gc`, and as long as another session reaches them.

        ``note``: what is still to be done for that, kept with the deletion; see `deletions`.
        """

        def work(txn: Any, _: History) -> None:
            sessions = self._sessions(txn)
            sessions.remove(sessions.find(session))
            self._deletions(txn).add(note)

        self._write(work)

    def _deletions(self, txn: Any) -> Deletions:
        return Deletions(txn, self._env.tables["info"], self._clock)

    def note_deletion(self, note: bytes = b"") -> None:
        """Note that something outside of the ledger is to be deleted; see `deletions`."""
        self._write(lambda txn, _: self._deletions(txn).add(note))

    def deletions(self) -> dict[int, bytes]:
        """Return the notes of deletions whose other parts are not known to be done, by number, oldest first."""
        with self._read() as (txn, _):
            return self._deletions(txn).notes()

    def deletion_done(self, number: int) -> None:
        """Drop the note of a deletion, all of which is done."""
        self._write(lambda txn, _: self._deletions(txn).remove(number))

    def deleted_since(self) -> float | None:
        """Return when the first deletion was since `compact`, in seconds since 1970; None if there was none."""
        with self._read() as (txn, _):
            return self._deletions(txn).since()

    def compact(self, progress: Progress | None = None) -> int:
        """`gc`, then rewrite the file: what was deleted is in no page of it. Returns the number of turns deleted.

        Reads go on meanwhile, writes wait: about 3 s a gigabyte. Raises what `rewrite` raises.
        """
        with self._read() as (txn, _):
            marks = self._deletions(txn).marks()
        removed = self.gc(mark=False)
        drop_index(self.path)
        # A deletion since then changes the mark, which stays for the next time.
        rewrite(self._env, without={("info", key): value for key, value in marks.items()}, progress=progress)
        return removed

    def session(self, session: str) -> Session:
        """Return the session of an id or name; SessionError suggests similar names."""
        with self._read() as (txn, _):
            return self._sessions(txn).find(session)

    def sessions(
        self, limit: int | None = None, offset: int = 0, *, prefix: str = "", beside: str = "", namespace: str = ""
    ) -> list[Session]:
        """Return sessions, the last changed first, or those whose names start with ``prefix`` in the order of names.

        Without a prefix, those whose names start with ``beside`` are left out. ``namespace``: only those in it and
        below it, for which all are read. A page of 20 takes about .1 ms, of however many; what is left out, about 1 ms
        a thousand.
        """
        start, most = max(offset, 0), None if limit is None else max(limit, 0)
        with self._read() as (txn, _):
            sessions = self._sessions(txn)
            if check_namespace(namespace):
                every = (
                    sessions.by_name(prefix, 0) if prefix else sessions.recent.newest_first(0, sessions.named(beside))
                )
                below = (one for one in every if f"{one.namespace}/".startswith(f"{namespace}/"))
                return list(islice(below, start, None if most is None else start + most))
            if prefix:
                return list(islice(sessions.by_name(prefix, start), most))
            return list(islice(sessions.recent.newest_first(start, sessions.named(beside)), most))

    def count(self, *, beside: str = "") -> int:
        """Return the number of sessions, but those whose names start with ``beside``."""
        with self._read() as (txn, _):
            return int(txn.stat(self._env.tables["sessions"])["entries"]) - len(self._sessions(txn).named(beside))

    def turn(self, id: int) -> Turn:
        """Return one turn."""
        with self._read() as (_, history):
            return history.turn(id)

    def turns(self, head: int) -> list[Turn]:
        """Return the history that ends at ``head``, root first; empty for 0."""
        with self._read() as (_, history):
            return [history.turn(id) for id in history.up(head)][::-1]

    def before(self, id: int, count: int) -> int:
        """Return the turn so many turns before turn ``id``, 0 if it has fewer. O(log count)."""
        with self._read() as (_, history):
            return history.at_depth(id, max(history.links(id).depth - count, 0))

    def ancestor(self, a: int, b: int) -> bool:
        """Return True if turn ``a`` is ``b`` or in its history (0 is in all)."""
        with self._read() as (_, history):
            return history.ancestor(a, b)

    def common(self, a: int, b: int) -> int:
        """Return the last turn that two histories share, 0 if none."""
        with self._read() as (_, history):
            return history.common(a, b)

    def put_tokens(self, space: bytes, tokens: Mapping[int, bytes]) -> None:
        """Store token ids (int32 little-endian) of turns' texts, by turn, in the space with this 32-byte digest.

        One transaction, so one wait for the disk.
        """

        def work(txn: Any, history: History) -> None:
            for id, ids in tokens.items():
                history.raw(id)
                TokenTable(txn, self._env.tables).put(id, space, ids)

        self._write(work)

    def tokens(self, id: int, space: bytes) -> bytes | None:
        """Return the token ids of a turn in a space, or None."""
        with self._read() as (txn, _):
            return TokenTable(txn, self._env.tables).get(id, space, checked=id >= self._checked_from)

    def spaces(self, id: int) -> list[bytes]:
        """Return the digests of the spaces that have token ids of a turn."""
        with self._read() as (txn, _):
            return TokenTable(txn, self._env.tables).spaces(id)

    def gc(self, *, mark: bool = True) -> int:
        """Delete turns, and their tokens, that no session reaches; returns the number of turns.

        ``mark``: count it as a deletion, after which `compact` has work.
        """

        def work(txn: Any, history: History) -> int:
            lost = collect(txn, history, self._env.tables)
            if lost and mark:
                self._deletions(txn).add()
            return lost

        return self._write(work)

    def migrate(self) -> int:
        """Rewrite the records of earlier versions, all or none; returns the number of turns that were."""
        count = self._write(lambda txn, history: migrate_records(txn, history, self._env.tables, self._checked_from))
        self._checked_from = checked_from(self._env)
        return count

    def stats(self) -> LedgerStats:
        """Return counts and size."""
        with self._read() as (txn, _):
            entries = {name: int(txn.stat(table)["entries"]) for name, table in self._env.tables.items()}
        return LedgerStats(entries["sessions"], entries["turns"], entries["tokens"], self._env.file_bytes())

    def verify(self, progress: Progress | None = None) -> LedgerVerdict:
        """Read all records and compare them with their checksums, then names, links and counts. O(all bytes)."""
        with self._read() as (txn, history):
            problems, unchecked = read_records(txn, history, self._env.tables, self._checked_from, progress)
        if not problems:
            try:
                self.check()
            except (AssertionError, CtxReuseError) as error:
                problems.append(str(error))
        return LedgerVerdict(self.stats(), tuple(problems), unchecked)

    def check(self) -> None:
        """Raise AssertionError where links, names or counts disagree. O(all entries)."""
        with self._read() as (txn, history):
            check_records(txn, history, self._env.tables, self._next_id(txn))

    def close(self) -> None:
        """Close the ledger. A second call does nothing."""
        self._env.close()
        if self._owner is not None:
            self._owner.end("ledger", clean=True, stamp=stamp(self._env.path))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stored(max_kl: float | None) -> str | None:
    return None if max_kl is None else limit_name(max_kl) or EXACT
