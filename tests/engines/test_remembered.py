"""Texts that come again are encoded once."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.engines.remembered import _ENTRY, RememberedTexts


def _cut(text: bytes, how: str) -> str:
    return f"{how}{text!r}"[:4]


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=3), st.sampled_from("ab")), max_size=60), st.integers(0, 5))
def test_results_are_those_of_the_function_within_the_limit(calls: list[tuple[bytes, str]], room: int) -> None:
    memory = RememberedTexts[str](len, room * (_ENTRY + 4))
    for text, how in calls:
        assert memory.get(text, how, partial(_cut, text, how)) == _cut(text, how)
        assert memory._nbytes == sum(size for _, size in memory._found.values()) <= memory._limit


def test_what_was_used_last_stays() -> None:
    memory, made = RememberedTexts[str](len, 2 * (_ENTRY + 1)), list[bytes]()

    def get(text: bytes) -> None:
        def make() -> str:
            made.append(text)
            return "x"

        memory.get(text, "", make)

    for text in (b"a", b"b", b"a", b"c", b"a", b"b"):
        get(text)
    assert made == [b"a", b"b", b"c", b"b"]
