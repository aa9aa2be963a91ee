"""Bench router_live: its own rules, what it reads of answers, and what it says."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import router_live
from benchmarks.router_live import OURS, SIMPLE, Seen, Workers, chats, figures, talk
from support.scripted import USAGE, Scripted
from support.waiting import patient


def turn(system: str, *more: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in more)]


@pytest.mark.parametrize("rule", SIMPLE)
def test_rules_choose_as_they_say(rule: str) -> None:
    workers = Workers(["a", "b", "c"], rule)
    first = [workers.choose(turn(f"{n} " * 600, "Hello.")) for n in range(3)]
    if rule == "random":
        assert set(first) <= {0, 1, 2}
        return
    assert sorted(first) == [0, 1, 2], "all are as idle and know as little"
    workers.ended(1)
    again = workers.choose(turn("2 " * 600, "Hello.", "And now?"))
    assert workers.url(again) == {"round robin": "a", "least load": "b", "longest prefix": "abc"[first[2]]}[rule]


def test_all_chats_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_live, "_PAUSE", 0.0)
    given = chats(7, 2, 3)
    assert given == chats(7, 2, 3)
    assert len({system for system, _ in given}) < 7, "beginnings are shared"

    async def test() -> tuple[list[Seen], int]:
        async with Scripted("a") as a, Scripted("b") as b:
            seen = await talk(Workers([a.url, b.url], SIMPLE[0]), given, 3, "m")
            return seen, len(a.seen)

    seen, of_one = asyncio.run(asyncio.wait_for(test(), patient(20)))
    assert (len(seen), of_one) == (14, 7)
    assert all(one.first > 0 and one.prompt == USAGE["prompt_tokens"] and one.cached == 16 for one in seen)


def test_figures_name_the_best_other() -> None:
    found = {OURS: [Seen(1.0, 100, 90)], **{rule: [Seen(2.0 + n, 100, 50 + n)] for n, rule in enumerate(SIMPLE)}}
    mean, most, reused = figures(found)
    for figure in (mean, most):
        assert (figure.value, figure.baseline, figure.peer, figure.bar, figure.passed) == (1.0, 2.0, 2.0, 2.0, True)
        assert figure.note.startswith(f"peer: {SIMPLE[0]};")
    assert (reused.value, reused.baseline, reused.peer) == (90.0, 50.0, 53.0)
