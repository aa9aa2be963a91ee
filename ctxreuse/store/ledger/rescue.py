"""What can be read of a damaged ledger, in a new one; in the place of what is lost stands a turn that says so."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.errors import StoreDamagedError, StoreError, StoreOwnedError
from ctxreuse.store.items import Items, ItemTable
from ctxreuse.store.ledger.adopt import adopt
from ctxreuse.store.ledger.items import TABLE as ITEMS
from ctxreuse.store.ledger.ledger import Ledger, new_session_id
from ctxreuse.store.ledger.records import (
    DamagedTurnError,
    Links,
    NewTurn,
    Session,
    Turn,
    decode_id,
    decode_session,
    decode_tokens,
    decode_turn,
    is_checked,
    role_of,
    unseal,
)
from ctxreuse.store.lmdb.owner import attended, folder
from ctxreuse.store.lmdb.salvage import Salvaged, salvage
from ctxreuse.store.types import Progress

__all__ = ["Rescued", "rescue"]

_SESSION, _TURN, _TOKENS = 16, 8, 40


class Rescued(msgspec.Struct, frozen=True):
    """The result of `rescue`: what the new ledger has, how many turns are lost, and in words what was lost where."""

    sessions: int
    turns: int
    lost_turns: int
    lost: tuple[str, ...] = ()


def rescue(path: str | os.PathLike[str], dest: str | os.PathLike[str], progress: Progress | None = None) -> Rescued:
    """Read the ledger of the store in folder ``path``, which is not changed, into a new store in folder ``dest``.

    Turns keep their ids. A turn that cannot be read is replaced by one that says so, with ``{"lost": n}`` in its
    ``meta``: n turns stood there. Raises StoreError if ``dest`` is in use already, or nothing can be read at all, and
    StoreOwnedError while a process has the store open.
    """
    place, new = folder(path, readonly=True), Path(dest).expanduser().absolute()
    home = place / "ledger"
    if not (home / "data.mdb").exists():
        raise StoreError("there is no ledger here", where=str(home), fix="Name the store's folder with --path")
    if attended(place):
        raise StoreOwnedError("the store is in use", where=str(place), fix="Close the process that has it open")
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise StoreError("there is something here already", where=str(new), fix="Name a folder that is new or empty")
    found = _Found(salvage(home, progress))
    if not found.sessions and not found.items:
        raise StoreDamagedError("no session can be read", where=str(home), fix="Restore a backup")
    turns, lost_turns = found.histories()
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create the folder: {error.strerror}", where=str(new), fix="Choose another") from None
    with Ledger.open(new) as ledger:
        adopt(ledger, found.sessions.values(), turns, found.tokens(turns), found.next_id, progress)
        Items(ledger).write(found.put_items)
        ledger.check()
        stats = ledger.stats()
    return Rescued(stats.sessions, stats.turns, lost_turns, tuple(found.lost))


class _Found:
    """The records that are whole, and the histories that can be made of them."""

    def __init__(self, raw: Salvaged) -> None:
        self.lost = list(raw.lost)
        self._links: dict[int, Links] = {}
        self._turns: dict[int, Turn] = {}
        self._roles: dict[int, str] = {}
        self._tokens: dict[bytes, bytes] = {}
        self.sessions: dict[str, Session] = {}
        self.items: dict[bytes, bytes] = {}
        info = raw.tables.get("info", {})
        self._checked_from = 0
        if raw.tables and (b"checked" not in info):
            self._checked_from = 1 << 64
        elif info:
            try:
                self._checked_from = decode_id(b"checked", info[b"checked"])
            except StoreDamagedError as error:
                self.lost.append(error.what)
        for key, value in raw.tables.get("sessions", {}).items():
            self._add_session(key, value)
        for table in ("turns", "tokens"):
            for key, value in raw.tables.get(table, {}).items():
                self._add(key, value)
        for key, value in raw.tables.get(ITEMS, {}).items():
            try:
                self.items[key] = bytes(unseal(key, value))
            except ValueError as error:
                self.lost.append(f"the item {key[:60]!r}: {error}")
        # A stray turn is needed only where a session leads to it; a stray session may have been deleted, which the
        # table of names tells.
        names = raw.tables["names"] if "names" in raw.whole else None
        for key, value in raw.strays:
            if len(key) in (_TURN, _TOKENS):
                self._add(key, value)
            elif len(key) == _SESSION and "sessions" not in raw.whole:
                self._add_session(key, value, stray=True, names=names)
        try:
            top = decode_id(b"next", info[b"next"])
        except (KeyError, StoreDamagedError):
            top = 1
        self.next_id = max(top, *self._links, *(s.head for s in self.sessions.values()), 0) + 1

    def _add_session(
        self, key: bytes, value: bytes, *, stray: bool = False, names: Mapping[bytes, bytes] | None = None
    ) -> None:
        try:
            session = decode_session(key, value)
        except StoreDamagedError as error:
            if not stray:
                self.lost.append(error.what)
            return
        known = self.sessions.get(session.id)
        if names is not None and names.get(session.name.encode()) != key:
            return
        if known is None or (stray and session.updated > known.updated):
            if any(one.name == session.name for one in self.sessions.values() if one.id != session.id):
                session = msgspec.structs.replace(session, name=f"{session.name[:200]} ({session.id[:8]})")
            self.sessions[session.id] = session

    def _add(self, key: bytes, value: bytes) -> None:
        id = int.from_bytes(key[:_TURN], "big")
        try:
            if len(key) == _TOKENS:
                self._tokens.setdefault(key, decode_tokens(key, value, checked=id >= self._checked_from))
            elif len(key) == _TURN and id not in self._turns:
                links = Links.unpack(id, value)
                if id >= self._checked_from and not is_checked(value):
                    return
                # What is no turn at all, of a page that is not one of turns, or free.
                if not (links.parent < id and links.jump <= links.parent and 0 < links.depth <= id):
                    return
                self._links[id], self._roles[id] = links, role_of(value)
                self._turns[id] = decode_turn(id, value)
        except DamagedTurnError:
            pass  # it is missed, and named, where a history needs it

    def histories(self) -> tuple[dict[int, tuple[int, NewTurn]], int]:
        """Return the turns that sessions need with the turn before each, and how many in them are lost."""
        turns: dict[int, tuple[int, NewTurn]] = {}
        lost = sum(self._follow(session, turns) for session in sorted(self.sessions.values(), key=lambda s: s.created))
        parents = {links.parent for links in self._links.values()}
        # Where a session's last turn is lost, nothing tells which were before it: those get sessions of their own.
        cut = any(session.head and session.head not in self._links for session in self.sessions.values())
        for tip in sorted(self._links.keys() - turns.keys() - parents) if cut else ():
            at = self._turns[tip].created if tip in self._turns else 0.0
            id = new_session_id()
            session = Session(id, f"rescued {tip} {id[:8]}", tip, None, 0, at, at)
            self.sessions[id] = session
            before = len(turns)
            lost += self._follow(session, turns)
            self.lost.append(f"whose {len(turns) - before} turns up to {tip} are: session {session.name!r} has them")
        return turns, lost

    def _follow(self, session: Session, turns: dict[int, tuple[int, NewTurn]]) -> int:
        """Add the turns of a session to ``turns``; returns how many of them are lost."""
        id, depth, lost = session.head, 0, 0
        above: list[int] = []
        missing: list[str] = []
        while id and id not in turns:
            links, span = self._links.get(id), 1
            if links is not None:
                parent, depth = links.parent, links.depth
                above.append(links.jump)
            elif depth:
                # What stood before is known by the jumps of the turns after it, far above.
                parent = next((one for one in sorted(above, reverse=True) if one < id and one in self._links), 0)
                span = max(1, depth - 1 - (self._links[parent].depth if parent else 0))
            else:
                parent = 0
            kept = self._turns.get(id)
            if kept is not None:
                turns[id] = parent, NewTurn(kept.role, kept.content, kept.meta, created=kept.created)
            else:
                text = f"[{span} turn{'s' * (span > 1)} of this conversation {'were' if span > 1 else 'was'} lost]"
                turns[id] = parent, NewTurn(self._roles.get(id) or "user", text, {"lost": span}, created=0.0)
                lost += span
                end = f"turn {id}" if links is not None or depth else f"turn {id} and what was before it"
                missing.append(f"{span} turns up to {id}" if span > 1 else end)
            id = parent
        if missing:
            self.lost.append(f"session {session.name!r}: {', '.join(missing[::-1])}")
        return lost

    def put_items(self, table: ItemTable) -> None:
        """Write the items that are whole into a new ledger."""
        for key, body in self.items.items():
            table.put(key, body)

    def tokens(self, turns: dict[int, Any]) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the token ids of turns that were not lost."""
        for key, ids in self._tokens.items():
            id = int.from_bytes(key[:_TURN], "big")
            if id in turns and id in self._turns:
                yield key, ids
