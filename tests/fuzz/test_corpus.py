"""Each parser holds its invariant for valid inputs, for those that once broke it, and for mutations of both."""

from __future__ import annotations

from random import Random

import pytest

from support.examples import scale
from support.fuzz.targets import CORPUS, TARGETS, Finding, Target, seeds

_SLOW = pytest.mark.slow


@pytest.fixture(params=[pytest.param(name, marks=_SLOW) if TARGETS[name].slow else name for name in TARGETS])
def target(request: pytest.FixtureRequest) -> Target:
    """A target whose imports and tables are there already."""
    found = TARGETS[request.param]
    for data in seeds(found).values():
        try:
            found.run(data)
        except found.refusals:
            pass
    return found


def test_the_corpus_is_accepted_or_refused(target: Target) -> None:
    outcomes = {name: target.check(data) for name, data in seeds(target).items()}
    assert "accepted" in outcomes.values(), outcomes


def test_mutations_are_accepted_or_refused(target: Target) -> None:
    corpus, chance = list(seeds(target).values()), Random(0)
    for n in range(scale(60 if target.slow else 400)):
        data = target.mutate(chance.choice(corpus), chance.choice(corpus), chance)
        try:
            target.check(data)
        except Finding as error:
            raise AssertionError(f"mutation {n}: {error}; the input is {data[:2000]!r}") from error


def test_every_folder_of_the_corpus_has_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= set(TARGETS)
