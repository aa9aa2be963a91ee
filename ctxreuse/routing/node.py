"""What waits at one node, and how much of the time it computes prompts."""

from __future__ import annotations

import math

from ctxreuse.cost.lines import PrefillLine

__all__ = ["NodeLoad"]

#: Seconds over which the busy share of a node is averaged, and after which what was measured of its speed is doubted.
_BUSY_SECONDS = 600.0
#: Seconds before which nothing is known of that share: what was seen counts as a part of so many.
_BEGINNING = 60.0
#: Weight of a new measurement of a node's speed, and how much slower or faster than others it may be.
_NEW, _MOST = 0.2, math.log(8)
#: What is left of what waits have taken when the next one is known, and how much longer or shorter than expected they
#: may be. One wait says little: answers, or an order of the node's own, may have caused it.
_KEPT_WAIT, _MOST_WAIT = 0.95, 4.0
#: Waits as expected that are taken to have been seen before the first one.
_FIRST_WAITS = 5.0
#: Seconds of a token and of a token with one before it, before anything was measured: only ratios matter then.
_GUESS = (1e-4, 1e-8)


class NodeLoad:
    """The requests of one node that have no first token yet, in the order in which they were sent. Not thread-safe.

    The node is taken to compute one prompt after another, so what waits is the sum of what they take, less what has
    passed since the one at the head began. One that is late is expected to take as long again as it is late. Nodes are
    not quite like that (tokens of answers are computed between prompts), so the sum is multiplied by what waits have
    turned out to be.
    """

    def __init__(self, prefill: PrefillLine) -> None:
        """``prefill``: seconds of a prompt, fitted to what was measured at all nodes."""
        self._prefill = prefill
        self._waiting: dict[int, float] = {}
        #: Those that say nothing before they have ended: they cannot be late.
        self._silent: set[int] = set()
        self._since = 0.0
        #: Seconds in which requests waited, older ones for less; until when that is; when the first one came.
        self._busy, self._noted, self._first = 0.0, 0.0, math.inf
        #: Logarithm of how much slower than the line it is, and when that was measured.
        self._slower, self._measured = 0.0, 0.0
        #: When each request that waits was sent, and how long it would wait if prompts before it were all.
        self._expected: dict[int, tuple[float, float]] = {}
        #: Seconds that requests should have waited, and have, older ones for less.
        self._should, self._have = 0.0, 0.0

    def seconds(self, tokens: int, cached: int, now: float) -> float:
        """Return what computing ``tokens`` behind ``cached`` ones takes. A node that was slow is given another chance
        after some minutes: it would never be measured again otherwise."""
        doubt = math.exp(-max(now - self._measured, 0.0) / _BUSY_SECONDS)
        return self._line(tokens, cached) * math.exp(self._slower * doubt)

    @property
    def knows_speed(self) -> bool:
        """False before anything was measured anywhere: only ratios of `seconds` mean something then."""
        return len(self._prefill) > 0

    def _line(self, tokens: int, cached: int) -> float:
        known = self._prefill.seconds(tokens, cached) if len(self._prefill) else None
        return known if known is not None else tokens * (_GUESS[0] + _GUESS[1] * (cached + tokens / 2))

    def measure(self, tokens: int, cached: int, seconds: float, now: float) -> None:
        """Learn from a prompt that waited for nothing."""
        if self.knows_speed and seconds > 0:
            ratio = math.log(seconds / max(self._line(tokens, cached), 1e-9))
            self._slower += _NEW * (min(max(ratio, -_MOST), _MOST) - self._slower)
            self._measured = now
        self._prefill.observe(tokens, cached, seconds)

    def measure_wait(self, request: int, now: float) -> None:
        """Learn from the first token of a request that waited for others, before its `end`."""
        sent, should = self._expected.get(request, (now, 0.0))
        if should:
            have = max(now - sent - self._waiting[request], 0.0)
            if not self._should:
                self._should = self._have = _FIRST_WAITS * should
            self._should = _KEPT_WAIT * self._should + should
            self._have = _KEPT_WAIT * self._have + have

    def queue(self, now: float) -> float:
        """Return the seconds until a request that is sent now begins. Pure."""
        longer = self._have / self._should if self._should else 1.0
        return self._prompts(now) * min(max(longer, 1 / _MOST_WAIT), _MOST_WAIT)

    def _prompts(self, now: float) -> float:
        """Return the seconds that the prompts before take."""
        if not self._waiting:
            return 0.0
        whole = sum(self._waiting.values())
        if not self.knows_speed:
            return whole  # nothing says how long a token takes: by a guess, everything would be late soon
        number, head = next(iter(self._waiting.items()))
        passed = max(now - self._since, 0.0)
        late = 0.0 if number in self._silent else max(passed - head, 0.0)
        return whole - min(passed, head) + late

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return len(self._waiting)

    def begin(self, request: int, seconds: float, now: float, *, silent: bool = False) -> None:
        """Note a request that was sent, and what computing its prompt will take; ``silent``: its answer comes whole."""
        self._note(now)
        if not self._waiting:
            self._since = now
        elif self.knows_speed:
            self._expected[request] = now, self._prompts(now)
        self._waiting[request] = seconds
        if silent:
            self._silent.add(request)

    def end(self, request: int, now: float) -> None:
        """Note a first token, or that none comes."""
        self._note(now)
        self._silent.discard(request)
        self._expected.pop(request, None)
        if self._waiting.pop(request, None) is not None:
            self._since = now

    def busy(self, now: float) -> float:
        """Return the share of the last minutes, 0 to 1, in which requests waited for their first token."""
        known = max(_remembered(now - self._first), _remembered(_BEGINNING))
        return min(self._waited(now) / known, 1.0)

    def _waited(self, now: float) -> float:
        passed = max(now - self._noted, 0.0)
        return self._busy * math.exp(-passed / _BUSY_SECONDS) + (_remembered(passed) if self._waiting else 0.0)

    def _note(self, now: float) -> None:
        self._busy, self._noted, self._first = self._waited(now), max(now, self._noted), min(now, self._first)


def _remembered(seconds: float) -> float:
    """What the last ``seconds`` count for, of all that ever was."""
    return -_BUSY_SECONDS * math.expm1(-max(seconds, 0.0) / _BUSY_SECONDS)
