"""Whom a cache follows, so that it is never much worse than any of its contenders: the rule and its proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

__all__ = ["EPSILON", "Guard", "shortfall"]

#: How eagerly weights follow losses; see `Guard`.
EPSILON = 0.2
#: The contenders' share of the first weights. With half of them, the coin that each change of mind of the swift rule
#: throws gave the lead to a worse contender, for good, in one of three runs over an hour of traffic.
_DOUBT = 0.02


def shortfall(lost: float, room: float, contenders: int) -> float:
    """The bound of `Guard`: what a duel's expected hits may be below those of a contender, at most.

    ``lost``: how much that contender hit less than the best one did, request by request (so at most its misses);
    ``room``: what a full cache is worth.
    """
    return 4 * EPSILON * lost + 2 * room * math.log(contenders / _DOUBT) / EPSILON


class Guard:
    """Chooses among N contenders and one more expert: the swift rule, which changes its mind as it likes.

    Worth is in any unit of which each block has some amount, such as tokens.

    *Claim.* For any trace that is fixed in advance, at any time and for each contender i, the expected worth of the
    cache's hits is at least ``H_i - shortfall(L_i, D, N)``: H_i are its hits, L_i the sum over requests of the best
    contender's hits less its own, D the worth of a full cache. The same holds with the swift rule in the place of i,
    its changes of mind charged as below, and 0.021 for the logarithm.

    *Proof.* (1) A change of leader costs at most what the new one holds and the cache lacks, so at most D. For strays
    (held, but not by the leader) are evicted first. Both sets are closed towards the roots, so what lies below a stray
    is stray and some stray is a leaf; once none is left, the cache holds a part of what the leader holds, which fits.
    So nothing that the leader holds is ever evicted, and each block that was lacking is missed once.
    (2) Let l_i be by how much expert i hits less than the best contender in a request, ``0 <= l_i <= D``. For the
    swift rule it is the loss of its leader, and when it changes that, what the new one holds and the old one does not:
    by (1), who follows it pays no more than that, at most 2 D a request. Weights start at 0.98 for the swift rule and
    0.02 / N for each contender, and each request multiplies them by ``exp(-EPSILON * l_i / D)``. The expert that is
    followed is kept with just that probability and drawn anew by weight otherwise (the shrinking dartboard of Geulen,
    Voecking and Winkler, COLT 2010); so at each moment it is i with probability ``w_i / sum w``, and its losses are
    Hedge's: in expectation at most ``(1 + 2 EPSILON)(L_i + D ln(1 / w_i) / EPSILON)`` with w_i the first weight.
    (3) It is drawn anew at most ``EPSILON / D`` times its losses, in expectation, each of which costs D by (1): a
    factor ``1 + EPSILON``. With EPSILON <= 0.2 the product of both is below ``1 + 4 EPSILON`` and below 2. What the
    cache hits less than i is its losses less L_i. ∎

    It holds in the store as far as that evicts in this order (pins do not) and takes in what was asked, and from when
    D is known, which is with the first block if blocks are alike.
    """

    #: The swift rule's place among the experts.
    SWIFT = -1

    def __init__(self, contenders: int, rng: Random) -> None:
        """``rng`` must not be known to whoever makes the requests."""
        self._rng = rng
        self._logs = [math.log(_DOUBT / contenders)] * contenders + [math.log(1 - _DOUBT)]
        self.followed = self.SWIFT

    def note(self, hits: Sequence[float], swift: int, charge: float, room: float) -> None:
        """A request was hit to these worths, one a contender; ``swift`` is whom the swift rule followed meanwhile,
        ``charge`` what its change of mind after it costs, ``room`` D."""
        best = max(hits)
        losses = [best - worth for worth in hits]
        losses.append(losses[swift] + min(charge, room))
        shrunk = [EPSILON * loss / room if room > 0 else 0.0 for loss in losses]
        self._logs = [log - less for log, less in zip(self._logs, shrunk)]
        if self._rng.random() >= math.exp(-shrunk[self.followed]):
            self.followed = self._draw()

    def _draw(self) -> int:
        top = max(self._logs)
        self._logs = [log - top for log in self._logs]
        drawn = self._rng.choices(range(len(self._logs)), [math.exp(log) for log in self._logs])[0]
        return self.SWIFT if drawn == len(self._logs) - 1 else drawn

    @property
    def weights(self) -> list[float]:
        """Each contender's weight, then the swift rule's; they add up to 1."""
        top = max(self._logs)
        raw = [math.exp(log - top) for log in self._logs]
        return [one / sum(raw) for one in raw]

    def dump(self) -> list[float]:
        """What was learnt, for `restore`."""
        return [math.log(max(weight, 1e-300)) for weight in self.weights]

    def restore(self, logs: Sequence[float], followed: int) -> bool:
        """Go on from a dump and from who was followed; False (and no change) for what is none."""
        if len(logs) != len(self._logs) or not all(-1e3 <= log <= 1e-6 for log in logs):
            return False
        if not self.SWIFT <= followed < len(logs) - 1:
            return False
        self._logs, self.followed = list(logs), followed
        return True
