"""The order of a question's documents: those whose KV is cached first, where the caller allows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from ctxreuse.errors import ConfigError
from ctxreuse.planner import Part, Permutation, ranking_line
from ctxreuse.runtime import RuntimeProtocol
from ctxreuse.store import Turn
from ctxreuse.why import Reordered
from ctxreuse_agents.inputs import question_of
from ctxreuse_agents.segments import Draft, Segments, SessionPrompt

__all__ = ["DocumentOrder", "check_order", "plan_documents"]

#: ``cached``: what is cached first; ``ranked``: the same, and the model is told the order given; ``given``: as given.
DocumentOrder = Literal["cached", "ranked", "given"]


def check_order(order: str) -> None:
    """Raise ConfigError for an order that does not exist."""
    if order not in get_args(DocumentOrder):
        raise ConfigError(f"order is {order!r}", fix=f"Use {', '.join(get_args(DocumentOrder))}")


def plan_documents(
    draft: Draft,
    documents: Sequence[str],
    order: DocumentOrder,
    turns: Sequence[Turn],
    runtime: RuntimeProtocol,
    segments: Segments,
    max_kl: float | None,
) -> tuple[Draft, SessionPrompt, Reordered | None]:
    """Return the draft with its documents in the planned order, the prompt of it, and what was done (None: nothing).

    ``draft``: the question with the documents as given, behind ``turns``. Raises what `Segments.prompt` raises.
    """
    prompt = segments.prompt(turns, draft)
    parts = _parts(prompt, documents) if order != "given" else []
    if not parts:
        return draft, prompt, None
    plan = runtime.plan(parts, max_kl)
    if not plan.moves:
        return draft, prompt, None
    # The first part is what stands before the documents, the last the question: both have kinds that keep their places.
    found = Permutation(tuple(index - 1 for index in plan.permutation.order[1:-1]))
    question = draft.content[draft.cuts[-1] :]
    if order == "ranked":
        question = f"{ranking_line(found)}\n\n{question}"
    draft = question_of(question, found.apply(documents))
    return draft, segments.prompt(turns, draft), Reordered(found.order, plan.cached, plan.cached_as_given)


def _parts(prompt: SessionPrompt, documents: Sequence[str]) -> list[Part]:
    """The head, the documents and the question; none where the template does not show each document as it is."""
    segment = prompt.draft
    if segment is None or prompt.whole or segment.whole or len(segment.cuts) != len(documents) + 2:
        return []
    if any(not document or document[0].isspace() for document in documents):
        return []  # its ids depend on whether it is the first
    before = len(prompt.ids) - len(prompt.added) - len(segment.ids)
    ends = [before + cut for cut in segment.cuts[:-1]]
    middle = [Part("document", prompt.ids[start:end]) for start, end in pairwise(ends)]
    return [Part("system", prompt.ids[: ends[0]]), *middle, Part("volatile", prompt.ids[ends[-1] :])]
