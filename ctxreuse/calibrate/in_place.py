"""How in-place attention changes the next tokens: with quantised runs, and with some of the pages only."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.calibrate.bounds import upper_bound
from ctxreuse.calibrate.gather import Progress
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.engines.chunks import BlockRows, RunFormat
from ctxreuse.engines.text import TextModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.fidelity import Scores, score, score_each
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import KEY_BYTES, ROOT, Tokens
from ctxreuse.reuse.inplace import AttachedRun, PinnedRun, Selection
from ctxreuse.reuse.profile import InPlaceMeasurement

__all__ = ["FORMATS", "InPlaceSettings", "measure_in_place"]

#: From dear to cheap: the format of a run, and which of its pages are read.
FORMATS: tuple[tuple[RunFormat, Selection | None], ...] = (
    ("int8", None),
    ("int4", None),
    ("int8", Selection(1 / 2)),
    ("int8", Selection(1 / 4)),
)
#: The level of attached rows while their accuracy is unknown.
_LEVEL = "approx~kl-9"


class InPlaceSettings(NamedTuple):
    """``windows`` texts of ``lead`` computed tokens, ``attached`` ones, and ``following`` scored one by one."""

    windows: int
    lead: int
    attached: int
    following: int
    formats: tuple[tuple[RunFormat, Selection | None], ...] = FORMATS

    @property
    def tokens(self) -> int:
        """Tokens of a window, the target of the last score included."""
        return self.lead + self.attached + self.following + 1


def measure_in_place(
    engine: TorchEngine, texts: Sequence[str], text: TextModel, settings: InPlaceSettings, progress: Progress
) -> tuple[list[InPlaceMeasurement], dict[str, str]]:
    """Measure each format; returns what was measured, and why others could not be, by name.

    Nothing is relocated here. Tokens are scored one by one, as answers are generated: forwards of many tokens read all
    pages.
    """
    found: dict[tuple[RunFormat, Selection | None], list[Fidelity]] = {}
    refused: dict[str, str] = {}
    steps, done = settings.windows * len(settings.formats), 0
    for ids in _windows(texts, text, settings):
        rows, exact = _computed(engine, ids, settings)
        for format, selection in settings.formats:
            progress("attached runs", done, steps)
            done += 1
            try:
                seen = _scored(engine, ids, engine.chunks.pin_run(rows, format), selection, settings)
            except EngineError as error:
                refused[f"pinned as {format}"] = error.what
                continue
            found.setdefault((format, selection), []).append(seen.against(exact))
    progress("attached runs", steps, steps)
    return [_read(*how, seen, settings) for how, seen in found.items()], refused


def _windows(texts: Sequence[str], text: TextModel, settings: InPlaceSettings) -> Iterator[Tokens]:
    """One window a text, from those that are long enough; then their second ones, and so on."""
    ids = [text.encode(one, markers=False) for one in texts]
    given, at = 0, 0
    while given < settings.windows and any(len(one) - at >= settings.tokens for one in ids):
        for one in ids:
            if given < settings.windows and len(one) - at >= settings.tokens:
                given += 1
                yield np.ascontiguousarray(one[at : at + settings.tokens], "<i4")
        at += settings.tokens


def _computed(engine: TorchEngine, ids: Tokens, settings: InPlaceSettings) -> tuple[list[BlockRows], Scores]:
    """Return the rows to pin, and the exact scores of what follows."""
    end, size = settings.lead + settings.attached, engine.space.block_tokens
    context = engine.new_context(len(ids))
    engine.prefill(context, ids[:end])
    keys = [bytes([number % 256]) * KEY_BYTES for number in range(end // size)]
    blocks = [parse(block) for block in engine.export(context, keys, ROOT, 0)]
    spans = [(max(settings.lead - at, 0), min(end - at, size)) for at in range(0, end, size)]
    rows = [BlockRows(block, a, b - a) for block, (a, b) in zip(blocks, spans) if a < b]
    return rows, score(engine, context, ids[end:])


def _scored(
    engine: TorchEngine, ids: Tokens, run: PinnedRun, selection: Selection | None, settings: InPlaceSettings
) -> Scores:
    """Score the text that follows token by token, with the run attached."""
    context = engine.new_context(settings.lead + settings.following + 1)
    engine.prefill(context, ids[: settings.lead])
    end = settings.lead + settings.attached
    move = AttachedRun(settings.lead, run, 0, len(run))
    engine.chunks.attach(context, ids[settings.lead : end], [move], _LEVEL, selection=selection)
    return score_each(engine, context, ids[end:])


def _read(
    format: RunFormat, selection: Selection | None, seen: Sequence[Fidelity], settings: InPlaceSettings
) -> InPlaceMeasurement:
    kl = [one.kl for one in seen]
    return InPlaceMeasurement(
        format=format,
        selection=selection,
        tokens=settings.attached,
        kl=statistics.fmean(kl),
        kl_high=upper_bound(kl),
        top1=statistics.fmean(one.top1 for one in seen),
        dnll=statistics.fmean(one.dnll for one in seen),
        windows=len(seen),
    )
