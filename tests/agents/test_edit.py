"""Turns replaced, changed in part or removed in the middle of a history: what is kept, and what is computed again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import AsyncMemory, Memory, Session

from ctxreuse.errors import SessionError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store
from support.shuffled import gate

LONG = [text * 8 for text in ("The tower stands in Ness.", "Boats bring oil.", "Fog: the horn sounds twice.")]
SHORT = {"max_tokens": 3, "ignore_eos": True}


def said(session: Session) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in session.turns()]


def filled(memory: Memory, **how: Any) -> Session:
    session = memory.create(**how)
    session.system("Be brief.")
    session.user("One lamp.")
    session.assistant("Noted.", mood="calm")
    session.user("Two boats.")
    return session


def test_a_turn_is_replaced_and_those_behind_it_stay(memory: Memory) -> None:
    session = filled(memory)
    fork, before = session.fork(), session.turns()
    turn = session.edit(before[1], "Three lamps.")
    after = session.turns()
    assert turn == after[1]
    assert said(session) == [*said(fork)[:1], ("user", "Three lamps."), *said(fork)[2:]]
    assert [one.meta for one in after] == [one.meta for one in before]
    assert [one.created for one in after] == [one.created for one in before]
    assert fork.turns() == before
    assert session.diff(fork).common == before[0].id


def test_a_turn_is_removed_and_a_part_is_replaced_or_cut_out(memory: Memory) -> None:
    session = filled(memory)
    assert session.edit(session.turns()[2], None) is None
    assert [text for _, text in said(session)] == ["Be brief.", "One lamp.", "Two boats."]
    session.edit(session.turns()[0], "very brief", span=(3, 8))
    session.edit(session.turns()[2].id, None, span=(0, 4))
    assert [text for _, text in said(session)] == ["Be very brief.", "One lamp.", "boats."]
    for _ in range(3):
        session.edit(session.turns()[0], None)
    assert session.turns() == []


def test_what_cannot_be_edited_changes_nothing(memory: Memory) -> None:
    session, other = filled(memory), filled(memory)
    before = session.turns()
    for turn, text, span, error in (
        (other.turns()[0], "x", None, "not in the history"),
        (10**6, "x", None, "not in the history"),
        (before[1], "x", (3, 2), "characters 3 to 2"),
        (before[1], "x", (0, 99), "characters 0 to 99"),
        (before[1], "\ud800", None, "surrogate"),
        (before[1], b"x", None, "not text"),
    ):
        with pytest.raises(SessionError, match=error):
            session.edit(turn, text, span=span)  # type: ignore[arg-type]
    assert session.turns() == before


def test_an_edited_session_answers_as_one_that_was_so_from_the_start(asked: Memory) -> None:
    session = filled(asked)
    assert session.ask("How many?", **SHORT).text
    session.edit(session.turns()[3], "Nine boats and a ship.")
    plain = asked.create()
    for role, text in said(session):
        plain.append(role, text)
    assert session.tokens().tolist() == plain.tokens().tolist()
    assert session.ask("And now?", **SHORT).tokens == plain.ask("And now?", **SHORT).tokens


def test_documents_beside_an_edited_one_are_still_parts(asked: Memory) -> None:
    session = asked.create()
    assert session.ask("How often?", documents=LONG, **SHORT).text
    question = session.turns()[0]
    first, second, third = question.meta["cuts"]
    changed = session.edit(question, "Oil is short.", span=(first, second - 2))
    assert changed is not None
    shorter = second - first - len("Oil is short.\n\n")
    assert changed.meta["cuts"] == [first, second - shorter, third - shorter]
    inside = session.edit(changed, None, span=(first - 3, first + 3))
    assert inside is not None
    assert inside.meta["cuts"] == [second - shorter - 6, third - shorter - 6]
    assert session.edit(inside, "All new.").meta == {}  # type: ignore[union-attr]


@pytest.mark.parametrize("max_kl", [0.05, 0.0], ids=["relocated", "exact"])
def test_texts_behind_an_edit_are_relocated_where_the_session_allows_it(
    tmp_path: Path, engine: Any, max_kl: float
) -> None:
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(engine, store, RuntimeOptions(gate=gate(engine), context_cache_bytes=0))
        with Memory.open(tmp_path / "m", runtime, max_kl=max_kl) as memory:
            session = memory.create()
            for text in ("Keep notes.", *LONG):
                session.user(text)
            session.warm()
            session.edit(session.turns()[1], "Nothing.")
            usage = session.ask("How often?", **SHORT).usage
            behind = sum(map(len, LONG[1:]))
            if max_kl:
                assert usage.tokens.relocated > 0.7 * behind
                assert usage.approximate
            else:
                assert (usage.tokens.relocated, usage.approximate) == (0, False)
                assert usage.prompt_tokens - usage.cached_tokens > behind
            memory.check()
        runtime.close()


def test_asyncio_edits_too(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with await AsyncMemory.open(tmp_path / "m") as memory:
            session = await memory.create()
            one = await session.user("one")
            await session.user("two")
            await session.edit(one, "1")
            return [turn.content for turn in await session.turns()]

    assert asyncio.run(run()) == ["1", "two"]
