"""What a notebook shows, by IPython's own formatter: tables, short, and all of it escaped."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from ctxreuse_agents import Memory, NewTurn
from IPython.core.formatters import DisplayFormatter

BAD = "<script>alert('x')</script>&\x1b[31m"


class Cells(HTMLParser):
    """The texts of a table's cells; fails for tags that are none of a table's."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td"), tag
        assert all(name == "colspan" for name, _ in attrs)
        self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


@pytest.fixture
def shown() -> Callable[[object], Cells]:
    formatter = DisplayFormatter()  # type: ignore[no-untyped-call]

    def show(value: object) -> Cells:
        made, _ = formatter.format(value)
        assert len(made["text/plain"]) < 2000
        return Cells(made["text/html"])

    return show


def test_a_memory_and_its_sessions_are_tables(memory: Memory, shown: Callable[[object], Cells]) -> None:
    for n in range(25):
        memory.create(f"s{n} <b>", namespace="ann & co", pin=n == 24)
    cells = shown(memory).cells
    assert "s24 <b>" in cells
    assert "ann & co" in cells
    assert "yes" in cells
    assert any("the last changed 20 of 25 sessions" in cell for cell in cells)
    session = memory.create("a", turns=[NewTurn("user", BAD), NewTurn("user", "long " * 10_000)])
    cells = shown(session).cells
    assert "<script>alert('x')</script>& [31m" in cells
    assert max(map(len, cells)) < 400
    assert len(repr(session.turns()[1])) < 100


def test_a_diff_and_what_is_recalled_are_tables(memory: Memory, shown: Callable[[object], Cells]) -> None:
    session = memory.create("a", turns=[NewTurn("user", "bird")])
    fork = session.fork()
    fork.user(f"fork {BAD}")
    session.user("more")
    cells = shown(session.diff(fork)).cells
    assert cells[1].startswith("shared up to turn")
    assert "here" in cells
    assert "there" in cells
    assert "words" in shown(memory.recall("birds")).cells


def test_usage_and_why_are_tables(asked: Memory, shown: Callable[[object], Cells]) -> None:
    session = asked.create("a")
    answer = session.ask("What is my dog called?", max_tokens=2)
    assert answer.text is not None
    cells = shown(answer.usage).cells
    assert "prompt tokens" in cells
    cells = shown(session.why()).cells
    assert any("tokens reused" in cell for cell in cells)
