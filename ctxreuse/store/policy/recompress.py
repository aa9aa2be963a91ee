"""Which stored values are encoded smaller, and at which level, before any is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxreuse.block.format import Kind
from ctxreuse.block.levels import EXACT, PACKED, is_exact

__all__ = ["Candidate", "Step", "choose", "smaller_levels"]


class Candidate(NamedTuple):
    """A value that might shrink, and the smallest lossy level that its owner allows ("": none).

    ``stiff``: levels at which it was no smaller.
    """

    kind: Kind
    key: bytes
    level: str
    nbytes: int
    lossy: str
    stiff: tuple[str, ...] = ()


class Step(NamedTuple):
    """One value to encode at the level ``to``; ``frees``: the expected gain in bytes."""

    candidate: Candidate
    to: str
    frees: int


#: Expected size at a level as a share of the size at ``exact``; None: no codec can encode it.
Ratio = Callable[[str], float | None]


def smaller_levels(candidate: Candidate) -> tuple[str, ...]:
    """Return the levels below the candidate's own, best first: packed, then the lossy one.

    A lossy value stays as it is: encoded again, its error would be more than its level says.
    """
    if not is_exact(candidate.level):
        return ()
    packed = (PACKED,) if candidate.level == EXACT else ()
    ladder = (*packed, candidate.lossy) if candidate.lossy else packed
    return tuple(to for to in ladder if to not in candidate.stiff)


def choose(coldest: Iterable[Candidate], need: int, spared: int, ratio: Ratio) -> Sequence[Step]:
    """Choose steps that are expected to free ``need`` bytes, fewer if there are no more. Pure.

    Packing is lossless, so all candidates are packed before the first is coded lossily, and the last ``spared`` bytes,
    the most recently used, never are. A value takes at most one step.

    Args:
        coldest: values that may change, first to be evicted first.
        need: bytes.
        spared: bytes.
        ratio: expected sizes.
    """
    candidates = list(coldest)
    chosen: dict[tuple[Kind, bytes], Step] = {}
    freed = 0
    for lossy in (False, True):
        rest = sum(candidate.nbytes for candidate in candidates)
        for candidate in candidates:
            rest -= candidate.nbytes
            if freed >= need or (lossy and rest < spared):
                break
            before = chosen.get((candidate.kind, candidate.key))
            for to in smaller_levels(candidate):
                share, now = ratio(to), ratio(candidate.level)
                if is_exact(to) is lossy or share is None or not now:
                    continue
                step = Step(candidate, to, int(candidate.nbytes * (1 - share / now)))
                gain = step.frees - (before.frees if before is not None else 0)
                if gain > 0:
                    chosen[candidate.kind, candidate.key] = step
                    freed += gain
    return list(chosen.values())
