"""Scenes: every chunk lies where its source says, no source has it where it is used, no text is given out twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ctxreuse.calibrate.cases import KINDS, EvalCase, Shape, eval_cases
from ctxreuse.engines.text import Message

SHAPE = Shape(4, 32, following=24)


@pytest.fixture(scope="module")
def made(text: Any) -> list[EvalCase]:
    texts = [" ".join(f"{name}{i}" for i in range(400)) for name in ("one", "two", "three", "four", "five")]
    return eval_cases(texts, text, 4, SHAPE, block_tokens=16)


def test_sources_hold_what_they_say(made: list[EvalCase]) -> None:
    assert [case.mixed for case in made] == [False, True, False, True]
    for case in made:
        assert [len(chunk) for chunk in case.chunks] == [32] * 4
        assert len(case.following) == 24 + 2
        for kind in KINDS:
            held = {
                number: (sources.prompt, row) for sources in case.sources[kind] for number, row in sources.at.items()
            }
            assert sorted(held) == [0, 1, 2, 3]
            for number, (prompt, row) in held.items():
                assert len(prompt) % 16 == 0
                assert (prompt[row : row + 32] == case.chunks[number]).all()
                assert (row == 0) == (kind == "head")


def test_a_chunk_at_the_head_stood_behind_the_mark_that_the_model_begins_with(text: Any) -> None:
    class Marked:
        def __getattr__(self, name: str) -> Any:
            return getattr(text, name)

        def render(self, messages: Sequence[Message], **options: Any) -> str:
            return "#" + str(text.render(messages, **options))

    marked: Any = Marked()
    (case,) = eval_cases([" ".join(map(str, range(900)))], marked, 1, SHAPE, block_tokens=16)
    mark = marked.encode("#")
    for source in case.sources["head"]:
        assert list(source.at.values()) == [len(mark)]
        assert (source.prompt[: len(mark)] == mark).all()


def test_no_chunk_had_its_own_beginning_before_it(made: list[EvalCase]) -> None:
    for case in made:
        whole = case.tokens
        for sources in case.sources["behind"]:
            for number, row in sources.at.items():
                at = case.start(number)
                assert (whole[at : at + 32] == case.chunks[number]).all()
                assert (sources.prompt[row - 8 : row] != whole[at - 8 : at]).any()


def test_what_follows_goes_on_from_the_last_chunk(made: list[EvalCase], text: Any) -> None:
    for case in made:
        said = text.decode(np.concatenate([case.chunks[-1], case.following]).tolist())
        words = said.split()[1:-1]
        numbers = [int("".join(c for c in word if c.isdigit())) for word in words]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_mixed_scenes_are_of_several_documents(made: list[EvalCase], text: Any) -> None:
    names = [{text.decode(chunk.tolist()).split()[1].rstrip("0123456789") for chunk in case.chunks} for case in made]
    assert [len(found) for found in names] == [1, 4, 1, 4]


def test_text_runs_out(text: Any) -> None:
    assert eval_cases(["too short"], text, 3, SHAPE, 16) == []
    words = " ".join(map(str, range(300)))
    assert len(eval_cases([words, words], text, 100, SHAPE, 16)) < 20
