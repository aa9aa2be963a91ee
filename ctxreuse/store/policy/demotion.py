"""Which values are encoded smaller, and how far, before anything has to be evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxreuse.levels import EXACT, PACKED, is_exact
from ctxreuse.store.base import Kind

__all__ = ["Candidate", "Step", "choose", "rungs"]


class Candidate(NamedTuple):
    """A value that might shrink: its level, its bytes, and the worst level that its owner allows ("": exact only).

    ``stiff``: levels at which it was found to take no fewer bytes.
    """

    kind: Kind
    key: bytes
    level: str
    nbytes: int
    lossy: str
    stiff: tuple[str, ...] = ()


class Step(NamedTuple):
    """One value to encode at the level ``to``; ``frees``: bytes that this is expected to give."""

    candidate: Candidate
    to: str
    frees: int


#: Expected size at a level as a share of the size at ``exact``; None: such a level cannot be made here.
Ratio = Callable[[str], float | None]


def rungs(candidate: Candidate) -> tuple[str, ...]:
    """Levels below the candidate's own, best first: packed, then the worst that its owner allows.

    What was coded lossily stays as it is: coded again, it would be damaged twice and say so once.
    """
    if not is_exact(candidate.level):
        return ()
    packed = (PACKED,) if candidate.level == EXACT else ()
    ladder = (*packed, candidate.lossy) if candidate.lossy else packed
    return tuple(to for to in ladder if to not in candidate.stiff)


def choose(coldest: Iterable[Candidate], need: int, spared: int, ratio: Ratio) -> Sequence[Step]:
    """Steps that are expected to free ``need`` bytes, fewer if there are no more. Pure.

    ``coldest``: what may change, first to go first. Packing costs no accuracy, so all of it is packed before the first
    is coded lossily, and the last ``spared`` bytes of it, the most recently used, never are. A value takes one step at
    most: straight to the rung that it ends on.
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
            for to in rungs(candidate):
                share, now = ratio(to), ratio(candidate.level)
                if is_exact(to) is lossy or share is None or not now:
                    continue
                step = Step(candidate, to, int(candidate.nbytes * (1 - share / now)))
                gain = step.frees - (before.frees if before is not None else 0)
                if gain > 0:
                    chosen[candidate.kind, candidate.key] = step
                    freed += gain
    return list(chosen.values())
