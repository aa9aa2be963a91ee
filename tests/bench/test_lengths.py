"""The replay of recorded turns: what repeats comes faster, what does not is hardly slower, and ends save rows."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lengths import ClassPolicy, Turn, replayed
from ctxreuse.speculate import DraftPolicy, PassCosts

END = frozenset({1})
STEEP, FLAT = (1.0, 1.5, 2.6, 5.0, 7.5, 12.0), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def turns_of(*, repeats: bool, answers: int = 12, length: int = 30) -> list[Turn]:
    rng = np.random.default_rng(0)
    said, history, made = rng.integers(3, 5000, length), rng.integers(3, 5000, 40), []
    for number in range(answers):
        answer = np.append(said if repeats else rng.integers(3, 40, length), 1).astype("<i4")
        made.append(Turn(history.astype("<i4"), answer, f"tool {number % 2}"))
        history = np.concatenate([history, answer, rng.integers(3, 5000, 12)])
    return made


@pytest.mark.parametrize("passes", [STEEP, FLAT], ids=["a row costs much", "a row costs nothing"])
@pytest.mark.parametrize("policy", [DraftPolicy, ClassPolicy])
def test_answers_that_repeat_come_faster_and_others_hardly_slower(
    passes: tuple[float, ...], policy: type[DraftPolicy]
) -> None:
    assert replayed(turns_of(repeats=True), passes, policy(PassCosts()), stops=END) > 1.4
    assert replayed(turns_of(repeats=False), passes, policy(PassCosts()), stops=END) > 0.97


def test_a_draft_that_ends_with_the_answer_costs_no_rows_behind_it() -> None:
    made = turns_of(repeats=True)
    cut = replayed(made, STEEP, DraftPolicy(PassCosts()), stops=END)
    assert cut > 1.02 * replayed(made, STEEP, DraftPolicy(PassCosts()), stops=frozenset())
    known = replayed(made, STEEP, DraftPolicy(PassCosts()), stops=END, known=True)
    assert cut == pytest.approx(known, rel=0.03)
