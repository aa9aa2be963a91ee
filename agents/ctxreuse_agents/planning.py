"""A question's documents: their order, those whose KV is cached first, and pointers in place of what stands before."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.planner import DocumentOrder, Part, document_order, document_parts, ranking_line, without_repeats
from ctxreuse.runtime import RuntimeProtocol
from ctxreuse.store import Turn
from ctxreuse.why import Reordered
from ctxreuse_agents.inputs import question_of, texts_of
from ctxreuse_agents.segments import Draft, Segments, SessionPrompt, message_of

__all__ = ["plan_documents", "point_to_repeats"]


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
    found = document_order(plan)
    question = draft.content[draft.cuts[-1] :]
    if order == "ranked":
        question = f"{ranking_line(found)}\n\n{question}"
    draft = question_of(question, found.apply(documents))
    return draft, segments.prompt(turns, draft), Reordered(found.order, plan.cached, plan.cached_as_given)


def point_to_repeats(draft: Draft, turns: Sequence[Turn]) -> Draft:
    """Return the draft with pointers in place of its documents that stand before in it or in ``turns``, equal to the
    byte, see `without_repeats`."""
    # Templates may leave out what earlier answers say.
    messages = [message_of(turn) for turn in turns if turn.role != "assistant"]
    before = [text for message in messages for text in texts_of(message.content, message.cuts)]
    *documents, question = texts_of(draft.content, draft.cuts)
    found = without_repeats([*before, *documents])
    return question_of(question, found.texts[len(before) :])


def _parts(prompt: SessionPrompt, documents: Sequence[str]) -> list[Part]:
    """The head, the documents and the question; none where the template does not show each document as it is."""
    segment = prompt.draft
    if segment is None or prompt.whole or segment.whole or len(segment.cuts) != len(documents) + 2:
        return []
    before = len(prompt.ids) - len(prompt.added) - len(segment.ids)
    return document_parts(prompt.ids, [before + cut for cut in segment.cuts[:-1]], documents)
