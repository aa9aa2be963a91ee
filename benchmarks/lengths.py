"""What drafts would gain if it were known how long answers are: the turns of recorded sessions of an agent, replayed.

The drafter and the policy are the product's, the answers those that were recorded, and what a pass takes by its rows
is one of three tables: SmolLM2 in float32 on one core (measured), a 4-bit model on one core, a GPU. No model runs, so
sessions of hundreds of turns take seconds. One session's turns come after another's, in one caller's memory.

A figure is the rate of tokens against decoding without drafts. Baseline: drafts that go on behind the token that ends
an answer. Peer: classes of turns (by what came before: a user, a tool of which class), of which each has rates of its
own at which drafts are right; the note says what the same rates do as one class, which has more to learn from. Bound:
it is known of each answer how many tokens are left, which no class of lengths (DAS) can tell better.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.corpus import recorded
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.text import HFText, TextModel
from ctxreuse.identity.keys import Tokens
from ctxreuse.models import get
from ctxreuse.pauses.kinds import tool_class
from ctxreuse.speculate import AnswerDrafter, DraftLedger, DraftMemory, DraftPolicy, PassCosts, PassLoad
from ctxreuse.speculate.policy import Confidence

__all__ = ["ClassPolicy", "Turn", "replayed", "run", "turns"]

#: Rows of a pass, and what passes of so many take, against one.
_ROWS = (1, 2, 4, 8, 16, 33)
_PASSES = {
    "float32 on a core": (1.0, 1.43, 1.76, 1.77, 2.32, 3.6),
    "4 bits on a core": (1.0, 1.5, 2.6, 5.0, 7.5, 12.0),
    "GPU": (1.0, 1.01, 1.02, 1.05, 1.1, 1.2),
}
_SESSIONS, _LONGEST, _ALONE = 24, 1024, PassLoad()
#: Tokens that what is known of all turns counts for in a class.
_SHARED = 12


class Turn(NamedTuple):
    """What was said before, the answer with the token that ends it, and the class of what came before."""

    history: Tokens
    answer: Tokens
    kind: str


class ClassPolicy(DraftPolicy):
    """A policy that learns of each class of turns how often drafts are right; ``kind``: that of the answer now."""

    def __init__(self, costs: PassCosts, *, apart: bool = True) -> None:
        """``apart``: if false, all turns are of one class."""
        super().__init__(costs)
        self.kind, self.apart = "", apart
        self._classes: dict[str, dict[Confidence, list[float]]] = {}

    def _seen(self, one: Confidence) -> list[float]:
        like = Confidence(min(one.matched, 32).bit_length(), round(one.share, 1), one.forced)
        return self._classes.setdefault(self.kind, {}).setdefault(like, [0.0, 0.0])

    def chance(self, one: Confidence, ledger: DraftLedger) -> float:
        """See `DraftPolicy.chance`: as far as this class is known, its rate in place of that of all."""
        tried, right = self._seen(one)
        return (right + _SHARED * super().chance(one, ledger)) / (tried + _SHARED)

    def observe(self, tried: Sequence[Confidence], right: int, ledger: DraftLedger) -> None:
        """See `DraftPolicy.observe`."""
        super().observe(tried, right, ledger)
        for at, one in enumerate(tried[: right + 1]):
            seen = self._seen(one)
            seen[0] += 1
            seen[1] += at < right


def turns(text: TextModel, sessions: int) -> Iterator[Turn]:
    """The agent's turns of recorded sessions, in the model's tokens."""
    end = np.array([min(text.stop_ids)], "<i4")
    for session in recorded(sessions):
        history, kind = np.zeros(0, "<i4"), "user"
        for role, said in session:
            ids = np.concatenate([text.encode(said, markers=False), end]).astype("<i4")
            if role == "assistant":
                if len(history):
                    yield Turn(history, ids, kind)
                called = re.search(r'"name": "(\w+)"', said)
                kind = f"tool {tool_class(called[1])}" if called else kind
            elif role == "user":
                kind = "user"
            history = np.concatenate([history, ids]).astype("<i4")


def replayed(
    turns: Sequence[Turn], passes: Sequence[float], policy: DraftPolicy, *, stops: frozenset[int], known: bool = False
) -> float:
    """Return how many times as fast as without drafts the answers come; ``known``: their lengths are."""
    memory, spent, plain = DraftMemory(), 0.0, 0.0
    for turn in turns:
        if isinstance(policy, ClassPolicy) and policy.apart:
            policy.kind = turn.kind
        drafter = AnswerDrafter(policy, memory, "", turn.history, stops=stops)
        memory.learn("", turn.history, [], 16)
        text, at, end = np.concatenate([turn.history, turn.answer]), len(turn.history) + 1, len(turn.history)
        while at < len(text):
            left = (len(text) if known else end + _LONGEST) - at
            draft = drafter.next(text[:at], left, _ALONE)
            right = _agreeing(draft, text[at:])
            came = text[at : at + right + 1]
            seconds = float(np.interp(1 + len(draft), _ROWS, passes))
            policy.costs.observe(1 + len(draft), 1, seconds)
            drafter.checked(came.tolist(), seconds, _ALONE)
            spent, plain, at = spent + seconds, plain + len(came) * passes[0], at + len(came)
        memory.learn("", text, [], 16, len(turn.history))
    return plain / spent


def _agreeing(draft: Tokens, text: Tokens) -> int:
    count = min(len(draft), len(text))
    different = np.flatnonzero(draft[:count] != text[:count])
    return int(different[0]) if len(different) else count


def run(options: Options) -> list[Figure]:
    """Replay."""
    text = HFText.open(get("smollm2"))
    assert text is not None
    made, stops = list(turns(text, options.pick(3, _SESSIONS))), frozenset({min(text.stop_ids)})
    figures = []
    for name, passes in _PASSES.items():
        options.step(name)
        ours = replayed(made, passes, DraftPolicy(PassCosts()), stops=stops)
        one = replayed(made, passes, ClassPolicy(PassCosts(), apart=False), stops=stops)
        figures.append(
            Figure(
                metric=f"rate with drafts, {name}",
                value=ours,
                unit="x",
                baseline=replayed(made, passes, DraftPolicy(PassCosts()), stops=frozenset()),
                peer=replayed(made, passes, ClassPolicy(PassCosts()), stops=stops),
                bound=replayed(made, passes, DraftPolicy(PassCosts()), stops=stops, known=True),
                bar=None if options.quick else 0.97,
                note=f"{len(made)} turns of {len({turn.kind for turn in made})} classes; as one class {one:.3f} x",
            )
        )
    return figures
