"""Named contexts: texts that local programs share, kept as sessions of the ledger, with their KV computed ahead."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ctxreuse.engines.prompt import Prompted, prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError, SessionError, StoreError
from ctxreuse.keys import Tokens, as_tokens
from ctxreuse.runtime import Runtime, Usage
from ctxreuse.store import Ledger, NewTurn, Session, WholeStore
from ctxreuse.why import About

__all__ = ["Context", "Contexts"]

log = logging.getLogger(__name__)

#: The role of a turn that is plain text and not a message.
TEXT = "text"

_WHOLE = np.array([-1], "<i4")
_FLUSH_SECONDS = 30.0


class Context(msgspec.Struct, frozen=True):
    """One named context: its length in ``turns`` and ``tokens``, how many tokens' KV is ``held``, if it is ``pinned``.

    ``created``: seconds since 1970.
    """

    id: str
    name: str
    turns: int
    tokens: int
    held: int
    pinned: bool
    created: float


class Contexts:
    """All named contexts of one daemon. Any thread may call.

    Pins are kept in ``pins_file`` too, as those of the store end with the process. The ids of a context are stored
    with its last turn when it is made, so that they stay the same whatever a template does with the date.
    """

    def __init__(self, ledger: Ledger, runtime: Runtime, store: WholeStore, pins_file: Path) -> None:
        self._ledger, self._runtime, self._store, self._file = ledger, runtime, store, pins_file
        self._lock = threading.Lock()
        self._pins: dict[str, list[bytes]] = {}
        for id in _read_pins(pins_file):
            with contextlib.suppress(SessionError):  # deleted while no daemon ran
                self._pin(ledger.session(id))

    def create(
        self, name: str | None, messages: Sequence[Message], text: str | None, *, pin: bool
    ) -> tuple[Context, Usage]:
        """Keep and compute a context of messages or of a plain text; says what computing cost.

        Raises SessionError if the name is taken, EngineError for messages that the model cannot take.
        """
        model = self._runtime.text
        if model is None:
            raise EngineError("this engine has no tokenizer")
        if text is not None:
            found = Prompted(model.encode(text, markers=False), ())
            turns = [NewTurn(TEXT, text)]
        else:
            found = prompt(model, messages, generate=False)
            turns = [NewTurn(m.role, m.content, m.meta) for m in messages]
        ids = self._runtime.checked(found.ids)
        space = self._runtime.engine.space.digest
        packed = np.concatenate([_WHOLE, ids]).astype("<i4").tobytes()
        turns[-1] = msgspec.structs.replace(turns[-1], tokens=packed, space=space)
        session = self._ledger.create(name)
        try:
            self._ledger.append(session.id, turns)
            usage = self._runtime.warm(ids, branches=found.ends, parts=found.parts, about=About(session=session.id))
        except BaseException:
            self._ledger.delete(session.id)
            raise
        if pin:
            self.pin(session.id)
        return self.get(session.id), usage

    def every(self, limit: int) -> list[Context]:
        """Contexts, last changed first."""
        return [self._describe(session) for session in self._ledger.sessions(limit)]

    def get(self, id_or_name: str) -> Context:
        """One context. Raises SessionError if there is none of that id or name."""
        return self._describe(self._ledger.session(id_or_name))

    def messages(self, id_or_name: str) -> list[Message]:
        """Its turns as messages. Raises SessionError if it is a plain text, which no message can follow."""
        turns = self._ledger.turns(self._ledger.session(id_or_name).head)
        if any(turn.role == TEXT for turn in turns):
            raise SessionError("the context is a plain text, not messages", where=id_or_name)
        return [Message.kept(turn.role, turn.content, turn.meta) for turn in turns]

    def tokens(self, session: Session) -> Tokens:
        """Its ids, as they were when it was made if that was with this model; int32 [n]."""
        model = self._runtime.text
        if not session.head or model is None:
            return as_tokens([])
        raw = self._ledger.tokens(session.head, self._runtime.engine.space.digest)
        if raw is not None and len(raw) % 4 == 0 and raw[:4] == _WHOLE.tobytes():
            return as_tokens(np.frombuffer(raw, "<i4")[1:])
        turns = self._ledger.turns(session.head)
        if turns[0].role == TEXT:
            return model.encode(turns[0].content, markers=False)
        return prompt(model, self.messages(session.id), generate=False).ids

    def _parts(self, session: Session, ids: Tokens) -> tuple[int, ...]:
        """Where the parts of its messages end; none for a plain text, or if the messages give other ids by now, as a
        template may say the date."""
        model = self._runtime.text
        if model is None or self._ledger.turns(session.head)[0].role == TEXT:
            return ()
        made = prompt(model, self.messages(session.id), generate=False)
        return made.parts if np.array_equal(made.ids, ids) else ()

    def pin(self, id_or_name: str) -> Context:
        """Compute what is missing and hold eviction off it, over restarts too."""
        session = self._ledger.session(id_or_name)
        ids = self.tokens(session)
        if len(ids):
            self._runtime.warm(ids, parts=self._parts(session, ids))
            with contextlib.suppress(StoreError):  # what is still queued is in memory, and pinned there
                self._store.flush(_FLUSH_SECONDS)
        self._pin(session)
        self._write_pins()
        return self._describe(session)

    def unpin(self, id_or_name: str) -> Context:
        """Let it be evicted like everything else."""
        session = self._ledger.session(id_or_name)
        self._unpin(session.id)
        return self._describe(session)

    def delete(self, id_or_name: str) -> int:
        """Delete text and KV that no other context shares; returns how many blocks went."""
        session = self._ledger.session(id_or_name)
        ids = self.tokens(session)
        self._unpin(session.id)
        self._ledger.delete(session.id)
        return self._runtime.forget(ids) if len(ids) else 0

    def count(self) -> int:
        """How many there are."""
        return self._ledger.count()

    def _describe(self, session: Session) -> Context:
        ids = self.tokens(session)
        held = self._store.match(self._runtime.keys(ids)).tokens if len(ids) else 0
        turns = self._ledger.turn(session.head).depth if session.head else 0
        return Context(session.id, session.name, turns, len(ids), held, session.id in self._pins, session.created)

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
            fresh = self._file.with_name(self._file.name + ".new")
            try:
                fresh.write_bytes(msgspec.json.encode(sorted(self._pins)))
                fresh.replace(self._file)
            except OSError as error:
                log.warning("pins will not outlive this process: %s", error)

    def check(self) -> None:
        """Raises AssertionError if a pin belongs to no context."""
        ids = {session.id for session in self._ledger.sessions()}
        assert set(self._pins) <= ids, "a pin without a context"


def _read_pins(file: Path) -> list[str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[str])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("pins are forgotten: %s", error, extra={"file": str(file)})
        return []
