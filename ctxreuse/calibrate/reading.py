"""What attending to runs where they are held does to the next tokens: quantised, and with some of the pages only."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ctxreuse.block import parse
from ctxreuse.calibrate.bounds import upper_bound
from ctxreuse.calibrate.gather import Progress
from ctxreuse.engines.moving import HeldFormat, Rows
from ctxreuse.engines.text import TextModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.scoring import Fidelity, Scores, score, score_each
from ctxreuse.errors import EngineError
from ctxreuse.keys import KEY_BYTES, ROOT, Tokens
from ctxreuse.reuse.attend import Held, HeldMove, Selection
from ctxreuse.reuse.card import Read

__all__ = ["READINGS", "Reading", "measure_reading"]

#: From dear to cheap: what is read of a byte of int8, and how much of it.
READINGS: tuple[tuple[HeldFormat, Selection | None], ...] = (
    ("int8", None),
    ("int4", None),
    ("int8", Selection(1 / 2)),
    ("int8", Selection(1 / 4)),
)
#: What a run that was not moved counts as while nobody knows what its reading is worth.
_LEVEL = "approx~kl-9"


class Reading(NamedTuple):
    """``windows`` texts of ``lead`` computed tokens, ``held`` ones, and ``following`` that are scored one by one."""

    windows: int
    lead: int
    held: int
    following: int
    readings: tuple[tuple[HeldFormat, Selection | None], ...] = READINGS

    @property
    def tokens(self) -> int:
        """Of one window, with the token that the last score is of."""
        return self.lead + self.held + self.following + 1


def measure_reading(
    engine: TorchEngine, texts: Sequence[str], text: TextModel, settings: Reading, progress: Progress
) -> tuple[list[Read], dict[str, str]]:
    """What each reading costs, and why some could not be measured, by name.

    Nothing is moved here, so this is what reading alone does. Tokens are scored one by one, as answers are generated:
    forwards of many tokens read all pages.
    """
    found: dict[tuple[HeldFormat, Selection | None], list[Fidelity]] = {}
    refused: dict[str, str] = {}
    steps, done = settings.windows * len(settings.readings), 0
    for ids in _windows(texts, text, settings):
        rows, exact = _computed(engine, ids, settings)
        for format, selection in settings.readings:
            progress("held runs", done, steps)
            done += 1
            try:
                seen = _scored(engine, ids, engine.hold(rows, format), selection, settings)
            except EngineError as error:
                refused[f"held as {format}"] = error.what
                continue
            found.setdefault((format, selection), []).append(seen.against(exact))
    progress("held runs", steps, steps)
    return [_read(*how, seen, settings) for how, seen in found.items()], refused


def _windows(texts: Sequence[str], text: TextModel, settings: Reading) -> Iterator[Tokens]:
    """One window a text, from those that are long enough; then their second ones, and so on."""
    ids = [text.encode(one, markers=False) for one in texts]
    given, at = 0, 0
    while given < settings.windows and any(len(one) - at >= settings.tokens for one in ids):
        for one in ids:
            if given < settings.windows and len(one) - at >= settings.tokens:
                given += 1
                yield np.ascontiguousarray(one[at : at + settings.tokens], "<i4")
        at += settings.tokens


def _computed(engine: TorchEngine, ids: Tokens, settings: Reading) -> tuple[list[Rows], Scores]:
    """The rows to be held, and the exact scores of what follows."""
    context, size = settings.lead + settings.held, engine.space.block_tokens
    live = engine.start(len(ids))
    engine.prefill(live, ids[:context])
    keys = [bytes([number % 256]) * KEY_BYTES for number in range(context // size)]
    blocks = [parse(block) for block in engine.export(live, keys, ROOT, 0)]
    spans = [(max(settings.lead - at, 0), min(context - at, size)) for at in range(0, context, size)]
    rows = [Rows(block, a, b - a) for block, (a, b) in zip(blocks, spans) if a < b]
    return rows, score(engine, live, ids[context:])


def _scored(engine: TorchEngine, ids: Tokens, run: Held, selection: Selection | None, settings: Reading) -> Scores:
    """What the model says of the text that follows, reading the held run token by token."""
    live = engine.start(settings.lead + settings.following + 1)
    engine.prefill(live, ids[: settings.lead])
    context = settings.lead + settings.held
    move = HeldMove(settings.lead, run, 0, len(run))
    engine.show(live, ids[settings.lead : context], [move], _LEVEL, selection=selection)
    return score_each(engine, live, ids[context:])


def _read(format: HeldFormat, selection: Selection | None, seen: Sequence[Fidelity], settings: Reading) -> Read:
    kl = [one.kl for one in seen]
    return Read(
        format=format,
        selection=selection,
        tokens=settings.held,
        kl=statistics.fmean(kl),
        kl_high=upper_bound(kl),
        top1=statistics.fmean(one.top1 for one in seen),
        dnll=statistics.fmean(one.dnll for one in seen),
        windows=len(seen),
    )
