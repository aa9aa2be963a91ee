"""Several answers to one question: one prefill, the first is the session's turn, each other one that of a fork."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import AsyncMemory, Memory

from ctxreuse.errors import ConfigError

HOW: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}


def test_all_answers_come_of_one_prefill_and_each_is_a_turn(asked: Memory, tmp_path: Path) -> None:
    session = asked.create("s")
    session.system("Be brief.")
    first = session.ask("Which way? " * 10, n=4, **HOW)
    answers = [first, *first.others]
    texts = [one.text for one in answers]
    assert len(set(texts)) == 4
    assert [one.usage.prompt_tokens > 0 for one in answers] == [True, False, False, False]
    assert [session.turns()[-1].content, *(one.turn.content for one in first.others if one.turn)] == texts
    for seed, other in enumerate(first.others, HOW["seed"] + 1):
        fork = asked.session(other.session_id, create=False)
        assert fork.record.origin == session.id
        assert [turn.content for turn in fork.turns()[:-1]] == [turn.content for turn in session.turns()[:-1]]
        # What it would have answered alone.
        alone = asked.create(f"alone {seed}")
        alone.system("Be brief.")
        assert alone.ask("Which way? " * 10, **{**HOW, "seed": seed}).text == other.text
    again = asked.session(first.others[1].session_id).ask("And then?", max_tokens=4)
    assert again.usage.cached_tokens > first.usage.prompt_tokens, "the fork's own answer is reused, too"
    again.close()


def test_an_answer_that_is_not_read_ends_with_the_session(asked: Memory) -> None:
    session = asked.create("s")
    first = session.ask("Which way?", n=2, **HOW)
    assert first.piece(0) is not None
    (other,) = first.others
    session.close()
    assert (first.finish, other.finish) == ("cancelled", "cancelled")
    fork = asked.session(other.session_id, create=False)
    fork.user("It is free again.")


@pytest.mark.parametrize("n", [0, -1, 65])
def test_a_number_of_answers_that_cannot_be_is_refused(asked: Memory, n: int) -> None:
    session = asked.create("s")
    with pytest.raises(ConfigError, match="from 1 to 64"):
        session.ask("Which way?", n=n)
    assert not session.turns()


def test_tasks_read_an_answer_each(tmp_path: Path, engine: Any) -> None:
    async def main() -> list[str]:
        async with await AsyncMemory.open(tmp_path / "memory", engine) as memory:
            session = await memory.create()
            first = await session.ask("Which way?", n=3, **HOW)
            texts = await asyncio.gather(*(one.text() for one in (first, *first.others)))
            fork = await memory.session(first.others[0].session_id)
            # In this task, which owns none of the forks' locks.
            await (await fork.ask("And then?", max_tokens=2)).text()
            return list(texts)

    assert len(set(asyncio.run(main()))) == 3
