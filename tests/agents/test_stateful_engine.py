"""Any order of verbs with an engine: ids say what the text says, and answers are those of no store at all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from ctxreuse_agents import Memory, Session
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.runtime import Runtime
from support.examples import examples
from support.tiny_text import tiny_engine

TEXT = st.text("abc \n\u00e4\U0001f9ed", max_size=60)
_engine: list[Any] = []


def engine() -> Any:
    """One for all examples: building it costs more than they do."""
    if not _engine:
        _engine.append(tiny_engine())
    return _engine[0]


class Conversations(RuleBasedStateMachine):
    ids = Bundle("ids")

    @initialize(target=ids)
    def start(self) -> str:
        self.folder = Path(tempfile.mkdtemp())
        self.memory = Memory.open(self.folder / "m", engine())
        self.known: dict[str, list[int]] = {}
        return self.memory.create().id

    def teardown(self) -> None:
        self.memory.close()
        shutil.rmtree(self.folder)

    def session(self, key: str) -> Session:
        return self.memory.session(key, create=False)

    @rule(key=ids, text=TEXT)
    def append(self, key: str, text: str) -> None:
        self.session(key).user(text)

    @rule(key=ids, text=TEXT, n=st.integers(1, 8))
    def ask(self, key: str, text: str, n: int) -> None:
        session = self.session(key)
        probe = session.fork()
        probe.user(text)
        prompt = probe.tokens(generate=True)
        self.memory.delete(probe)
        answer = session.ask(text, max_tokens=n, ignore_eos=True)
        assert answer.text is not None
        plain = Runtime(engine(), None).complete(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
        plain.drain()
        assert answer.tokens == plain.tokens
        assert session.tokens()[: len(prompt) + n].tolist() == [*prompt.tolist(), *plain.tokens]

    @rule(key=ids, text=TEXT, pieces=st.integers(0, 3))
    def leave_early(self, key: str, text: str, pieces: int) -> None:
        with self.session(key).ask(text, max_tokens=20, ignore_eos=True) as answer:
            heard = [piece for piece, _ in zip(answer, range(pieces))]
        turns = self.session(key).turns()
        if answer.turn is not None:
            assert turns[-1] == answer.turn
            assert turns[-1].content.startswith("".join(heard))
        else:
            assert turns[-1].content == text

    @rule(target=ids, key=ids, back=st.integers(0, 3))
    def fork(self, key: str, back: int) -> str:
        turns = self.session(key).turns()
        return self.session(key).fork(at=turns[-1 - back] if back < len(turns) else None).id

    @rule(key=ids)
    def rollback(self, key: str) -> None:
        if self.session(key).head:
            self.session(key).rollback(-1)
            self.known.pop(key, None)

    @rule(key=ids, at=st.integers(0, 3), text=st.none() | TEXT)
    def edit(self, key: str, at: int, text: str | None) -> None:
        turns = self.session(key).turns()
        if at < len(turns):
            self.session(key).edit(turns[at], text)
            self.known.pop(key, None)

    @rule(key=ids)
    def warm(self, key: str) -> None:
        if self.session(key).head:
            self.session(key).warm()
            assert self.session(key).warm().cached_tokens > 0

    @rule(key=ids)
    def evict(self, key: str) -> None:
        self.session(key).evict()

    @rule(engine_attached=st.booleans())
    def reopen(self, engine_attached: bool) -> None:
        self.memory.close()
        if not engine_attached:
            with Memory.open(self.folder / "m") as plain:
                for session in plain.sessions():
                    session.tool("seen without an engine")
        self.memory = Memory.open(self.folder / "m", engine())

    @invariant()
    def ids_say_what_the_text_says(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        for session in self.memory.sessions():
            ids = session.tokens().tolist()
            assert ids[: len(self.known.get(session.id, []))] == self.known.get(session.id, []), "an id was made anew"
            self.known[session.id] = ids
            said = engine().text.decode(ids, markers=True)
            assert said == (engine().text.render(session.messages(), generate=False) if session.head else "")


TestConversations = Conversations.TestCase
TestConversations.settings = examples("heavy", stateful_step_count=15)
