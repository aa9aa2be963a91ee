"""The decode loop of every engine: sample, turn into text, stop, and feed a token only when another must follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.engines.base import Engine, Live, Logits
from ctxreuse.engines.detokenize import Detokenizer, StopStrings
from ctxreuse.engines.sampling import Sampler, Sampling, largest, log_softmax
from ctxreuse.engines.text import TextModel

__all__ = ["Finish", "Piece", "generate"]

Finish = Literal["stop", "length", "stop_string"]


class Piece(msgspec.Struct, frozen=True):
    """One generated token.

    ``text`` is the text that can be given out with it: whole characters, nothing that may begin a stop string, so it
    may be "" or hold earlier tokens' text. ``finish`` is set on the last piece: ``stop`` (the model ended; ``token`` is
    the end marker), ``length`` (max_tokens or the model's positions are used up) or ``stop_string``. ``logprob`` and
    ``top`` (ids and log-probabilities of the likeliest tokens, best first) are those of the model's own distribution,
    before penalties and temperature; None and () unless `Sampling.logprobs` asks for them.
    """

    text: str
    token: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def generate(engine: Engine, text: TextModel, live: Live, logits: Logits, sampling: Sampling) -> Iterator[Piece]:
    """One piece a token, as they come. ``logits`` are those after the tokens ``live`` holds.

    A token goes into ``live`` only when the next one is asked for: ``live.n`` tells what was processed, and after the
    end the last token is not in it. ``max_tokens`` 0 yields nothing. The caller may stop at any piece. Raises what
    `Engine.prefill` raises, except ContextTooLongError: a full context ends with ``length``.
    """
    prompt = live.n
    sampler = Sampler(sampling, prompt)
    # The last token needs no position, as it is never fed.
    end = min(prompt + sampling.max_tokens, engine.space.max_tokens + 1)
    history = np.empty(end, "<i4")
    history[:prompt] = live.tokens
    words, stops = Detokenizer(text, history[:prompt].tolist()), StopStrings(sampling.stop)
    for count in range(prompt, end):
        if count > prompt:
            logits = engine.prefill(live, history[count - 1 : count])
        token = sampler.next(logits, history[:count])
        history[count] = token
        finish: Finish | None = None
        if token in text.stop_ids and not sampling.ignore_eos:
            finish, out = "stop", stops.add(words.flush())
        else:
            out = stops.add(words.add(token))
            if count + 1 == end:
                finish = "length"
                if not stops.found:
                    out += stops.add(words.flush())
        if stops.found:
            finish = "stop_string"
        elif finish is not None:
            out += stops.flush()
        logprob, top = _logprobs(logits, token, sampling.logprobs)
        yield Piece(out, token, finish, logprob, top)
        if finish is not None:
            return


def _logprobs(logits: Logits, token: int, count: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if not count:
        return None, ()
    scores = log_softmax(logits)
    best = largest(scores, min(count, len(scores)))
    return float(scores[token]), tuple((int(i), float(scores[i])) for i in best)
