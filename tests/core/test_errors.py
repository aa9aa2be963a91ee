"""Errors: one tree, three parts, and nothing lost on the way through a process pool."""

from __future__ import annotations

import pickle

import pytest

import ctxreuse.errors as errors
from ctxreuse.errors import CtxReuseError

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_survive_pickling(kind: type[CtxReuseError]) -> None:
    error = kind("no room", where="disk 1", fix="Delete something")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.fix, str(copy)) == ("no room", "disk 1", "Delete something", str(error))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "no room"),
        ({"where": "disk 1"}, "no room (disk 1)"),
        ({"fix": "Delete"}, "no room. Delete"),
        ({"where": "disk 1", "fix": "Delete"}, "no room (disk 1). Delete"),
    ],
)
def test_message(parts: dict[str, str], text: str) -> None:
    assert str(CtxReuseError("no room", **parts)) == text


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = next((kind.__name__ for kind in KINDS if kind.__name__ in line.split()), None)
        if name is None:
            continue
        indent = line.index(name)
        while stack and stack[-1][0] >= indent:
            stack.pop()
        drawn[name] = stack[-1][1] if stack else "Exception"
        stack.append((indent, name))
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in KINDS}
