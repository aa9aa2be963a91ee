"""A suffix index as a list that is searched from its end: what the native one must give, wherever its chains reach."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SlowSuffixIndex"]

_GRAMS, _VOTES, _DEPTH = (8, 3), 24, 64


class SlowSuffixIndex:
    """See `ctxreuse.speculate.SuffixIndex`, of ``most`` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens: list[int] = []

    def add(self, ids: Sequence[int], *, begins: bool = True) -> None:
        """Append a text, or what follows the last one."""
        self.tokens += [-1] * (begins and bool(self.tokens) and bool(ids))
        self.tokens = [*self.tokens, *ids][-self._most :]

    def _agreement(self, end: int, tail: Sequence[int]) -> int:
        same = 0
        while same < min(len(tail), end, _DEPTH) and self.tokens[end - 1 - same] == tail[-1 - same]:
            same += 1
        return same

    def draft(self, tail: Sequence[int], count: int) -> tuple[list[int], list[float], int]:
        """Return tokens that may follow, their shares, and the longest match."""
        for gram in _GRAMS:
            found = [(at, self._agreement(at, tail)) for at in range(len(self.tokens) - 1, 0, -1)]
            voters = [(at, same) for at, same in found if same >= gram and self.tokens[at] >= 0][:_VOTES]
            if voters:
                joined = self._agreement(len(self.tokens), tail) >= _GRAMS[0]
                return *self._vote(voters, count, joined), max(same for _, same in voters)
        return [], [], 0

    def _vote(self, voters: list[tuple[int, int]], count: int, joined: bool) -> tuple[list[int], list[float]]:
        text, ids, shares = list(self.tokens), list[int](), list[float]()
        while voters and len(shares) < count:
            weights: dict[int, int] = {}
            said = [text[at] if at < len(text) else -1 for at, _ in voters]
            for token, (_, same) in zip(said, voters):
                if token >= 0:
                    weights[token] = weights.get(token, 0) + same * same
            if not weights:
                break
            best = max(weights, key=lambda token: weights[token])  # of equal ones the newest, which came first
            shares.append(weights[best] / sum(same * same for _, same in voters))
            voters = [(at + 1, same) for token, (at, same) in zip(said, voters) if token == best]
            ids.append(best)
            if joined:
                text.append(best)
        return ids, shares
