"""The native suffix index against a list that is searched, and its bounds under hostile texts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError
from ctxreuse.speculate import SuffixIndex
from oracle.suffix import SlowSuffixIndex
from support.examples import examples

#: All texts together fit into the steps of one chain, so that the search is the list's whatever the hashes are.
_TEXTS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.booleans()), max_size=4)


def int32(ids: list[int]) -> np.ndarray:
    return np.array(ids, "<i4")


@examples("light")
@given(texts=_TEXTS, tail=st.lists(st.integers(0, 3), max_size=70), count=st.integers(0, 20), filled=st.booleans())
def test_drafts_are_those_of_a_search(
    texts: list[tuple[list[int], bool]], tail: list[int], count: int, filled: bool
) -> None:
    index, slow = SuffixIndex(1024), SlowSuffixIndex(1024)
    if filled:  # the ring is written over, and no token of it is in the texts
        for one in (index, slow):
            one.add(int32(list(range(10, 1500))) if one is index else list(range(10, 1500)))
    for ids, begins in texts:
        index.add(int32(ids), begins=begins)
        slow.add(ids, begins=begins)
        assert index.newest(2000).tolist() == slow.tokens
    for end in (tail, [*(texts[-1][0] if texts else []), *tail[:2]]):
        found = index.draft(int32(end), count)
        ids, shares, matched = slow.draft(end, count)
        assert found.ids.tolist() == ids
        assert found.shares == pytest.approx(shares)
        assert found.matched == matched
    index.check()


@examples("normal")
@given(
    seed=st.integers(0, 1 << 20),
    alphabet=st.sampled_from([1, 2, 5, 50]),
    sizes=st.lists(st.integers(0, 900), max_size=12),
)
def test_what_is_drafted_was_said(seed: int, alphabet: int, sizes: list[int]) -> None:
    rng, index, slow = np.random.default_rng(seed), SuffixIndex(2048), SlowSuffixIndex(2048)
    for size in sizes:
        ids = rng.integers(0, alphabet, size).astype("<i4")
        index.add(ids)
        slow.add(ids.tolist())
        index.check()
        tail = ids[: size // 2][-70:]
        found = index.draft(tail, 16)
        assert len(found.ids) <= 16
        if len(found.ids):
            joined = slow.tokens[-8:] == tail[-8:].tolist()  # it goes on with what repeats itself at the end
            said = ",".join(map(str, [*slow.tokens, *(found.ids.tolist() if joined else ())]))
            run = ",".join(map(str, [*tail[-3:].tolist(), *found.ids.tolist()]))
            assert f",{run}," in f",{said},"
            assert 3 <= found.matched <= 64


def test_repetition_costs_no_more_time_than_other_text() -> None:
    """One token a million times: all places are in one chain."""
    index = SuffixIndex(1 << 20)
    index.add(np.zeros(1 << 20, "<i4"))
    tail, began = np.zeros(64, "<i4"), time.thread_time()
    for _ in range(200):
        assert len(index.draft(tail, 32).ids) == 32
    assert time.thread_time() - began < 0.2  # 20 to 50 µs each
    assert index.nbytes <= 20 * index.most + (1 << 16)


def test_hostile_texts_do_not_fill_the_chains_of_others() -> None:
    """Slots are salted: texts made to fall into one chain of this index fall into all of another."""
    own = np.arange(100, 200, dtype="<i4")
    for _ in range(4):
        index = SuffixIndex(1 << 16)
        index.add(own)
        index.add(np.tile(np.arange(3, dtype="<i4"), 20_000))
        assert index.draft(own[:50], 20).ids.tolist() == own[50:70].tolist()


def test_what_no_index_takes() -> None:
    with pytest.raises(ConfigError, match="1000 tokens"):
        SuffixIndex(1000)
    index = SuffixIndex(1024)
    with pytest.raises(ValueError, match="0 or more"):
        index.add(int32([1, -1]))
    assert len(index) == 0
    assert len(index.draft(int32([]), 5).ids) == 0
    assert len(index.newest(5)) == 0
