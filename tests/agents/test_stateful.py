"""Any order of verbs against the obvious model: a session is a name and a list of strings."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from ctxreuse_agents import Memory, Session
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from ctxreuse.errors import SessionError
from support.examples import examples

pytestmark = pytest.mark.slow

TEXT = st.text(max_size=12)


@dataclass
class Plain:
    """What a session must hold: turns as (serial, text), so that equal texts stay different turns."""

    id: str
    name: str
    turns: list[tuple[int, str]] = field(default_factory=list)
    origin: str | None = None
    forked_at: list[tuple[int, str]] = field(default_factory=list)


def shared(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Sessions(RuleBasedStateMachine):
    ids = Bundle("ids")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.memory = Memory.open(self.folder / "m")
        self.plain: dict[str, Plain] = {}
        self.serial = 0

    def teardown(self) -> None:
        self.memory.close()
        shutil.rmtree(self.folder)

    def session(self, key: str) -> Session:
        return self.memory.session(key, create=False)

    def add(self, plain: Plain, text: str) -> None:
        self.serial += 1
        plain.turns = [*plain.turns, (self.serial, text)]

    @rule(target=ids)
    def create(self) -> str:
        session = self.memory.create()
        self.plain[session.id] = Plain(session.id, session.name)
        return session.id

    @rule(key=ids, texts=st.lists(TEXT, min_size=1, max_size=3))
    def append(self, key: str, texts: list[str]) -> None:
        for text in texts:
            self.session(key).user(text)
            self.add(self.plain[key], text)

    @rule(target=ids, key=ids, data=st.data())
    def fork(self, key: str, data: st.DataObject) -> str:
        plain, session = self.plain[key], self.session(key)
        at = data.draw(st.integers(0, len(plain.turns)))
        turns = session.turns()
        fork = session.fork(at=turns[at - 1] if at else 0) if at < len(turns) else session.fork()
        kept = plain.turns[:at]
        self.plain[fork.id] = Plain(fork.id, fork.name, kept, key, kept)
        return fork.id

    @rule(key=ids, data=st.data())
    def rollback(self, key: str, data: st.DataObject) -> None:
        plain = self.plain[key]
        back = data.draw(st.integers(0, len(plain.turns) + 1))
        if back > len(plain.turns):
            with pytest.raises(SessionError):
                self.session(key).rollback(-back)
        elif back:
            self.session(key).rollback(-back)
            plain.turns = plain.turns[:-back]

    @rule(key=ids, data=st.data(), text=st.none() | TEXT)
    def edit(self, key: str, data: st.DataObject, text: str | None) -> None:
        plain = self.plain[key]
        if not plain.turns:
            return
        at = data.draw(st.integers(0, len(plain.turns) - 1))
        self.session(key).edit(self.session(key).turns()[at], text)
        behind = plain.turns[at + 1 :]
        plain.turns = plain.turns[:at]
        for kept in ([text] if text is not None else []) + [one for _, one in behind]:
            self.add(plain, kept)

    @rule(key=ids, onto=st.booleans())
    def commit(self, key: str, onto: bool) -> None:
        plain, session = self.plain[key], self.session(key)
        origin = self.plain.get(plain.origin or "")
        if origin is None:
            with pytest.raises(SessionError):
                session.commit(onto=onto)
            return
        start = shared(plain.forked_at, plain.turns)
        common = shared(origin.turns, plain.turns)
        if common == len(origin.turns) and common >= start:
            session.commit(onto=onto)
            origin.turns = plain.turns
        elif not onto:
            with pytest.raises(SessionError, match="has new turns"):
                session.commit()
        else:
            session.commit(onto=True)
            for _, text in plain.turns[max(start, common) :]:
                self.add(origin, text)
            plain.turns = origin.turns

    @rule(key=ids, name=st.sampled_from("abc"))
    def rename(self, key: str, name: str) -> None:
        taken = any(plain.name == name and plain.id != key for plain in self.plain.values())
        if taken:
            with pytest.raises(SessionError):
                self.session(key).rename(name)
        else:
            self.session(key).rename(name)
            self.plain[key].name = name

    @rule(key=consumes(ids))
    def delete(self, key: str) -> None:
        self.memory.delete(key)
        del self.plain[key]

    @rule(a=ids, b=ids)
    def diff(self, a: str, b: str) -> None:
        diff = self.session(a).diff(self.session(b))
        n = shared(self.plain[a].turns, self.plain[b].turns)
        assert [turn.content for turn in diff.here] == [text for _, text in self.plain[a].turns[n:]]
        assert [turn.content for turn in diff.there] == [text for _, text in self.plain[b].turns[n:]]

    @rule(readonly=st.booleans())
    def reopen(self, readonly: bool) -> None:
        self.memory.close()
        if readonly:
            with Memory.open(self.folder / "m", readonly=True) as reader:
                reader.check()
        self.memory = Memory.open(self.folder / "m")

    @rule()
    def gc(self) -> None:
        self.memory.gc()
        assert self.memory.gc() == 0

    @invariant()
    def holds_what_the_lists_hold(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        listed = {session.id: session for session in self.memory.sessions()}
        assert listed.keys() == self.plain.keys()
        for plain in self.plain.values():
            session = listed[plain.id]
            assert session.name == plain.name
            assert [turn.content for turn in session.turns()] == [text for _, text in plain.turns]


TestSessions = Sessions.TestCase
TestSessions.settings = examples("normal", stateful_step_count=30)
