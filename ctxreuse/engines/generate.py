"""The decode loop of every engine: sample, turn into text, stop, and feed a token only when another must follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.constrain import Constraint
from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.engines.detokenize import Detokenizer, StopStrings
from ctxreuse.engines.sampling import Sampler, SamplingParams, largest, log_softmax
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import TokenRangeError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["AnswerDecoder", "Finish", "GeneratedToken", "generate"]

Finish = Literal["stop", "length", "stop_string"]


class GeneratedToken(msgspec.Struct, frozen=True):
    """One generated token.

    ``text`` is the text that can be given out with it: whole characters, nothing that may begin a stop string, so it
    may be "" or hold earlier tokens' text. ``finish`` is set on the last piece: ``stop`` (the model ended; ``token`` is
    the end marker), ``length`` (max_tokens or the model's positions are used up) or ``stop_string``, which is ``stop``.
    ``logprob`` and ``top`` (ids and log-probabilities of the likeliest tokens, best first) are those of the model's own
    distribution, before penalties and temperature; None and () unless `SamplingParams.logprobs` asks for them.
    """

    text: str
    token: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    stop: str = ""


class AnswerDecoder:
    """Turns logits into the pieces of one answer. Not thread-safe.

    Attributes:
        ended: no piece follows: the last one had a ``finish``, or ``max_tokens`` is 0.
    """

    def __init__(
        self,
        text: TextModel,
        space: ModelSpace,
        prompt: Tokens,
        sampling: SamplingParams,
        constraint: Constraint | None = None,
    ) -> None:
        """Of an answer to ``prompt``; ``constraint``: of `SamplingParams.grammar`, at its beginning. Raises
        TokenRangeError for a `SamplingParams.logit_bias` of a token that the model does not have."""
        beyond = max(sampling.logit_bias, default=-1)
        if beyond >= space.vocab_size:
            raise TokenRangeError(f"logit_bias names token {beyond:,}, and the model has {space.vocab_size:,} tokens")
        self._text, self._sampling, self._constraint = text, sampling, constraint
        self._sampler = Sampler(sampling, len(prompt))
        # The last token needs no position, as it is never fed.
        end = min(len(prompt) + sampling.max_tokens, space.max_tokens + 1)
        self._history = np.empty(end, "<i4")
        self._history[: len(prompt)] = prompt
        self._count = len(prompt)
        shown = {int(text.encode(name)[0]): name for name in sampling.shown_markers if name in text.markers}
        self._words = Detokenizer(text, prompt.tolist(), shown)
        self._stops = StopStrings(sampling.stop)
        self.ended = self._count >= end

    @property
    def history(self) -> Tokens:
        """Prompt and answer so far, int32 [n]; a view."""
        return self._history[: self._count]

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return len(self._history) - self._count

    @property
    def constraint(self) -> Constraint | None:
        """The state of the answer in its grammar."""
        return self._constraint

    @property
    def last(self) -> Tokens:
        """The last token, int32 [1]."""
        return self._history[self._count - 1 : self._count]

    def next(self, logits: Logits) -> GeneratedToken:
        """Draw the next token from the logits after all tokens so far. Raises GrammarError for a grammar that turns
        out to be too complex."""
        constraint = self._constraint
        allowed = logits if constraint is None else constraint.mask(logits)
        token = self._sampler.next(allowed, self._history[: self._count])
        complete = constraint is not None and constraint.advance(token)
        return self._append(token, complete, *_logprobs(logits, token, self._sampling.logprobs))

    def take(self, token: int) -> GeneratedToken:
        """Append a token that another node has drawn by the same rule; there is no grammar, and nothing is known of its
        probability."""
        self._sampler.skip()
        return self._append(token, False)

    def _append(
        self, token: int, complete: bool, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()
    ) -> GeneratedToken:
        """``complete``: the answer's grammar is."""
        sampling, stops, constraint = self._sampling, self._stops, self._constraint
        self._history[self._count] = token
        self._count += 1
        finish: Finish | None = None
        if token in self._text.stop_ids and (constraint is not None or not sampling.ignore_eos):
            finish, out = "stop", stops.add(self._words.flush())
        else:
            out = stops.add(self._words.add(token))
            if complete or self._count == len(self._history):
                finish = "stop" if complete else "length"
                if not stops.found:
                    out += stops.add(self._words.flush())
        if stops.found:
            finish = "stop_string"
        elif finish is not None:
            out += stops.flush()
        self.ended = finish is not None
        return GeneratedToken(out, token, finish, logprob, top, stops.found)


def generate(
    engine: Engine,
    text: TextModel,
    context: Context,
    logits: Logits,
    sampling: SamplingParams,
    constraint: Constraint | None = None,
) -> Iterator[GeneratedToken]:
    """Yield one piece per token. ``logits`` follow the tokens that ``context`` holds; ``constraint``: of
    `SamplingParams.grammar`, at its beginning.

    A token is fed to the engine only when the next one is requested, so after the end the last token is not in
    ``context``. ``max_tokens`` 0 yields nothing. The caller may stop at any piece. Raises what `AnswerDecoder` and
    `Engine.prefill` raise, except ContextTooLongError: a full context ends with ``length``.
    """
    decoder = AnswerDecoder(text, engine.space, context.tokens, sampling, constraint)
    while not decoder.ended:
        yield decoder.next(logits)
        if not decoder.ended:
            logits = engine.prefill(context, decoder.last)


def _logprobs(logits: Logits, token: int, count: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if not count:
        return None, ()
    scores = log_softmax(logits)
    best = largest(scores, min(count, len(scores)))
    return float(scores[token]), tuple((int(i), float(scores[i])) for i in best)
