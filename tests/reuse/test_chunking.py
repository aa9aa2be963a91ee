"""Chunks cover a prompt, keep to their sizes, and are the same wherever the same tokens stand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse.chunking import LEAST, MOST, REACH, Chunk, chunks
from support.calls import calls_of
from support.examples import examples


def text(seed: int, n: int, words: int = 5000) -> Tokens:
    """Token ids as natural text has them: few are frequent, most are rare."""
    rng = np.random.default_rng(seed)
    return (rng.zipf(1.2, n) % words).astype("<i4")


seeds = st.integers(0, 1 << 32)
lengths = st.integers(0, 3000)
#: How many ids there are: from one token again and again to ones that never come twice.
vocabularies = st.sampled_from([1, 2, 3, 10, 300, 50_000])


def contents(tokens: Tokens, found: list[Chunk]) -> list[bytes]:
    return [tokens[a:b].tobytes() for a, b in found]


@examples("light")
@given(seeds, lengths, vocabularies, st.lists(st.integers(-5, 3100), max_size=12))
def test_they_cover_the_prompt_and_keep_to_their_sizes(seed: int, n: int, words: int, parts: list[int]) -> None:
    tokens = text(seed, n, words)
    found = chunks(tokens, parts)
    assert [a for a, _ in found] == [0, *(b for _, b in found)][: len(found)]
    assert (found[-1].end if found else 0) == n
    borders = sorted({0, n, *(at for at in parts if 0 < at < n)})
    ends = {0, *(b for _, b in found)}
    assert set(borders) <= ends
    for start, end in pairwise(borders):
        sizes = [b - a for a, b in found if start <= a and b <= end]
        assert sum(sizes) == end - start
        assert all(size <= MOST for size in sizes)
        assert all(size >= LEAST for size in sizes) or sizes == [end - start]


@examples("normal")
@given(seeds, seeds, seeds, lengths, lengths, lengths)
def test_a_part_is_cut_alike_wherever_it_stands(one: int, two: int, three: int, a: int, b: int, c: int) -> None:
    before, part, after = text(one, a), text(two, b), text(three, c)
    alone = chunks(part)
    within = chunks(np.concatenate([before, part, after]), [a, a + b])
    assert [Chunk(x - a, y - a) for x, y in within if a <= x and y <= a + b and x < y] == alone


@examples("normal")
@given(seeds, seeds, seeds, lengths, st.integers(600, 3000), lengths)
def test_unmarked_it_is_cut_alike_but_for_its_ends(one: int, two: int, three: int, a: int, b: int, c: int) -> None:
    before, part, after = text(one, a, 50_000), text(two, b, 50_000), text(three, c, 50_000)
    alone = {chunk for chunk in chunks(part) if chunk.start >= REACH and chunk.end <= b - REACH}
    within = {Chunk(x - a, y - a) for x, y in chunks(np.concatenate([before, part, after]))}
    # What is forced beside an end may differ; between two cuts of its own nothing does.
    assert len(alone - within) <= sum(y - x > MOST // 2 for x, y in alone)


@examples("light")
@given(
    seed=seeds,
    n=st.integers(200, 3000),
    where=st.floats(0, 1),
    lost=st.integers(0, 300),
    new=st.integers(0, 300),
)
def test_an_edit_changes_no_chunk_far_from_it(seed: int, n: int, where: float, lost: int, new: int) -> None:
    """Insert, delete or replace anywhere: cuts beyond the reach of the edit are where they were."""
    tokens = text(seed, n, 50_000)
    at = int(where * n)
    until = min(n, at + lost)
    edited = np.concatenate([tokens[:at], text(seed + 1, new, 50_000), tokens[until:]])
    moved = new - (until - at)
    was, now = chunks(tokens), chunks(edited)
    # Cuts that are forced hang on the cut before them; pieces of such a stretch are longer than that.
    assume(all(b - a < MOST // 2 for a, b in [*was, *now]))
    before = {b for _, b in was if b < at - REACH}
    behind = {b + moved for _, b in was if b > until + REACH}
    ends = {b for _, b in now}
    assert {b for b in ends if b < at - REACH} == before
    assert {b for b in ends if b > at + new + REACH} == behind


def test_most_of_a_document_survives_many_edits() -> None:
    tokens = text(1, 20_000)
    rng = np.random.default_rng(2)
    edited = tokens.copy()
    places = rng.choice(20_000, 20, replace=False)
    edited[places] = rng.integers(5000, 6000, 20)
    was, now = set(contents(tokens, chunks(tokens))), set(contents(edited, chunks(edited)))
    shared = sum(len(chunk) for chunk in was & now) / tokens.nbytes
    assert shared > 1 - 20 * 2.2 * 65 / 20_000  # each edit costs the chunk it is in, and its neighbour now and then


@pytest.mark.parametrize("words", [300, 5000, 50_000])
def test_usual_sizes(words: int) -> None:
    sizes = np.array([b - a for a, b in chunks(text(3, 65_000, words))])
    assert 55 < sizes.mean() < 80
    assert (sizes < 128).mean() > 0.9


def test_one_token_again_and_again_is_cut_at_most() -> None:
    found = chunks(np.full(2000, 7, "<i4"))
    assert [b - a for a, b in found[:-2]] == [MOST] * (len(found) - 2)


def test_ids_at_the_ends_of_their_range() -> None:
    tokens = np.array([0, 0x7FFFFFFF] * 500, "<i4")
    assert chunks(tokens)[-1].end == 1000
    assert chunks(tokens[:1]) == [(0, 1)]
    assert chunks(tokens[:0], [0, 1, -1]) == []


def test_many_parts_cost_no_more_than_their_number() -> None:
    tokens = text(5, 32_768)
    assert len(chunks(tokens, range(32_768))) == 32_768  # each token a part
    few, many = (calls_of(lambda n=n: chunks(tokens[:n], range(0, n, 8))) for n in (8_192, 32_768))
    assert many < 4.5 * few
