"""What a notebook shows, by IPython's own formatter: tables, short, and all of it escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from ctxreuse_agents import Memory, NewTurn
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell

from ctxreuse.models.progress import bars

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


class Kernel(InteractiveShell):
    """IPython's shell as a kernel has it, which is none of a terminal's: what it displays is kept."""

    display_pub_class = CapturingDisplayPublisher


@pytest.fixture
def kernel() -> Iterator[list[dict[str, Any]]]:
    shell = Kernel.instance()
    yield shell.display_pub.outputs
    Kernel.clear_instance()


@pytest.mark.parametrize(("bytes_", "end"), [(True, "2.0 of 2.0 MB"), (False, "2000000 of 2000000")])
def test_what_is_fetched_has_a_bar_in_the_cell(
    kernel: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], bytes_: bool, end: str
) -> None:
    with bars(True, bytes_=bytes_) as bar:
        seen = bar("model <b>", 2_000_000)
        for so_far in range(0, 3_000_000, 1000):
            seen(so_far)
    first, *moves = kernel
    assert "value='0'" in first["data"]["text/html"]
    assert not first["update"]
    assert 90 <= len(moves) <= 100, "each move is a message"
    assert all(one["update"] and one["transient"] == first["transient"] for one in moves)
    assert moves[-1]["data"]["text/html"].startswith("model &lt;b&gt; <progress")
    assert moves[-1]["data"]["text/html"].endswith(end)
    assert capsys.readouterr().err == ""


def test_without_progress_and_outside_of_notebooks_no_cell_has_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bars(False) as bar:
        bar("model", 10)(10)
    assert capsys.readouterr().err == ""
    with bars(True) as bar:
        bar("model", 10)(10)
    assert "model" in capsys.readouterr().err
