"""One order of turns from two: by their words and by their vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Ranked", "fuse"]

#: What the nearest vector counts beside the best of the words, and the cosine from which a turn is found by its vector
#: alone. Chosen on 423 questions on a year of chats (bench recall), where ranks in place of scores found less than the
#: words alone.
WEIGHT, LEAST = 0.3, 0.2


class Ranked(NamedTuple):
    """A turn, its score, and its rank and score by words and by vectors; a rank of 0: not found by that."""

    turn: int
    score: float
    words: tuple[int, float]
    vectors: tuple[int, float]


def fuse(
    words: Sequence[tuple[int, float]], vectors: Sequence[tuple[int, float]], cosines: Mapping[int, float]
) -> list[Ranked]:
    """Return the turns that either found, best first.

    Args:
        words: turns and their BM25 scores, best first.
        vectors: turns and their cosines, best first.
        cosines: of the turns that the words found, as far as they have vectors.
    """
    best = max((score for _, score in words), default=0.0)
    nearest = max((cosine for _, cosine in vectors), default=0.0)
    by_words = {turn: (rank, score) for rank, (turn, score) in enumerate(words, 1)}
    by_vectors = {turn: (rank, cosine) for rank, (turn, cosine) in enumerate(vectors, 1)}
    found = []
    for turn in by_words | {turn: None for turn, cosine in vectors if cosine >= LEAST}:
        _, score = one = by_words.get(turn, (0, 0.0))
        _, cosine = two = by_vectors.get(turn, (0, cosines.get(turn, 0.0)))
        total = (score / best if best > 0 else 0.0) + (WEIGHT * max(cosine, 0.0) / nearest if nearest > 0 else 0.0)
        found.append(Ranked(turn, total, one, two))
    return sorted(found, key=lambda one: (-one.score, -one.turn))
