"""Named contexts: texts that local programs share, kept as sessions of the ledger, their KV computed in advance."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.engines.prompt import EncodedPrompt, check_length, encode_prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError, SessionError, StoreError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.private import read_list, write_private
from ctxreuse.runtime import Runtime, Usage
from ctxreuse.runtime.steps.order import BACKGROUND
from ctxreuse.store import Ledger, NewTurn, Session, Store, new_session_id
from ctxreuse.why import RequestInfo
from ctxreuse_edge.token_records import ids_at, with_ids

__all__ = ["OWNER", "RECORD", "RESPONSES", "NamedContext", "NamedContexts", "session_of"]

log = logging.getLogger(__name__)

#: Role of a turn that is plain text, not a message.
TEXT = "text"
#: How the names of stored responses begin, and no others.
RESPONSES = "resp_"
#: Role of the last turn of a response, which is no message; in its meta, whose it is: the name of the API key.
RECORD, OWNER = "response", "owner"

_FLUSH_SECONDS = 30.0


class NamedContext(msgspec.Struct, frozen=True):
    """One named context: its length in turns and tokens, and how many tokens have KV in the store.

    ``created``: seconds since 1970.
    """

    id: str
    name: str
    turns: int
    tokens: int
    cached_tokens: int
    pinned: bool
    created: float


class NamedContexts:
    """All named contexts of one daemon. Thread-safe.

    Pins are kept in ``pins_file``, as those of the store end with the process. The ids of a context are stored with its
    last turn, so they stay the same even if a template inserts the date.
    """

    def __init__(self, ledger: Ledger, runtime: Runtime, store: Store, pins_file: Path) -> None:
        self._ledger, self._runtime, self._store, self._file = ledger, runtime, store, pins_file
        self._lock = threading.Lock()
        self._pins: dict[str, list[bytes]] = {}
        for id in read_list(pins_file, str, "pins"):
            with contextlib.suppress(SessionError):  # deleted while no daemon ran
                self._pin(ledger.session(id))

    def create(
        self, name: str | None, messages: Sequence[Message], text: str | None, *, pin: bool
    ) -> tuple[NamedContext, Usage]:
        """Create and compute a context of messages or of a plain text; returns it with the cost of computing it.

        Raises SessionError if the name is taken, EngineError for messages that the template refuses.
        """
        model = self._runtime.text
        if model is None:
            raise EngineError("this engine has no tokenizer")
        if text is not None:
            check_length(model, text, self._runtime.space.max_tokens)
            found = EncodedPrompt(model.encode(text, markers=False), ())
            turns = [NewTurn(TEXT, text)]
        else:
            found = encode_prompt(model, messages, generate=False, max_tokens=self._runtime.space.max_tokens)
            turns = [NewTurn(m.role, m.content, m.meta) for m in messages]
        request = self._runtime.request(found.ids, parts=found.parts, branches=found.ends, priority=BACKGROUND)
        turns[-1] = with_ids(turns[-1], request.ids, self._runtime.space.digest)
        if name is not None:
            if name.startswith(RESPONSES):
                raise SessionError(f"{name[:60]!r} cannot name a context", fix=f"{RESPONSES} begins ids of responses")
            self._ledger.check_name(name)
        # Computed first, stored in one step: what ends in between leaves nothing that holds the name.
        id = new_session_id()
        usage = self._runtime.warm(replace(request, about=RequestInfo(session=id)))
        session = self._ledger.create(name, turns=turns, id=id)
        if pin:
            self.pin(session.id)
        return self.get(session.id), usage

    def newest(self, limit: int, offset: int = 0, *, prefix: str = "") -> list[NamedContext]:
        """Return contexts, last changed first, or those whose names start with ``prefix`` in the order of names:
        with a prefix of `RESPONSES`, these too."""
        found = self._ledger.sessions(limit, offset, prefix=prefix, beside=RESPONSES)
        return [self._describe(session) for session in found if _is_open(self._ledger, session)]

    def get(self, id_or_name: str) -> NamedContext:
        """Return the context with that id or name. Raises SessionError."""
        return self._describe(session_of(self._ledger, id_or_name))

    def messages(self, id_or_name: str) -> list[Message]:
        """Return its turns as messages. Raises SessionError if it is a plain text."""
        return self._messages(session_of(self._ledger, id_or_name))

    def _messages(self, session: Session) -> list[Message]:
        turns = self._ledger.turns(session.head)
        if any(turn.role == TEXT for turn in turns):
            raise SessionError("the context is a plain text, not messages", where=session.name)
        return [Message.kept(turn.role, turn.content, turn.meta) for turn in turns if turn.role != RECORD]

    def tokens(self, session: Session) -> Tokens:
        """Return its ids, int32 [n]: those stored at its creation, if it was created with this model."""
        model = self._runtime.text
        if not session.head or model is None:
            return as_tokens([])
        found = ids_at(self._ledger, session.head, self._runtime.engine.space.digest)
        if found is not None:
            return found
        turns = self._ledger.turns(session.head)
        if turns[0].role == TEXT:
            return model.encode(turns[0].content, markers=False)
        return encode_prompt(model, self._messages(session), generate=False).ids

    def _parts(self, session: Session, ids: Tokens) -> tuple[int, ...]:
        """Return the ends of its messages' parts; none for a plain text, or if the messages give other ids by now."""
        model = self._runtime.text
        if model is None or self._ledger.turns(session.head)[0].role == TEXT:
            return ()
        made = encode_prompt(model, self._messages(session), generate=False)
        return made.parts if np.array_equal(made.ids, ids) else ()

    def pin(self, id_or_name: str) -> NamedContext:
        """Compute what is missing and protect it from eviction, also after restarts."""
        session = session_of(self._ledger, id_or_name)
        ids = self.tokens(session)
        if len(ids):
            parts = self._parts(session, ids)
            self._runtime.warm(self._runtime.request(ids, parts=parts, priority=BACKGROUND))
            with contextlib.suppress(StoreError):  # queued blocks are pinned in memory
                self._store.flush(_FLUSH_SECONDS)
        self._pin(session)
        self._write_pins()
        return self._describe(session)

    def unpin(self, id_or_name: str) -> NamedContext:
        """Remove the protection."""
        session = session_of(self._ledger, id_or_name)
        self._unpin(session.id)
        return self._describe(session)

    def unpin_deleted(self, id: str) -> None:
        """Remove the protection of a context that is about to be deleted."""
        self._unpin(id)

    @property
    def pinned(self) -> frozenset[str]:
        """The ids of those that are pinned."""
        with self._lock:
            return frozenset(self._pins)

    def count(self) -> int:
        """Return the number of contexts, without responses."""
        return self._ledger.count(beside=RESPONSES)

    def _describe(self, session: Session) -> NamedContext:
        ids = self.tokens(session)
        cached = self._store.match(self._runtime.keys(ids)).tokens if len(ids) else 0
        turns = self._ledger.turn(session.head).depth if session.head else 0
        pinned = session.id in self._pins
        return NamedContext(session.id, session.name, turns, len(ids), cached, pinned, session.created)

    def _pin(self, session: Session) -> None:
        keys = self._runtime.keys(self.tokens(session))
        keys = keys[: self._store.match(keys).blocks]
        with self._lock:
            before = self._pins.get(session.id, [])
            self._store.pin(keys)
            self._store.unpin(before)
            self._pins[session.id] = keys

    def _unpin(self, id: str) -> None:
        with self._lock:
            keys = self._pins.pop(id, None)
            if keys is not None:
                self._store.unpin(keys)
        if keys is not None:
            self._write_pins()

    def _write_pins(self) -> None:
        with self._lock:
            try:
                write_private(self._file, msgspec.json.encode(sorted(self._pins)))
            except OSError as error:
                log.warning("pins could not be saved: %s", error)

    def check(self) -> None:
        """Raise AssertionError if a pin belongs to no context."""
        ids = {session.id for session in self._ledger.sessions()}
        assert set(self._pins) <= ids, "a pin without a context"


def session_of(ledger: Ledger, id_or_name: str) -> Session:
    """Return a session that the caller may use: a response is that of one API key, contexts are all callers'.

    Raises SessionError.
    """
    session = ledger.session(id_or_name)
    if not _is_open(ledger, session):
        raise SessionError(f"there is no session {id_or_name!r}")
    return session


def _is_open(ledger: Ledger, session: Session) -> bool:
    # Without keys all callers are programs of this device's user.
    caller = CALLER.get()
    if not caller or not session.name.startswith(RESPONSES):
        return True
    owner: object = ledger.turn(session.head).meta.get(OWNER, caller)
    return owner == caller
