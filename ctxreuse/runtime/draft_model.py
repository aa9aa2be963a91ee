"""A smaller model of the same tokenizer that drafts answers: its contexts follow theirs, token by token."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from math import inf
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.constrain import HasVocabulary
from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.identity.keys import common_prefix
from ctxreuse.runtime.context_cache import ContextCache
from ctxreuse.speculate import MODEL, MOST, Confidence, Continuation, DraftLedger, DraftPrice

if TYPE_CHECKING:
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.speculate import DraftPolicy

__all__ = ["DraftModel", "ModelDrafter"]

log = logging.getLogger(__name__)

#: Bytes of contexts of ended answers, which the next turns continue.
_KEPT = 256 << 20
#: Runs whose median time counts; tokens from which on one tells what a prompt's cost.
_RUNS, _LONG = 9, 16
#: How both models go on behind this is compared for so many tokens, before any answer is drafted.
_TRIED = 24
_OPENING = (
    "The harbour of a small town has a long wall of stone, a tower with a light and a row of houses. In the morning "
    "the boats come back, and the people of the town walk down to the water to"
)
_NOTHING = Continuation(np.zeros(0, "<i4"), np.zeros(0, np.float32), MODEL)


class DraftModel:
    """One for a runtime; any thread may call."""

    def __init__(self, engine: Engine, target: Engine, text: TextModel | None, clock: Callable[[], float]) -> None:
        """``engine``: of the draft model; ``target``: of the model that answers; ``text``: its tokenizer. Raises
        ConfigError for a draft model that has another tokenizer, or cannot forget wrong tokens."""
        self.engine, self.clock, self.cache = engine, clock, ContextCache(_KEPT)
        _check(engine, target, text)
        self._prompt, self._token = deque[float](maxlen=_RUNS), deque[float](maxlen=_RUNS)

    def try_out(self, target: Engine, text: TextModel | None, policy: DraftPolicy) -> None:
        """Measure what the model takes, and how often it says what the ``target`` does. Raises EngineError."""
        if text is None:
            return
        ids, ledger = text.encode(_OPENING, markers=False)[:_TRIED], DraftLedger(model=True)
        for _ in range(2):  # the first runs are slower
            own, drafter = target.new_context(), ModelDrafter(self)
            logits, history, seen = target.prefill(own, ids), ids, list[tuple[Confidence, bool]]()
            for _ in range(_TRIED):
                found, token = drafter.draft(history, history[:0], 1), int(logits.argmax())
                seen += [(Confidence(MODEL, float(p)), one == token) for one, p in zip(found.ids, found.shares)]
                logits = target.prefill(own, np.array([token], "<i4"))
                history = own.tokens
        for one, right in seen:
            policy.observe([one], int(right), ledger)

    def run(self, context: Context, ids: Tokens) -> Logits:
        """Append tokens to a context; returns the logits after them, and learns what that takes."""
        began = self.clock()
        logits = self.engine.prefill(context, ids)
        seconds = self.clock() - began
        if len(ids) >= _LONG:
            self._prompt.append(seconds / len(ids))
        elif len(ids) <= 2:
            self._token.append(seconds)
        return logits

    def price(self, missing: int) -> DraftPrice:
        """Return what drafting takes where so many tokens of a context are missing, besides the last."""
        token = median(self._token) if self._token else inf
        each = min(median(self._prompt), token) if self._prompt else token
        return DraftPrice(missing * each if missing else 0.0, token)


class ModelDrafter:
    """A `Drafter` of one answer: the most likely next token, one at a call, with the model's probability of it."""

    def __init__(self, model: DraftModel) -> None:
        self._model, self._failed = model, False
        self._context: Context | None = None
        self._cached = -1  # tokens of the prompt that a context of the cache has; below 0: not looked up
        self.seconds = 0.0

    def price(self, history: Tokens) -> DraftPrice:
        """See `Drafter.price`: the tokens that its context misses are computed first."""
        model = self._model
        if self._failed or len(history) + MOST > model.engine.space.max_tokens:
            return DraftPrice(inf, inf)
        if self._context is not None:
            here = common_prefix(self._context.tokens, history)
        else:
            if self._cached < 0:
                self._cached = model.cache.match(model.engine, history, 0)
            here = self._cached
        return model.price(max(len(history) - here - 1, 0))

    def draft(self, history: Tokens, ahead: Tokens, most: int) -> Continuation:
        """See `Drafter.draft`; nothing any more if the model failed."""
        if self._failed:
            return _NOTHING
        model, ids = self._model, np.concatenate([history, ahead]).astype("<i4")
        began = model.clock()
        try:
            context = self._follow(ids)
            logits = model.run(context, ids[context.n :])
        except CtxReuseError as error:
            log.warning("the draft model failed, and drafts no more of this answer: %s", error)
            self._failed, self._context = True, None
            return _NOTHING
        finally:
            self.seconds += model.clock() - began
        best = int(logits.argmax())
        share = 1 / float(np.exp(logits - logits[best]).sum())
        return Continuation(np.array([best], "<i4"), np.array([share], np.float32), MODEL)

    def _follow(self, ids: Tokens) -> Context:
        """The context, cut back to what it shares with ``ids``, of which the last is always left."""
        engine = self._model.engine
        if self._context is None:
            taken = self._model.cache.take(engine, ids, 0)
            self._context = taken[0] if taken is not None else engine.new_context(len(ids))
        context = self._context
        engine.crop(context, min(common_prefix(context.tokens, ids), len(ids) - 1))
        return context

    def end(self) -> None:
        """Let the next answer continue its context."""
        if self._context is not None:
            self._model.cache.put(self._context)
            self._context = None


def _check(engine: Engine, target: Engine, text: TextModel | None) -> None:
    name, fix = engine.space.architecture, "Use a smaller model of the same family, or leave draft_model empty"
    if engine.space.needs_state:
        raise ConfigError(
            "the draft model has recurrent or windowed layers, and cannot forget a wrong token", where=name, fix=fix
        )
    if engine.space.vocab_size == target.space.vocab_size:
        if engine.space.tokenizer == target.space.tokenizer:
            return
        texts: list[object] = [text, engine.text]
        tokens = [list(one.vocabulary().tokens) for one in texts if isinstance(one, HasVocabulary)]
        if len(tokens) == 2 and tokens[0] == tokens[1]:
            return
    raise ConfigError(
        f"the draft model has another tokenizer than {target.space.architecture}: "
        f"{engine.space.vocab_size:,} tokens, not the same {target.space.vocab_size:,}",
        where=name,
        fix=fix,
    )
