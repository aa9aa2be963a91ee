"""Training of a ramp's head: a change of low rank to the linear map's logits, learnt from what the model says.

Least squares bring hidden states near to the last ones in every direction alike; a ramp only has to be sure where it is
right. With all weights of its head free, some ten thousand tokens would be learnt by heart; a change of low rank cannot
do that. It is added to the head when it is learnt, so that a trained ramp costs what an untrained one does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["targets_of", "train_head"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

#: Rank of the change, passes over the rows, and rows of a step.
_RANK, _EPOCHS, _ROWS = 64, 3, 256
#: One of so many rows is only looked at: training that does not help there is not used.
_ASIDE = 8
#: Of a token that no candidate is, the share of what a ramp should say that is spread over all of them: it is not sure.
_DOUBT = 0.7
#: How far a step goes (Adam): for the factors, the constants, and the factor of the untrained logits.
_RATES = (1e-3, 1e-3, 3e-3, 1e-2)
_DECAY, _SQUARES, _TINY = 0.9, 0.999, 1e-8


def targets_of(last: Floats, said: npt.NDArray[np.int64], candidates: npt.NDArray[np.int32], rows: Floats) -> Halves:
    """Return the probabilities [n, candidates] that ramps are to give, as the model does.

    Args:
        last: hidden states behind all layers [n, width].
        said: what the model says of each.
        candidates: tokens that ramps can say, ascending.
        rows: the rows of the model's own head of these [candidates, width].
    """
    found = np.empty((len(last), len(candidates)), np.float16)
    none = ~np.isin(said, candidates)
    for start in range(0, len(last), _ROWS):
        part = slice(start, start + _ROWS)
        shares = _softmax(last[part].astype(np.float32) @ rows.T)
        shares[none[part]] = (1 - _DOUBT) * shares[none[part]] + _DOUBT / len(candidates)
        found[part] = shares
    return found


def train_head(hidden: npt.NDArray[np.floating], targets: Halves, head: Floats) -> Floats:
    """Return the head of a ramp, trained; the same for the same rows.

    Args:
        hidden: what it takes [n, width].
        targets: what it is to say of each [n, candidates].
        head: the untrained one [width + 1, candidates], the last row constant. It is returned as it was where training
            does not bring it nearer to what other rows are to have.
    """
    rng = np.random.default_rng(0)
    order = rng.permutation(len(hidden))
    aside, seen = order[: len(order) // _ASIDE], order[len(order) // _ASIDE :]
    if not len(aside):
        return head
    steps = _Steps(rng, head)
    best, least = head, steps.loss(hidden, targets, aside)
    for _ in range(_EPOCHS):
        rng.shuffle(seen)
        for start in range(0, len(seen), _ROWS):
            part = seen[start : start + _ROWS]
            steps.step(hidden[part].astype(np.float32), targets[part].astype(np.float32))
        loss = steps.loss(hidden, targets, aside)
        if loss < least:
            best, least = steps.head(), loss
    return best


class _Steps:
    """Adam on the factors of a change of a head, its constants, and the factor of what it was."""

    def __init__(self, rng: np.random.Generator, head: Floats) -> None:
        self._map, width, count = head[:-1], len(head) - 1, head.shape[1]
        rank = min(_RANK, width, count)
        self._down = (rng.standard_normal((width, rank)) / np.sqrt(width)).astype(np.float32)
        self._up = np.zeros((rank, count), np.float32)
        self._bias, self._scale = head[-1].copy(), np.ones(1, np.float32)
        self._means = [np.zeros_like(one) for one in self._weights]
        self._squares = [np.zeros_like(one) for one in self._weights]
        self._count = 0

    @property
    def _weights(self) -> list[Floats]:
        return [self._down, self._up, self._bias, self._scale]

    def head(self) -> Floats:
        """The head as trained so far [width + 1, candidates]."""
        found: Floats = np.concatenate([self._scale * self._map + self._down @ self._up, self._bias[None]])
        return found

    def step(self, hidden: Floats, targets: Floats) -> None:
        """Move the weights a little towards what these rows are to have."""
        plain, low = hidden @ self._map, hidden @ self._down
        wrong = (_softmax(self._scale * plain + low @ self._up + self._bias) - targets) / len(hidden)
        slopes = [
            hidden.T @ (wrong @ self._up.T),
            low.T @ wrong,
            wrong.sum(0),
            np.array([np.vdot(wrong, plain)], np.float32),
        ]
        self._count += 1
        for weights, slope, mean, square, rate in zip(self._weights, slopes, self._means, self._squares, _RATES):
            mean += (1 - _DECAY) * (slope - mean)
            square += (1 - _SQUARES) * (slope * slope - square)
            far = rate * np.sqrt(1 - _SQUARES**self._count) / (1 - _DECAY**self._count)
            weights -= far * mean / (np.sqrt(square) + _TINY)

    def loss(self, hidden: npt.NDArray[np.floating], targets: Halves, rows: npt.NDArray[np.int64]) -> float:
        """The mean cross-entropy of some rows."""
        head, total = self.head(), 0.0
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            shares = _softmax(hidden[part].astype(np.float32) @ head[:-1] + head[-1])
            total -= float((targets[part] * np.log(shares + 1e-30)).sum())
        return total / len(rows)


def _softmax(logits: Floats) -> Floats:
    found: Floats = np.exp(logits - logits.max(1, keepdims=True))
    found /= found.sum(1, keepdims=True)
    return found
