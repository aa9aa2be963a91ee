"""What calibration asks of an engine: K and V of a text, their gradients, and its scores on other K and V."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace

__all__ = ["Gauge", "Planes", "Reading", "Rotary", "RotaryStyle", "Tables", "open_gauge"]

RotaryStyle = Literal["half", "pairs", "none"]

#: (layer, ``"k"`` or ``"v"``) -> float32 [heads, rows, dim], the values that the engine keeps: K as it is rotated.
Planes = dict[tuple[int, str], npt.NDArray[np.float32]]


#: Cosines and sines, float32 [rows, pairs] each.
Tables = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class Rotary(msgspec.Struct, frozen=True):
    """How a layer turns K by position p: pair i of the first 2 * len(inv_freq) dims by p * inv_freq[i] radians.

    ``half``: dims i and i + r/2 are a pair; ``pairs``: dims 2i and 2i + 1; ``none``: K is kept as it is. Turned K is
    ``scale`` times as long.
    """

    style: RotaryStyle
    inv_freq: tuple[float, ...] = ()
    scale: float = 1.0

    def turn(
        self, k: npt.NDArray[np.float32], positions: npt.NDArray[np.integer], *, back: bool
    ) -> npt.NDArray[np.float32]:
        """K [..., rows, dim] turned to ``positions`` [rows], or ``back`` from them; a new array."""
        out, (cos, sin) = k.copy(), self.tables(positions, back=back)
        first, second = self.pairs
        out[..., first] = k[..., first] * cos - k[..., second] * sin
        out[..., second] = k[..., second] * cos + k[..., first] * sin
        return out

    @property
    def pairs(self) -> tuple[slice, slice]:
        """The dims that are the first of a pair, and those that are the second."""
        half = len(self.inv_freq)
        if self.style == "pairs":
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)

    def tables(self, positions: npt.NDArray[np.integer], *, back: bool) -> Tables:
        """What K is multiplied with to be turned to ``positions`` [rows], or ``back`` from them."""
        angle = np.asarray(positions, np.float64)[:, None] * np.asarray(self.inv_freq, np.float64)
        length = 1 / self.scale if back else self.scale
        cos = (np.cos(angle) * length).astype(np.float32)
        return cos, (np.sin(angle) * (-length if back else length)).astype(np.float32)


@runtime_checkable
class Reading(Protocol):
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
class Gauge(Protocol):
    """An engine that can be calibrated. One caller at a time."""

    @property
    def space(self) -> ModelSpace:
        """The identity of everything that is measured."""
        ...

    def rotaries(self) -> dict[int, Rotary]:
        """How each layer that keeps K turns it, verified on the layer's own K; ``none`` where nothing known fits."""
        ...

    def read(self, tokens: Tokens) -> Reading:
        """Run tokens, int32 [n], from position 0 on."""
        ...

    def gradients(self, reading: Reading, following: Tokens, seed: int) -> Planes:
        """A random vector for each row of the planes whose second moments are the Fisher information of the scores.

        That is of the distributions after the S tokens of ``following``, with respect to the row; for example the
        gradient of the log probability of S tokens drawn from them. Means over ``seed`` are exact.
        """
        ...

    def scores(self, reading: Reading, following: Tokens, planes: Planes | None = None) -> npt.NDArray[np.float32]:
        """Log probabilities after each token of ``following``, float32 [S, vocab].

        ``planes`` replace those of the reading (all of them); the reading stays as it is.
        """
        ...


def open_gauge(name_or_folder: str, *, threads: int | None = None) -> tuple[Gauge, TextModel]:
    """The gauge and the tokenizer of a known model or a Hugging Face folder, in float32.

    Raises ConfigError as `open_engine` does, and for a folder without a tokenizer.
    """
    from ctxreuse.engines import open_engine

    engine = open_engine(name_or_folder, dtype="float32", threads=threads)
    if engine.text is None:
        raise ConfigError(
            "the folder holds no tokenizer.json, so no text can be read", where=name_or_folder, fix="Add the file"
        )
    from ctxreuse.engines.torch_hf.fisher import TorchGauge

    return TorchGauge(engine), engine.text
