"""Price every way to get the missing part of a prompt, and choose the one with the least predicted seconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from ctxreuse.block.levels import EXACT, expected_kl
from ctxreuse.cost.levels import Unpacking
from ctxreuse.cost.lines import DecodeLine, DiskLine, PrefillLine
from ctxreuse.cost.log import DecisionLog

__all__ = ["CostModel", "Decision", "FetchPath", "Way"]

#: ``recompute``: compute all that is missing. ``load``: from the local store. ``layers``: fetch, layer by layer, and
#: compute the rest behind the layers as they come. ``tail``: fetch from the end while computing from the front.
Way = Literal["recompute", "load", "layers", "tail"]

#: Seconds that a fetch costs beside its bytes: asking, audit, bookkeeping.
_SETUP = 0.004
#: Bytes/s at which fetched planes are checked and copied (measured 9.9 GB/s by one thread on two cores).
_COPY = 8e9
#: Seconds a token, where nothing has been measured: only to bound how long an answer of a peer is worth waiting for.
_GUESS = 1e-3
#: What waiting for a peer's answer may cost, as a share of computing what is missing.
_PATIENCE = 0.05
#: Computing and receiving at once share the cores: computing takes this share longer, and each byte received takes time
#: from it. Fitted to what both ends at once took over 20 Mbit/s to 1 Gbit/s (``bench fetch``, two cores that also ran
#: the cloud and the link).
_SHARED, _TAKE = 0.08, 4e8
#: A fetch must promise at least this share of the recompute's seconds; less is not worth the peer's bandwidth.
_GAIN = 0.03
#: A finer level may cost so much more than the quickest one.
_FINER = 0.03
#: Price of the risk, as a share of the transfer: in ``layers`` a link that gets slower leaves the engine idle.
_RISK = 0.1
#: Moves that must have been seen before one is declined for its price: the first ones take longest.
_KNOWN = 3
#: Tokens that go through the model together, so that their computing overlaps the arrival of layers.
_TOGETHER = 512


class FetchPath(msgspec.Struct, frozen=True):
    """What fetching from one peer looks like.

    ``token_nbytes``: bytes of one token on the wire; ``bandwidth`` (bytes/s) and ``rtt`` (s) 0 if unknown; ``delay``:
    seconds until the first bytes come, beyond the RTT; ``computes``: the peer makes the blocks now, front to end.
    ``levels``: at which else it may send them, their bytes a token, and the seconds in which it encodes a token.
    """

    token_nbytes: float
    bandwidth: float
    rtt: float = 0.0
    delay: float = 0.0
    computes: bool = False
    levels: tuple[tuple[str, float, float], ...] = ()


class _Span(NamedTuple):
    """Tokens of a prompt: ``cached`` here, a peer has those up to ``reach``, of ``total``."""

    cached: int
    reach: int
    total: int


class _Priced(NamedTuple):
    """One way at one level: seconds until the logits; with what stands for its risk; until the last byte that is used
    is here; and tokens that are fetched."""

    seconds: float
    risked: float
    wire: float
    tokens: int


class Decision(msgspec.Struct, frozen=True):
    """The chosen way, its predicted seconds until the logits (None: unknown), those of all ways that were priced (at
    the quickest level), and the soft deadline: the seconds after which recomputing would have been as good (None:
    unknown).

    ``level``: the finest one at which this is no more than a little slower than at the quickest, ``within``: seconds by
    which its last byte has to be here for that (0: unknown), and ``tokens``: how many will then have been fetched.
    """

    way: Way
    predicted: float | None
    ways: dict[str, float]
    deadline: float | None
    level: str = EXACT
    within: float = 0.0
    tokens: int = 0


class _Dump(msgspec.Struct, array_like=True):
    version: int
    prefill: list[tuple[float, ...]]
    decode: list[tuple[float, ...]]
    disk: list[tuple[float, ...]]
    unpack: dict[str, list[tuple[float, ...]]] = {}


class CostModel:
    """What one engine on one machine takes for everything it does. Any thread may call.

    Nothing is known before the first observation. Then a fetch is made only in the way that cannot lose by
    construction: from the end, while computing goes on from the front as if there were no fetch.
    """

    def __init__(self, *, log: DecisionLog | None = None) -> None:
        self.prefill, self.decode, self.disk = PrefillLine(), DecodeLine(), DiskLine()
        #: Relocating chunks, probes included. Not saved: a process that stopped relocating because it once was slow
        #: would never learn that it no longer is.
        self.relocate = DiskLine()
        self.unpack = Unpacking()
        self.log = log if log is not None else DecisionLog()

    def dump(self) -> bytes:
        """Return the observations, for `restore` after a restart."""
        lines = self.prefill.dump(), self.decode.dump(), self.disk.dump(), self.unpack.dump()
        return msgspec.msgpack.encode(_Dump(1, *lines))

    def restore(self, data: bytes) -> bool:
        """Take what `dump` gave; False, and nothing changes, if the bytes are none of it."""
        try:
            cached = msgspec.msgpack.decode(data, type=_Dump)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if cached.version != 1:
            return False
        self.prefill.restore(cached.prefill)
        self.decode.restore(cached.decode)
        self.disk.restore(cached.disk)
        self.unpack.restore(cached.unpack)
        return True

    def patience(self, missing: int, cached: int) -> float:
        """Return the seconds that asking another node for ``missing`` tokens behind ``cached`` ones may take."""
        whole = self.prefill.seconds(missing, cached)
        return _PATIENCE * (missing * _GUESS if whole is None else whole)

    def loads(self, tokens: int, nbytes: int) -> bool:
        """Return True if loading a stored prefix is predicted to beat computing it, or one of them is unknown."""
        load, compute = self.disk.seconds(nbytes), self.prefill.seconds(tokens)
        return load is None or compute is None or load < compute

    def local(self, cached_nbytes: int, missing: int, cached: int) -> float | None:
        """Predict loading ``cached_nbytes`` and computing ``missing`` tokens behind ``cached`` ones; None if
        unknown."""
        load, compute = self.disk.seconds(cached_nbytes), self.prefill.seconds(missing, cached)
        return None if load is None or compute is None else load + compute

    def relocation_pays(self, nbytes: int, missing: int, left: int, cached: int) -> bool:
        """Return True if relocating chunks is predicted to beat computing all ``missing`` tokens, or little is known.

        ``nbytes`` of stored chunks leave ``left`` of those tokens, behind the ``cached`` ones, to compute.
        """
        whole, rest = self.prefill.seconds(missing, cached), self.prefill.seconds(left, cached)
        relocate = self.relocate.seconds(nbytes) if len(self.relocate) >= _KNOWN else None
        return relocate is None or whole is None or rest is None or relocate + rest < whole

    def meeting_point(self, start: int, end: int, rate: float, lead: float) -> int | None:
        """Return how many tokens from ``start`` on to compute until both ends meet; None if the speed is unknown.

        The link brings the tokens before ``end``, the last first, at ``rate`` tokens/s after ``lead`` seconds.
        """
        gap = end - start
        if self.prefill.seconds(1) is None:
            return None
        low, high = 0, gap  # the least x with C(x) >= lead + (gap - x) / rate
        while low < high:
            x = (low + high) // 2
            fetched = lead + (gap - x) / rate if rate > 0 else float("inf")
            if (self.prefill.seconds(x, start) or 0.0) >= fetched:
                high = x
            else:
                low = x + 1
        return low

    def choose(self, cached: int, reach: int, total: int, path: FetchPath, layers: int) -> Decision:
        """Choose how to get tokens ``cached`` to ``total`` of a prompt if a peer has those up to ``reach``.

        ``layers``: how many layers have planes. All in tokens; ``cached <= reach < total``.
        """
        compute = self.prefill.seconds(total - cached, cached)
        rest = self.prefill.seconds(total - reach, reach)
        if compute is None or rest is None or path.bandwidth <= 0:
            # Of an unknown link it is only known that fewer bytes come sooner.
            level = min(path.levels, key=lambda one: one[1], default=(EXACT, 0.0, 0.0))[0]
            return Decision("recompute" if path.computes else "tail", None, {}, compute, level)
        span = _Span(cached, reach, total)
        priced = {
            level: self._priced(level, nbytes, making, span, path, layers)
            for level, nbytes, making in ((EXACT, path.token_nbytes, 0.0), *path.levels)
        }
        ways: dict[str, float] = {"recompute": compute}
        for of in priced.values():
            for way, one in of.items():
                ways[way] = min(ways.get(way, one.seconds), one.seconds)
        best = {level: min(of, key=lambda way: of[way].risked) for level, of in priced.items()}
        least = min(priced[level][way].risked for level, way in best.items())
        if compute * (1 - _GAIN) <= least:
            return Decision("recompute", compute, ways, compute)
        # Of equal damage the quicker; of what is quick enough the least damage.
        level = min(
            (level for level, way in best.items() if priced[level][way].risked <= least * (1 + _FINER)),
            key=lambda level: (expected_kl(level), priced[level][best[level]].risked),
        )
        way, chosen = best[level], priced[level][best[level]]
        within = chosen.wire + max(0.0, least * (1 + _FINER) - chosen.risked)
        return Decision(way, chosen.seconds, ways, compute, level, within, chosen.tokens)  # type: ignore[arg-type]

    def _priced(
        self, level: str, token_nbytes: float, making: float, span: _Span, path: FetchPath, layers: int
    ) -> dict[str, _Priced]:
        """Price every way to fetch at a level whose tokens take the peer ``making`` seconds each to encode."""
        cached, reach, total = span
        rest = self.prefill.seconds(total - reach, reach) or 0.0
        exact, n = level == EXACT, reach - cached
        nbytes = n * token_nbytes
        wire = nbytes / path.bandwidth
        # Decoding goes on beside the link as copying does, and is counted in its place.
        copy = n * path.token_nbytes / _COPY if exact else self.unpack.seconds(level, int(n * path.token_nbytes))
        lead = _SETUP + path.rtt + path.delay
        made = lead + n * making  # all is encoded before the first layer goes
        first = (self.prefill.seconds(min(total - reach, _TOGETHER), reach) or 0.0) if total > reach else 0.0
        slices = max(layers, 1)
        if exact:
            arrived = wire + copy
        else:
            arrived = max(wire, copy) + min(wire, copy) / slices
        seconds = made + max(arrived + first / slices, max(wire, 0 if exact else copy) / slices + first) + rest - first
        ways = {"layers": _Priced(seconds, seconds + _RISK * wire, made + wire, n)}
        if not path.computes:
            each = max(token_nbytes / path.bandwidth, making)  # encoded beside the link
            x = self.meeting_point(cached, reach, 1 / each, lead) or 0
            fetched = n - x
            computed = (1 + _SHARED) * (self.prefill.seconds(x, cached) or 0.0) + fetched * token_nbytes / _TAKE
            load = 2 * fetched * path.token_nbytes / _COPY
            if not exact:
                load = self.unpack.seconds(level, int(fetched * path.token_nbytes)) if fetched else 0.0
            seconds = max(computed, lead + fetched * each) + load + rest
            ways["tail"] = _Priced(seconds, seconds, lead + fetched * each, fetched)
        return ways
