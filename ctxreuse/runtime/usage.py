"""What a request cost and what it reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from ctxreuse.engines.base import Live, Logits

__all__ = ["Lacking", "Prefilled", "Usage"]


class Lacking(NamedTuple):
    """Tokens ``start`` to ``end`` of a prompt were computed, because of ``reason`` if that is known already: ``gate``,
    ``probe`` or ``slow``, where they were found at another position (see `ctxreuse.why.reasons`)."""

    start: int
    end: int
    reason: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Token counts and seconds of one request; prompt_tokens = cached_tokens + computed ones.

    ``by_source``: reused tokens by the tier they came from (``device``, ``host``, ``disk``; ``edge``, ``cloud``:
    another node's). ``missed``: why the first whole block that had to be computed was not reused, in the store's words
    (``absent``: never stored or evicted, ``corrupt``, ``space``, …; ``level``: held at a worse level than was allowed;
    ``no store``; ``slow``: the disk loses to computing; ``card``: coded with a card that is not here) or the link's
    (``link``: it was cut or became too slow; ``audit``: a peer's blocks were wrong); '' if all whole blocks were.
    Seconds are wall time; where loading overlaps computing, the overlapped part counts as prefill. ``seconds_fetch``:
    waiting for other nodes while nothing else could be done, the question what they hold included; no part of the
    other two. ``fetched_bytes``: payload received from them, used or not.

    ``by_level``: reused tokens by the level of their KV, cards left out (``exact``, ``exact+rans``, ``kl-0.01``, …;
    ``approx``: computed earlier on top of something lossy). ``approx``: something lossy is in, or below, what the
    answer was computed from.

    ``moved``: of the reused tokens those that had stood at another position, or after other tokens, when their KV was
    computed; ``mended``: how many more were moved and then computed again, to repair what moving had damaged; ``gate``:
    what was said of moving, in words: ``kl-0.024 by rotate``, ``refused: …``; "" if there was nothing to move, or
    exact KV was asked for.

    ``request``: its id, by which `Runtime.why` explains it. ``why``: what is known at once of the reason: ``missed``,
    but ``new``, ``evicted``, ``dropped``, ``refused``, ``lost``, ``running`` or ``space`` in place of ``absent`` (see
    `ctxreuse.why.reasons`).
    """

    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int]
    missed: str = ""
    seconds_load: float = 0.0
    seconds_prefill: float = 0.0
    completion_tokens: int = 0
    seconds_fetch: float = 0.0
    fetched_bytes: int = 0
    by_level: dict[str, int] = {}
    approx: bool = False
    request: str = ""
    why: str = ""
    moved: int = 0
    mended: int = 0
    gate: str = ""


class Prefilled:
    """A context in the engine's memory, the logits [vocab] float32 after its last token, and what it cost.

    ``computed``: the runs of its tokens that were not reused, ascending. ``recorded``: its number with the recorder, -1
    if there is none.
    """

    __slots__ = ("computed", "live", "logits", "recorded", "usage")

    def __init__(self, live: Live, logits: Logits, usage: Usage, computed: Sequence[Lacking] = ()) -> None:
        self.live, self.logits, self.usage, self.computed = live, logits, usage, computed
        self.recorded = -1
