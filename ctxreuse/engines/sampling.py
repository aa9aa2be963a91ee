"""From logits to a token: greedy or drawn, with penalties and filters; numpy only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from math import isfinite
from typing import Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.constrain.grammar import Grammar
from ctxreuse.engines.base import Logits
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["MAX_BIAS", "Sampler", "SamplingParams", "SamplingSettings", "largest", "log_softmax"]

_MOST = float(np.finfo(np.float64).max)

#: `SamplingParams.logit_bias` at most, up and down: beyond the range of logits, so that it bans or forces a token.
MAX_BIAS = 100

_SEEDS = 1 << 128

#: Tokens that top-p examines first.
_NUCLEUS = 512


class SamplingSettings(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of a call, so that type checkers find a wrong one."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    ignore_eos: bool
    logprobs: int
    logit_bias: Mapping[int, float]
    grammar: Grammar | None
    shown_markers: tuple[str, ...]
    speculate: Literal["auto", "off"]
    verify: Literal["auto", "steps", "off"]
    step_threshold: float | None
    exits: float | None


class SamplingParams(msgspec.Struct, frozen=True):
    """How an answer is drawn. Raises ConfigError for values without a meaning.

    ``temperature`` 0 is greedy. ``logit_bias``: added to the logits of token ids, before penalties and temperature;
    -100 bans a token, 100 forces it. ``repetition_penalty`` counts prompt and answer (Keskar et al. 2019, CTRL, 4.1),
    ``presence_penalty`` and ``frequency_penalty`` the answer only (the OpenAI API's definition). ``logprobs``: how many
    alternatives to report beside the chosen token's own log-probability; 0 reports nothing. ``grammar``: what the
    answer must look like; it ends where the grammar does, whatever ``ignore_eos`` says. ``shown_markers``: special
    tokens, by their texts, that the answer's text has; it has no others. ``speculate``: ``off``: it is not drafted,
    whatever the engine's setting; ``auto``: as that says. ``verify``: ``off``: it is not decoded by another node,
    whatever the daemon's setting; ``steps``: this node's model writes it, and another one judges its steps, which are
    accepted from ``step_threshold`` on (None: as the daemon's setting says, or the judge's calibration). ``exits``: the
    share of tokens that may be other than the model's own, so that some leave it early (`ctxreuse.exits`); 0: none;
    None: as the engine's setting says.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: Mapping[int, float] = {}
    grammar: Grammar | None = None
    shown_markers: tuple[str, ...] = ()
    speculate: Literal["auto", "off"] = "auto"
    verify: Literal["auto", "steps", "off"] = "auto"
    step_threshold: float | None = None
    exits: float | None = None

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("max_tokens", _whole(self.max_tokens), "a whole number, 0 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("top_k", _whole(self.top_k), "a whole number, 0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0; 1 is off"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a number; 0 is off"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a number; 0 is off"),
            ("seed", self.seed is None or 0 <= self.seed < _SEEDS, "0 to 2^128 - 1"),
            ("stop", type(self.stop) in (tuple, list) and all(self.stop), "a tuple of strings that are not empty"),
            ("logprobs", _whole(self.logprobs), "a whole number, 0 (off) or more"),
            ("speculate", self.speculate in ("auto", "off"), "auto or off"),
            ("verify", self.verify in ("auto", "steps", "off"), "auto, steps or off"),
            ("step_threshold", self.step_threshold is None or isfinite(self.step_threshold), "a number"),
            ("exits", self.exits is None or 0 <= self.exits <= 0.2, "a share of tokens up to 0.2; 0 is off"),
            (
                "logit_bias",
                all(_whole(id) and abs(bias) <= MAX_BIAS for id, bias in self.logit_bias.items()),
                f"a map of token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}",
            ),
        ):
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", fix=f"It must be {rule}")

    def answers(self, n: int) -> list[SamplingParams]:
        """Return how each of ``n`` answers to one prompt is drawn: answer i with seed + i, as one alone would be.

        Without a seed each draws its own.
        """
        if self.seed is None:
            return [self] * n
        return [msgspec.structs.replace(self, seed=(self.seed + i) % _SEEDS) for i in range(n)]


def _whole(value: int) -> bool:
    return hasattr(value, "__index__") and value >= 0


def log_softmax(logits: Logits) -> Logits:
    """Log-probabilities, float32 [vocab]."""
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted.astype(np.float64)).sum()).astype(np.float32)
    return result


class Sampler:
    """Draws the tokens of one answer. Not thread-safe.

    The n-th draw depends on the seed, on n and on the logits alone: not on other answers, batches or earlier draws.
    Without a seed one is made up, and reported in ``seed``.
    """

    def __init__(self, sampling: SamplingParams, prompt: int = 0) -> None:
        """``prompt``: how many ids at the start of each ``history`` are the prompt's."""
        self.sampling, self._prompt, self._draws = sampling, prompt, 0
        self.seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self._biased = np.fromiter(sampling.logit_bias, np.intp, len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float64, len(sampling.logit_bias))

    def next(self, logits: Logits, history: Tokens) -> int:
        """The next token after ``history`` (prompt and answer so far, int32 [n]). ``logits`` are not changed.

        Raises EngineError if the logits hold a NaN or no finite number.
        """
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise EngineError("the model's logits are not finite", fix="Use float32 or bfloat16 rather than float16")
        how = self.sampling
        penalised = how.repetition_penalty != 1 or how.presence_penalty or how.frequency_penalty
        if not (penalised or how.temperature or len(self._bias)):
            return best
        scores = logits.astype(np.float64)
        scores[self._biased] += self._bias
        if penalised:
            self._penalise(scores, history)
        if not how.temperature:
            return int(scores.argmax())
        # Shifted first, and -inf is a fair score: the quotients of a tiny temperature have no number.
        with np.errstate(over="ignore"):
            scores = (scores - scores.max()) / how.temperature
        ids, weights = self._filtered(scores)
        # Philox is counter-based: draw n is block n of the seed's stream, whatever was drawn before.
        uniform = np.random.Generator(np.random.Philox(key=self.seed, counter=self._draws)).random()
        self._draws += 1
        at = int(np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right"))
        return int(ids[min(at, len(ids) - 1)])

    def skip(self) -> None:
        """Count a draw that was made elsewhere."""
        self._draws += 1

    def _penalise(self, scores: npt.NDArray[np.float64], history: Tokens) -> None:
        how = self.sampling
        with np.errstate(over="ignore"):
            if how.repetition_penalty != 1 and len(history):
                seen = np.unique(history)
                was = scores[seen]
                scores[seen] = np.where(was > 0, was / how.repetition_penalty, was * how.repetition_penalty)
            if how.presence_penalty or how.frequency_penalty:
                said, counts = np.unique(history[self._prompt :], return_counts=True)
                penalties = how.presence_penalty + how.frequency_penalty * counts
                scores[said] -= np.clip(penalties, -_MOST, _MOST)
        np.clip(scores, -_MOST, _MOST, out=scores)

    def _filtered(self, scores: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Ids left by top-k, then top-p, then min-p, and their weights; ties go to the smaller id.

        ``scores`` are at most 0, and the best is.
        """
        how = self.sampling
        weights = np.exp(scores)
        ids = np.arange(len(scores))
        if 0 < how.top_k < len(scores):
            ids = largest(weights, how.top_k)
        if how.top_p < 1:
            # The smallest set whose probability reaches top_p (Holtzman et al. 2020, nucleus sampling). It is nearly
            # always among a few tokens: ordering all 262,144 of Gemma takes 31 ms, finding the first 512 takes 3 ms.
            target = how.top_p * weights[ids].sum()
            first = largest(weights, min(_NUCLEUS, len(ids)))
            if weights[first].sum() < target:
                first = largest(weights, len(ids))
            ids = first[: int(np.searchsorted(np.cumsum(weights[first]), target)) + 1]
        if how.min_p > 0:
            ids = ids[weights[ids] >= how.min_p]  # the largest weight is 1
        return ids, weights[ids]


def largest(weights: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Ids of the ``count`` largest numbers, largest first, ties by id; ``count`` is at most all."""
    if count < len(weights):
        ids = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
    else:
        ids = np.arange(len(weights))
    return ids[np.lexsort((ids, -weights[ids]))][:count]
