"""What calibration asks of an engine: K and V of a text, their gradients, and its scores on other K and V."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.rope import Rotary

__all__ = ["CalibrationModel", "Fidelity", "Planes", "Prefix"]

#: (layer, ``"k"`` or ``"v"``) -> float32 [heads, rows, dim], the values that the engine keeps: K as it is rotated.
Planes = dict[tuple[int, str], npt.NDArray[np.float32]]


class Fidelity(NamedTuple):
    """Means over the positions scored.

    ``kl``: divergence of the altered distribution from the exact one, in nats a token. ``top1``: share of positions
    with the same most likely token. ``dnll``: by how many nats the text that follows became less likely.
    """

    kl: float
    top1: float
    dnll: float


@runtime_checkable
class Prefix(Protocol):
    """A text that was read: what every attention layer keeps of it, and whatever else the engine must remember."""

    @property
    def n(self) -> int:
        """Tokens read."""
        ...

    @property
    def planes(self) -> Planes:
        """K and V of all attention layers; the last row is that of the last token (windows hold fewer rows)."""
        ...


@runtime_checkable
class CalibrationModel(Protocol):
    """An engine that can be calibrated. One caller at a time."""

    @property
    def space(self) -> ModelSpace:
        """The identity of everything that is measured."""
        ...

    def rotaries(self) -> dict[int, Rotary]:
        """How each layer that keeps K turns it, verified on the layer's own K; ``none`` where nothing known fits."""
        ...

    def read(self, tokens: Tokens) -> Prefix:
        """Run tokens, int32 [n], from position 0 on."""
        ...

    def gradients(self, reading: Prefix, following: Tokens, seed: int) -> Planes:
        """A random vector for each row of the planes whose second moments are the Fisher information of the scores.

        That is of the distributions after the S tokens of ``following``, with respect to the row; for example the
        gradient of the log probability of S tokens drawn from them. Means over ``seed`` are exact.
        """
        ...

    def scores(self, reading: Prefix, following: Tokens, planes: Planes | None = None) -> npt.NDArray[np.float32]:
        """Log probabilities after each token of ``following``, float32 [S, vocab].

        ``planes`` replace those of the reading (all of them); the reading stays as it is.
        """
        ...
