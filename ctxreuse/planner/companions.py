"""Which parts are requested together: what follows a shared beginning is ordered so that the next request shares it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Companions"]

# Parts that are remembered, and companions of each. Counted together this is 2 x 10^5 numbers at most.
_PARTS, _COMPANIONS = 2048, 96
#: Requests after which a share is believed by half and more.
_DOUBT = 3


class Companions:
    """Counts of parts requested together, of the parts that were requested last. Not thread-safe."""

    def __init__(self) -> None:
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._together: dict[bytes, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def scores(self, names: Sequence[bytes]) -> list[float]:
        """Return for each part how surely the others come with it: the sum of their shares of common requests."""
        doubt = [(name, 1 / (self._uses.get(name, 0) + _DOUBT)) for name in names]
        found = []
        for name in names:
            counts = self._together.get(name)
            found.append(sum(counts.get(other, 0) * weight for other, weight in doubt) if counts else 0.0)
        return found

    def note(self, names: Sequence[bytes]) -> None:
        """Count a request with these parts, all different."""
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + 1
            self._uses.move_to_end(name)
            counts = self._together.setdefault(name, {})
            for other in names:
                counts[other] = counts.get(other, 0) + 1
            del counts[name]
            if len(counts) > 2 * _COMPANIONS:
                best = sorted(counts.items(), key=lambda one: one[1])[-_COMPANIONS:]
                self._together[name] = dict(best)
        while len(self._uses) > _PARTS:
            del self._together[self._uses.popitem(last=False)[0]]
