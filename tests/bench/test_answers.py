"""Bench answers: several answers of one prefill hold its prompt once."""

import numpy as np

from benchmarks.answers import measure, one_by_one
from support.tiny_text import tiny_engine


def test_eight_answers_take_little_more_memory_than_one() -> None:
    engine = tiny_engine()
    prompt = np.random.default_rng(0).integers(0, 256, 1200).astype("<i4")
    many, one = (measure(engine, prompt, answers, 4) for answers in (8, 1))
    assert 0 < many.first <= many.whole
    assert one.memory < many.memory < 3 * one.memory
    assert one_by_one(engine, prompt, 2, 4) > 0
