"""The documents of one message as parts that may change places, and the message in another order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens
from ctxreuse.planner.parts import Part
from ctxreuse.planner.permutation import Permutation
from ctxreuse.planner.planner import Plan

__all__ = ["DocumentOrder", "check_order", "document_order", "document_parts", "ranking_line"]

#: ``cached``: what is cached first; ``ranked``: the same, and the model is told the order given; ``given``: as given.
DocumentOrder = Literal["cached", "ranked", "given"]


def check_order(order: str) -> None:
    """Raise ConfigError for an order that does not exist."""
    if order not in get_args(DocumentOrder):
        raise ConfigError(f"order is {order!r}", fix=f"Use {', '.join(get_args(DocumentOrder))}")


def document_parts(ids: Tokens, ends: Sequence[int], documents: Sequence[str]) -> list[Part]:
    """Return what stands before the documents of a prompt, each of them, and what follows.

    None (an empty list) where a document has other ids in another place, or ``ends`` are not known.

    Args:
        ids: of the prompt, int32 [n].
        ends: where the first document begins, and where each of them ends.
        documents: their texts.
    """
    if len(ends) != len(documents) + 1 or any(not document or document[0].isspace() for document in documents):
        return []  # what begins with a blank depends on whether it is the first
    middle = [Part("document", ids[start:end]) for start, end in pairwise(ends)]
    return [Part("system", ids[: ends[0]]), *middle, Part("volatile", ids[ends[-1] :])]


def document_order(plan: Plan) -> Permutation:
    """Return the order of the documents alone in a plan for `document_parts`."""
    # What stands before them and what follows have kinds that keep their places.
    return Permutation(tuple(index - 1 for index in plan.permutation.order[1:-1]))


def ranking_line(permutation: Permutation) -> str:
    """Return a line that tells a model the order in which documents were given, best first, by their present places."""
    return f"(Documents by relevance, best first: {', '.join(str(at + 1) for at in permutation.inverse.order)}.)"
