"""Tests that need a GPU: deselected where there is none, and the summary says so."""

from __future__ import annotations

from functools import cache

import pytest

from ctxreuse.cuda import Launcher, missing, open_device

_left_out: list[str] = []


@cache
def why_not() -> str:
    return missing()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and why_not():
        config.hook.pytest_deselected(items=marked)
        _left_out.extend(item.nodeid for item in marked)
        items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"{len(_left_out)} GPU tests did not run: {why_not()}", yellow=True)


@pytest.fixture(scope="session")
def device() -> Launcher:
    return open_device()
