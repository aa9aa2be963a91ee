"""How many tokens of a prefill go with tokens that others decode: as many as their step may be made longer for."""

from __future__ import annotations

from collections import deque

__all__ = ["AIM", "FIRST_SLICE", "LARGEST", "STALL", "UNSEEN", "SliceEstimator"]

#: A pass with a slice of a prefill may take so many times as long as one that only decodes, and in any case, unless
#: another time is set, so many seconds: people read 238 words a minute, a token each .19 s (Brysbaert, How many words
#: do we read per minute?, 2019), and slices as short as fast steps are compute prompts at half the speed.
STALL, UNSEEN = 3.0, 0.2
#: The share of that which is aimed at, as passes differ. The end of a prompt may have the rest: few tokens in a pass of
#: their own take as long as many.
AIM = 0.85
#: Tokens before anything was measured, at least and at most. A pass of few tokens costs most of what one of 16 does, as
#: the weights are read once for all: with fewer, prefills would take for ever, and nothing would wait much less.
FIRST_SLICE, LARGEST = 16, 512
#: The share of the speed of passes without others' tokens that a first slice beside some is taken to have.
_BESIDE = 0.5
#: After one pass the next slice is so many times as long, at least and at most: one that was disturbed says little.
#: What disturbs a pass makes it longer, so a quick one may be believed more.
_LEAST_CHANGE, _MOST_CHANGE = 0.7, 2.0
#: Passes that only decode, of which the second shortest counts, as what disturbs a pass makes it longer; and how many
#: are enough to begin with.
_PASSES, _KNOWN = 5, 3


class SliceEstimator:
    """Learns from passes how long a slice may be. Not thread-safe.

    What a slice costs is no line through the origin, and grows with the context. So the length follows the last pass:
    it grows where that took less than aimed at, and shrinks where it took more.
    """

    def __init__(self, least: int = FIRST_SLICE, stall: float = UNSEEN) -> None:
        """``least``: tokens below which they cost too much to make a slice shorter, whatever the others wait.

        ``stall``: seconds that a pass may take however fast steps are.
        """
        self._stall = stall
        self._least = max(FIRST_SLICE, min(least, LARGEST))
        #: Seconds of passes that only decode, by their number of contexts.
        self._decode: dict[int, deque[float]] = {}
        #: Tokens, by the magnitude of the number of contexts that decode.
        self._tokens: dict[int, int] = {}
        #: Tokens a second of the last long pass beside which no context decoded.
        self._speed = 0.0

    def observe_alone(self, prefill: int, seconds: float) -> None:
        """Learn from a pass of many tokens of prefills, beside which no context decodes."""
        self._speed = prefill / seconds

    def observe(self, decoding: int, prefill: int, seconds: float) -> None:
        """Learn from a pass of ``decoding`` contexts and ``prefill`` tokens of others.

        Where the engine does not batch, those who decode wait for such a pass of none, and then for theirs.
        """
        step = self.step(max(decoding, 1))
        if seconds <= 0:
            return
        if not prefill:
            self._decode.setdefault(decoding, deque(maxlen=_PASSES)).append(seconds)
        elif step is not None:
            ratio, planned = (seconds if decoding else seconds + step) / step, self.tokens(decoding)
            # What a slice adds to a step is at most proportional to its length.
            change = max(_LEAST_CHANGE, min((AIM * self.stall(step) / step - 1) / max(ratio - 1, 1e-9), _MOST_CHANGE))
            if change < 1:
                planned = min(planned, round(prefill * change))
            elif 2 * prefill >= planned:  # less is the end of a prompt; an engine may end slices where blocks end
                planned = round(planned * change)
            self._tokens[_magnitude(decoding)] = max(self._least, min(planned, LARGEST))

    def stall(self, step: float) -> float:
        """Return the seconds that a pass with a slice may take where one without takes ``step`` seconds."""
        return max(STALL * step, self._stall)

    @property
    def measured(self) -> bool:
        """True if it is known how long a pass takes that only decodes."""
        return any(len(times) >= _KNOWN for times in self._decode.values())

    def step(self, decoding: int) -> float | None:
        """Return the seconds of a pass that only decodes so many contexts; None if that is not known.

        Of a number that was not measured: those of the next smaller one, at which fewer tokens go with them.
        """
        if not self._decode:
            return None
        smaller = [number for number in self._decode if number <= decoding]
        times = sorted(self._decode[max(smaller) if smaller else min(self._decode)])
        return times[min(1, len(times) - 1)]

    def tokens(self, decoding: int) -> int:
        """Return how many tokens of a prefill may go with ``decoding`` contexts that decode.

        Of a number beside which none went: as with the nearest number, or as the speed without others lets expect.
        """
        if self._tokens:
            return self._tokens[min(self._tokens, key=lambda known: abs(known - _magnitude(decoding)))]
        step = self.step(max(decoding, 1)) or 0.0
        expected = int(_BESIDE * self._speed * (AIM * self.stall(step) - step))
        return max(self._least, min(expected, LARGEST))


def _magnitude(decoding: int) -> int:
    return max(decoding, 1).bit_length()
