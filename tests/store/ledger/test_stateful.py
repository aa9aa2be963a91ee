"""Ledger against plain dicts: sessions, turns, forks, rollbacks, tokens and their collection."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxreuse.errors import SessionError
from ctxreuse.store import Ledger, NewTurn
from support.examples import examples

SPACE = bytes(range(32))
names = st.sampled_from(["a", "b", "c", "straße", "日本"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.temp = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.sessions: dict[str, tuple[int, float]] = {}
        self.turns: dict[int, tuple[int, str]] = {}
        self.tokens: dict[int, bytes] = {}
        self.top = 0
        self.open()

    def open(self) -> None:
        self.ledger = Ledger.open(Path(self.temp.name), clock=self.clock, map_size=1 << 20)

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def history(self, head: int) -> list[int]:
        found = []
        while head:
            found.append(head)
            head = self.turns[head][0]
        return found

    @rule(name=names)
    def create(self, name: str) -> None:
        if name in self.sessions:
            with pytest.raises(SessionError, match="already"):
                self.ledger.create(name)
        else:
            self.sessions[name] = (0, self.ledger.create(name).updated)

    @rule(name=names, contents=st.lists(texts, min_size=1, max_size=4), token=st.booleans())
    def append(self, name: str, contents: list[str], token: bool) -> None:
        if name not in self.sessions:
            with pytest.raises(SessionError, match="no session"):
                self.ledger.append(name, [NewTurn("user", "x")])
            return
        head = self.sessions[name][0]
        raw = b"\1\0\0\0" if token else None
        new = [NewTurn("user", content, {"n": len(content)}, raw, SPACE) for content in contents]
        with pytest.raises(SessionError, match="is at turn"):
            self.ledger.append(name, new, expected_head=head + 1)
        for turn, content in zip(self.ledger.append(name, new, expected_head=head), contents):
            assert turn.id > self.top
            assert (turn.parent, turn.content, turn.depth) == (head, content, len(self.history(head)) + 1)
            self.turns[turn.id] = (head, content)
            if raw is not None:
                self.tokens[turn.id] = raw
            self.top = head = turn.id
        self.sessions[name] = (head, self.now)

    @rule(name=names, to=names, back=st.integers(0, 6))
    def fork(self, name: str, to: str, back: int) -> None:
        if name not in self.sessions or to in self.sessions:
            with pytest.raises(SessionError):
                self.ledger.fork(name, to)
            return
        line = [*self.history(self.sessions[name][0]), 0]
        at = line[min(back, len(line) - 1)]
        forked = self.ledger.fork(name, to, at)
        assert (forked.head, forked.forked_at, forked.origin) == (at, at, self.ledger.session(name).id)
        self.sessions[to] = (at, forked.updated)

    @rule(name=names, data=st.data())
    def move(self, name: str, data: st.DataObject) -> None:
        if name in self.sessions:
            head = data.draw(st.sampled_from([0, *self.turns]))
            self.sessions[name] = (head, self.ledger.set_head(name, head).updated)
            with pytest.raises(SessionError, match="no turn"):
                self.ledger.set_head(name, self.top + 1)

    @rule(name=names, to=names)
    def rename(self, name: str, to: str) -> None:
        if name in self.sessions and to not in self.sessions:
            old = self.sessions.pop(name)
            self.sessions[to] = (old[0], self.ledger.rename(name, to).updated)

    @rule(name=names)
    def delete(self, name: str) -> None:
        if name in self.sessions:
            del self.sessions[name]
            self.ledger.delete(name)

    @rule()
    def gc(self) -> None:
        reached = {id for head, _ in self.sessions.values() for id in self.history(head)}
        assert self.ledger.gc() == len(self.turns) - len(reached)
        self.turns = {id: turn for id, turn in self.turns.items() if id in reached}
        self.tokens = {id: raw for id, raw in self.tokens.items() if id in reached}

    @rule(data=st.data())
    def relate(self, data: st.DataObject) -> None:
        if self.turns:
            a, b = (data.draw(st.sampled_from([0, *self.turns])) for _ in "ab")
            mine, other = self.history(a), self.history(b)
            assert self.ledger.ancestor(a, b) == (a in other or a == 0)
            assert self.ledger.common(a, b) == next((id for id in mine if id in other), 0)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.open()

    @invariant()
    def agree(self) -> None:
        self.ledger.check()
        newest = sorted(self.sessions, key=lambda name: -self.sessions[name][1])
        assert [session.name for session in self.ledger.sessions()] == newest
        assert self.ledger.stats().turns == len(self.turns)
        for name, (head, _) in self.sessions.items():
            assert self.ledger.session(name).head == head
            line = [(turn.id, turn.content) for turn in self.ledger.turns(head)]
            assert line == [(id, self.turns[id][1]) for id in reversed(self.history(head))]
        assert {id: raw for id in self.turns if (raw := self.ledger.tokens(id, SPACE))} == self.tokens

    def teardown(self) -> None:
        self.ledger.close()
        self.temp.cleanup()


TestLedger = Machine.TestCase
TestLedger.settings = examples("heavy", stateful_step_count=25, suppress_health_check=list(HealthCheck))
