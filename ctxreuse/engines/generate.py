"""The decode loop of every engine: sample, turn into text, stop, and feed a token only when another must follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import numpy as np

from ctxreuse.engines.base import Context, Engine, Logits
from ctxreuse.engines.detokenize import Detokenizer, StopStrings
from ctxreuse.engines.sampling import Sampler, SamplingParams, largest, log_softmax
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import TokenRangeError
from ctxreuse.identity.keys import Tokens

__all__ = ["Finish", "GeneratedToken", "generate"]

Finish = Literal["stop", "length", "stop_string"]


class GeneratedToken(msgspec.Struct, frozen=True):
    """One generated token.

    ``text`` is the text that can be given out with it: whole characters, nothing that may begin a stop string, so it
    may be "" or hold earlier tokens' text. ``finish`` is set on the last piece: ``stop`` (the model ended; ``token`` is
    the end marker), ``length`` (max_tokens or the model's positions are used up) or ``stop_string``. ``logprob`` and
    ``top`` (ids and log-probabilities of the likeliest tokens, best first) are those of the model's own distribution,
    before penalties and temperature; None and () unless `SamplingParams.logprobs` asks for them.
    """

    text: str
    token: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def generate(
    engine: Engine,
    text: TextModel,
    context: Context,
    logits: Logits,
    sampling: SamplingParams,
    advance: Callable[[Context, Tokens], Logits] | None = None,
) -> Iterator[GeneratedToken]:
    """Yield one piece per token. ``logits`` follow the tokens that ``context`` holds; ``advance`` appends each further
    one (None: `Engine.prefill`).

    A token is fed to the engine only when the next one is requested, so after the end the last token is not in
    ``context``. ``max_tokens`` 0 yields nothing. The caller may stop at any piece. Raises what `Engine.prefill` raises,
    except ContextTooLongError: a full context ends with ``length``; and TokenRangeError for a
    `SamplingParams.logit_bias` of a token that the model does not have.
    """
    beyond = max(sampling.logit_bias, default=-1)
    if beyond >= len(logits):
        raise TokenRangeError(f"logit_bias names token {beyond:,}, and the model has {len(logits):,} tokens")
    prompt, feed = context.n, engine.prefill if advance is None else advance
    sampler = Sampler(sampling, prompt)
    # The last token needs no position, as it is never fed.
    end = min(prompt + sampling.max_tokens, engine.space.max_tokens + 1)
    history = np.empty(end, "<i4")
    history[:prompt] = context.tokens
    words, stops = Detokenizer(text, history[:prompt].tolist()), StopStrings(sampling.stop)
    for count in range(prompt, end):
        if count > prompt:
            logits = feed(context, history[count - 1 : count])
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
        yield GeneratedToken(out, token, finish, logprob, top)
        if finish is not None:
            return


def _logprobs(logits: Logits, token: int, count: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if not count:
        return None, ()
    scores = log_softmax(logits)
    best = largest(scores, min(count, len(scores)))
    return float(scores[token]), tuple((int(i), float(scores[i])) for i in best)
