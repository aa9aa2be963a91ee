"""The drafts of one runtime's answers: which requests have them, what is learnt from each, and what is kept of that."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.engines.base import DraftEngine
from ctxreuse.runtime.draft_model import DraftModel, ModelDrafter
from ctxreuse.speculate import AnswerDrafter, DraftFile, DraftMemory, DraftPolicy, PipelinedDrafter
from ctxreuse.why.records import DraftOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from ctxreuse.engines.base import Engine
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.engines.text import TextModel
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.metrics import Metrics
    from ctxreuse.runtime.request import Request
    from ctxreuse.speculate import PassCosts

__all__ = ["Drafting"]

log = logging.getLogger(__name__)


class Drafting:
    """Makes drafters. Any thread may call."""

    def __init__(
        self,
        space: ModelSpace,
        salt: bytes,
        costs: PassCosts,
        keys: Callable[[Tokens, Sequence[bytes]], list[bytes]],
        *,
        folder: Path | None = None,
        metrics: Metrics | None = None,
        here: bool = True,
        model: DraftModel | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """``keys``: the prefix keys of tokens, of which the first are known; ``folder``: where texts and what was
        learnt of drafts are kept over restarts (None: nowhere); ``here``: also answers that this node decodes are
        drafted; ``model``: drafts them too; ``stops``: tokens that end an answer."""
        self.memory, self._policy = DraftMemory(salt=salt), DraftPolicy(costs)
        self._space, self._keys, self._metrics, self._here = space, keys, metrics, here
        self.model, self._stops = model, frozenset(stops)
        self._file: DraftFile | None = None
        if folder is not None and not self.refused:
            self._file = DraftFile(folder, space.digest, salt, self.memory, self._policy)
            self._file.load()
        if metrics is not None:
            metrics.watch(lambda: metrics.set("ctxreuse_draft_memory_bytes", self.memory.nbytes))

    def try_out(self, target: Engine, text: TextModel | None) -> None:
        """Before the first answer, make the engine ready, and let the draft model's use be known, see
        `DraftModel.try_out`."""
        if self._here and not self.refused and isinstance(target, DraftEngine) and (why := target.use_drafts()):
            log.warning("drafts gain nothing: %s", why)
        if self.model is not None and not self.refused:
            self.model.try_out(target, text, self._policy)

    @property
    def refused(self) -> str:
        """Why no answer of this model can be drafted; "": it can."""
        return "state" if self._space.needs_state else ""

    def begin(self, request: Request, sampling: SamplingParams) -> AnswerDrafter | None:
        """Return the drafter of an answer to a request; None: it is not to be drafted."""
        if self.refused or sampling.speculate == "off" or not self._here:
            return None
        drafter = AnswerDrafter(
            self._policy,
            self.memory,
            request.caller,
            request.ids,
            sampled=sampling.temperature > 0,
            model=None if self.model is None else ModelDrafter(self.model),
            stops=self._ending(sampling),
        )
        self.memory.learn(request.caller, request.ids, request.keys, self._space.block_tokens, cleared=drafter.cleared)
        return drafter

    def _ending(self, sampling: SamplingParams) -> Collection[int]:
        """The tokens that end an answer drawn so: where a grammar is complete it ends, whatever else is wanted."""
        return () if sampling.ignore_eos and sampling.grammar is None else self._stops

    def begin_elsewhere(self, policy: DraftPolicy, request: Request, sampling: SamplingParams) -> PipelinedDrafter:
        """Return the drafter of an answer that another node decodes; ``policy``: knows what passes cost there."""
        drafter = PipelinedDrafter(
            policy,
            self.memory,
            request.caller,
            request.ids,
            sampled=sampling.temperature > 0,
            drafts=sampling.speculate != "off",
            stops=self._ending(sampling),
        )
        self.memory.learn(request.caller, request.ids, request.keys, self._space.block_tokens, cleared=drafter.cleared)
        return drafter

    def end(self, request: Request, drafter: AnswerDrafter | PipelinedDrafter, tokens: Tokens) -> None:
        """Learn a context whose answer has ended; ``tokens``: prompt and answer."""
        if isinstance(drafter, AnswerDrafter) and isinstance(drafter.model, ModelDrafter):
            if drafter.cleared == self.memory.cleared:  # else its text was forgotten meanwhile
                drafter.model.end()
            self._policy.ended(len(tokens) - len(request.ids))
        keys, size = self._keys(tokens, request.keys), self._space.block_tokens
        self.memory.learn(request.caller, tokens, keys, size, len(request.ids), drafter.cleared)

    def outcome(
        self, sampling: SamplingParams, drafter: AnswerDrafter | PipelinedDrafter | None
    ) -> DraftOutcome | None:
        """Count what the drafts of an answer came to; None: none were wanted."""
        if drafter is None:
            if sampling.speculate == "off" or not self._here:
                return None
            return DraftOutcome(short={self.refused: 1})
        saved, metrics = drafter.saved, self._metrics
        if metrics is not None:
            metrics.add("ctxreuse_draft_seconds_total", abs(saved), "saved" if saved >= 0 else "lost")
            for reason, count in drafter.short.items():
                metrics.add("ctxreuse_draft_short_passes_total", count, reason)
        made = DraftOutcome(drafter.drafted, drafter.accepted, saved, dict(drafter.short))
        if isinstance(drafter, PipelinedDrafter):
            return made
        return msgspec.structs.replace(
            made, drafted_by_model=drafter.drafted_by_model, accepted_by_model=drafter.accepted_by_model
        )

    def save(self, seconds: float = 0.0) -> None:
        """Keep on disk what is new, but not twice within so many seconds."""
        if self._file is not None:
            self._file.save(seconds)

    def forget(self, before: float) -> None:
        """Forget all texts, on disk too, if one is from before a time. Raises OSError if the file cannot be removed."""
        if self.memory.since and self.memory.since >= before:
            return
        if self.model is not None:
            self.model.cache.clear()
        if self._file is not None:
            self._file.forget()
        else:
            self.memory.clear()
