"""Deletion of texts on a device: contexts, stored answers and plain chats, with all that was kept of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime.compaction import compact, finish_deletions
from ctxreuse.runtime.erase import Erasure
from ctxreuse.store import Ledger, TieredStore
from ctxreuse_edge.contexts import NamedContexts, session_of

if TYPE_CHECKING:
    from ctxreuse.peer.sync.deletions import CloudDeletions
    from ctxreuse_edge.models import ServedModels

__all__ = ["Forgetter", "Forgotten"]

#: Shortest text to search for: a shorter one would be in most chats.
_SHORTEST = 4


class Forgotten(msgspec.Struct, frozen=True):
    """What was deleted: contexts, logged requests and blocks of KV. ``contexts``: names of contexts that contain the
    text and stay, as they are deleted by name. ``clouds``: blocks that each cloud has still to delete."""

    deleted: int = 0
    requests: int = 0
    blocks: int = 0
    contexts: tuple[str, ...] = ()
    clouds: dict[str, int] = {}


class Forgetter:
    """Deletes what a person wants forgotten. Thread-safe.

    What is to be done is written down before it is done, so that a deletion that was begun is completed after a crash.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: TieredStore,
        models: ServedModels,
        contexts: NamedContexts,
        clouds: CloudDeletions | None = None,
    ) -> None:
        self._ledger, self._store, self._models, self._contexts = ledger, store, models, contexts
        self._clouds = clouds
        if clouds is not None:
            models.first.runtime.eraser.salts = clouds.salts
        self._lock = threading.Lock()

    def session(self, id_or_name: str) -> Forgotten:
        """Delete a session of the ledger, the requests that used it, and the KV that nothing else shares.

        Raises SessionError.
        """
        with self._lock:
            session, eraser = session_of(self._ledger, id_or_name), self._models.first.runtime.eraser
            plan = eraser.plan_context(self._contexts.tokens(session), session.id, self._kept(session.id))
            self._contexts.unpin_deleted(session.id)
            self._ledger.delete(session.id, note=msgspec.msgpack.encode(plan))
            return msgspec.structs.replace(self._finish(), deleted=1)

    def request(self, request: str) -> Forgotten:
        """Delete what is kept of the chat that has a request of this id. Unknown or forgotten: nothing is deleted."""
        with self._lock:
            self._forget_drafts()
            eraser = self._models.first.runtime.eraser
            return self._erase(eraser.plan([], eraser.chat_of(request), self._kept()))

    def text(self, text: str) -> Forgotten:
        """Delete what is kept of all chats that contain ``text``. Raises ConfigError for a short one."""
        if len(text.strip()) < _SHORTEST:
            fix = f"Give at least {_SHORTEST} characters: a shorter text is in most chats"
            raise ConfigError("the text to forget is too short", fix=fix)
        with self._lock:
            self._forget_drafts()
            runtime = self._models.first.runtime
            decode = runtime.text.decode if runtime.text is not None else _no_text
            entries = runtime.eraser.saying(text, decode)
            done = self._erase(runtime.eraser.plan([], entries, self._kept()))
            return msgspec.structs.replace(done, contexts=tuple(self._saying(text)))

    def older_than(self, time: float) -> int:
        """Delete contexts last changed, and requests made, before a time (seconds since 1970); returns how many.

        Pinned sessions stay, as they do where the library deletes by age.
        """
        names = [one.id for one in self._ledger.sessions() if one.updated < time and not one.pinned]
        for name in names:
            with contextlib.suppress(SessionError):  # deleted meanwhile
                self.session(name)
        with self._lock:
            self._forget_drafts(time)
            eraser = self._models.first.runtime.eraser
            return len(names) + self._erase(eraser.plan([], eraser.before(time), self._kept())).requests

    def tokens(self, tokens: Tokens, session: str = "") -> Forgotten:
        """Delete what is kept of a context that a program keeps itself, and of the requests of its ``session``."""
        with self._lock:
            self._forget_drafts()
            eraser = self._models.first.runtime.eraser
            return self._erase(eraser.plan_context(tokens, session, self._kept()))

    def resume(self) -> None:
        """Complete the deletions that a crash cut short. Call it once, before requests are answered."""
        with self._lock:
            self._finish()

    def compact(self) -> bool:
        """Rewrite the files if anything was deleted since the last time; returns whether it was.

        Raises StoreError if the disk has no room.
        """
        if self._ledger.deleted_since() is None:
            return False
        compact(self._ledger, self._store)
        return True

    def _kept(self, but: str = "") -> Iterator[Tokens]:
        for session in self._ledger.sessions():
            if session.id != but and session.head:
                yield self._contexts.tokens(session)

    def _saying(self, text: str) -> list[str]:
        sessions = self._ledger.sessions()
        return [one.name for one in sessions if any(text in turn.content for turn in self._ledger.turns(one.head))]

    def _forget_drafts(self, before: float = inf) -> None:
        """Answers may be drafted from what no log remembers any more."""
        for model in self._models.open:
            model.forget_drafts(before)

    def _erase(self, plan: Erasure) -> Forgotten:
        if plan == Erasure():
            return Forgotten()
        self._ledger.note_deletion(msgspec.msgpack.encode(plan))
        return self._finish()

    def _finish(self) -> Forgotten:
        """Carry out all that is noted."""
        requests, blocks = finish_deletions(self._ledger, self._carry_out)
        clouds = {} if self._clouds is None else self._clouds.waiting()
        return Forgotten(0, requests, blocks, clouds=clouds)

    def _carry_out(self, plan: Erasure) -> int:
        for model in self._models.open:
            model.forget_texts()
            model.paused.forget(plan.blocks)
        blocks = self._models.first.runtime.eraser.carry_out(plan)
        if self._clouds is not None:
            self._clouds.add(plan.clouds)
        return blocks


def _no_text(_: Sequence[int] | Tokens) -> str:
    return ""
