"""Which expert a cache follows, so that it is never much worse than the best of them: the rule and its proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

__all__ = ["EPSILON", "RegretGuard", "shortfall"]

#: How fast weights follow losses; see `RegretGuard`.
EPSILON = 0.2
#: The single experts' share of the first weights. With half of them, the random draw at each change of the greedy rule
#: gave the lead to a worse expert, for good, in one of three runs over an hour of traffic.
_SINGLES = 0.02


def shortfall(lost: float, room: float, experts: int) -> float:
    """Return the bound of `RegretGuard`: how far expected hits may be below those of an expert, at most.

    ``lost``: how much that expert hit less than the best one, request by request (so at most its misses); ``room``:
    the worth of a full cache.
    """
    return 4 * EPSILON * lost + 2 * room * math.log(experts / _SINGLES) / EPSILON


class RegretGuard:
    """Chooses among N single experts and one more: the greedy rule, which changes its choice at will.

    Worth is in any unit of which each block has some amount, such as tokens.

    *Claim.* For any trace that is fixed in advance, at any time and for each expert i, the expected worth of the
    cache's hits is at least ``H_i - shortfall(L_i, D, N)``: H_i are its hits, L_i the sum over requests of the best
    expert's hits less its own, D the worth of a full cache. The same holds with the greedy rule in the place of i,
    its changes charged as below, and 0.021 for the logarithm.

    *Proof.* (1) A change of leader costs at most what the new one holds and the cache does not, so at most D. For
    orphans (cached, but not by the leader) are evicted first. Both sets are closed towards the roots, so what lies
    below an orphan is an orphan and some orphan is a leaf; once none is left, the cache holds a part of what the leader
    holds, which fits. So nothing that the leader holds is ever evicted, and each block that was not cached is missed
    once. (2) Let l_i be by how much expert i hits less than the best single one in a request, ``0 <= l_i <= D``. For
    the greedy rule it is the loss of its leader, and when it changes that, what the new one holds and the old one does
    not: by (1), following it costs no more than that, at most 2 D a request. Weights start at 0.98 for the greedy rule
    and 0.02 / N for each single expert, and each request multiplies them by ``exp(-EPSILON * l_i / D)``. The expert
    that is followed is kept with just that probability and drawn again by weight otherwise (the shrinking dartboard of
    Geulen, Voecking and Winkler, COLT 2010); so at each moment it is i with probability ``w_i / sum w``, and its losses
    are Hedge's: in expectation at most ``(1 + 2 EPSILON)(L_i + D ln(1 / w_i) / EPSILON)`` with w_i the first weight.
    (3) It is drawn again at most ``EPSILON / D`` times its losses, in expectation, each of which costs D by (1): a
    factor ``1 + EPSILON``. With EPSILON <= 0.2 the product of both is below ``1 + 4 EPSILON`` and below 2. What the
    cache hits less than i is its losses less L_i. ∎

    It holds in the store as far as that evicts in this order (pins do not) and admits what was requested, and from
    when D is known, which is with the first block if blocks are alike.
    """

    #: The greedy rule's place among the experts.
    GREEDY = -1

    def __init__(self, experts: int, rng: Random) -> None:
        """``rng`` must be unpredictable for the source of the requests."""
        self._rng = rng
        self._logs = [math.log(_SINGLES / experts)] * experts + [math.log(1 - _SINGLES)]
        self.followed = self.GREEDY

    def note(self, hits: Sequence[float], greedy: int, charge: float, room: float) -> None:
        """Update weights after a request.

        ``hits``: the worth hit by each single expert; ``greedy``: the expert that the greedy rule followed meanwhile;
        ``charge``: the cost of its change after the request; ``room``: D.
        """
        best = max(hits)
        losses = [best - worth for worth in hits]
        losses.append(losses[greedy] + min(charge, room))
        shrunk = [EPSILON * loss / room if room > 0 else 0.0 for loss in losses]
        self._logs = [log - less for log, less in zip(self._logs, shrunk)]
        if self._rng.random() >= math.exp(-shrunk[self.followed]):
            self.followed = self._draw()

    def _draw(self) -> int:
        top = max(self._logs)
        self._logs = [log - top for log in self._logs]
        drawn = self._rng.choices(range(len(self._logs)), [math.exp(log) for log in self._logs])[0]
        return self.GREEDY if drawn == len(self._logs) - 1 else drawn

    @property
    def weights(self) -> list[float]:
        """The weight of each single expert, then of the greedy rule; they add up to 1."""
        top = max(self._logs)
        raw = [math.exp(log - top) for log in self._logs]
        return [one / sum(raw) for one in raw]

    def dump(self) -> list[float]:
        """Return the logarithms of the weights, for `restore`."""
        return [math.log(max(weight, 1e-300)) for weight in self.weights]

    def restore(self, logs: Sequence[float], followed: int, places: Sequence[int] | None = None) -> bool:
        """Restore a `dump` and the expert that was followed; False, with no change, for anything else.

        ``places``: where those experts are now, if there are more; the others keep their first weights.
        """
        places = range(len(self._logs) - 1) if places is None else places
        if len(logs) != len(places) + 1 or not all(-1e3 <= log <= 1e-6 for log in logs):
            return False
        if not self.GREEDY <= followed < len(places):
            return False
        for place, log in zip((*places, self.GREEDY), logs):
            self._logs[place] = log
        self.followed = followed if followed == self.GREEDY else places[followed]
        return True
