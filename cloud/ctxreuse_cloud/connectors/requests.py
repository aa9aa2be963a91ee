"""Requests of another engine's scheduler: which blocks of each are stored, to be loaded, and to be saved.

No input or output happens here. The scheduler asks how much of a prompt is stored (`RequestBlocks.match`), says which
pages it gave (`allocated`) and at the end of each step how far requests will be computed (`step`); it gets a `StepPlan`
for the worker that has the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.identity.keys import ROOT, as_tokens, prefix_keys, tenant_salt
from ctxreuse.pauses.envelope import HintOrder
from ctxreuse.recent import keep_newest

__all__ = ["HintedContext", "PagedBlock", "PlannedSave", "RequestBlocks", "StepPlan", "StepProgress"]

#: Saves that may wait to be confirmed; of more, the oldest are not announced.
_MOST_PLANNED = 1 << 16


class PagedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block and the page that it is in or shall be in: ``tokens`` as int32 bytes, ``end`` after the last of them.

    ``page``: where pages hold several blocks, the number of the block among those of all pages (`LayerPages`).
    """

    key: bytes
    parent: bytes
    tokens: bytes
    end: int
    page: int


class HintedContext(msgspec.Struct, frozen=True, array_like=True):
    """Keys of a context's whole blocks, as far as a hint goes, what it asks for, and whose context it is."""

    keys: list[bytes]
    order: HintOrder
    tenant: str


class StepPlan(msgspec.Struct, array_like=True):
    """What a worker does in one step: loads before its forward, one run of blocks a request, and saves after it;
    ``hinted``: contexts of requests that have ended, to be kept longer or less long."""

    loads: list[list[PagedBlock]] = []
    saves: list[list[PagedBlock]] = []
    hinted: list[HintedContext] = []


class PlannedSave(NamedTuple):
    """A block whose save was planned; ``tenant``: of its request, if it is the first of one, else ""."""

    block: PagedBlock
    tenant: str


class StepProgress(NamedTuple):
    """A request in one step: its tokens so far are computed up to position ``end`` then, in ``pages``."""

    request: str
    end: int
    pages: Sequence[int]


class _Known:
    """One request: its tenant, salt and tokens (which grow), keys of whole blocks, how many blocks need no saving."""

    def __init__(self, tokens: Sequence[int], tenant: str, salt: bytes) -> None:
        self.tokens, self.tenant, self.salt = tokens, tenant, salt
        self.keys: list[bytes] = []
        self.stored = self.local = 0
        self.pages: list[int] = []


class RequestBlocks:
    """The blocks of all requests under way. Not thread-safe: a scheduler has one thread."""

    def __init__(
        self, space: bytes, block_tokens: int, secret: bytes = b"", *, announces: bool = False, page_blocks: int = 1
    ) -> None:
        """Make keys in the space of that digest; ``secret`` makes those of tenants unguessable.

        ``announces``: remember the blocks of saves for `stored`. ``page_blocks``: how many blocks a page holds.
        """
        self._space, self._size, self._secret, self._page_blocks = space, block_tokens, secret, page_blocks
        self._planned: dict[bytes, PlannedSave] | None = {} if announces else None
        self._known: dict[str, _Known] = {}
        self._loads: list[list[PagedBlock]] = []
        self._hinted: list[HintedContext] = []

    def __len__(self) -> int:
        return len(self._known)

    def match(
        self,
        request: str,
        tokens: Sequence[int],
        tenant: str,
        computed: int,
        stored: Callable[[Sequence[bytes]], int],
    ) -> int:
        """Return how many tokens of a prompt after the first ``computed`` ones are stored; a request may come again.

        Only whole pages count: an engine computes the rest of one that is stored in part.

        Args:
            request: its id.
            tokens: its tokens, a sequence that grows with its answer.
            tenant: what separates its KV from that of others, such as vLLM's ``cache_salt``.
            computed: tokens that the engine has already, whole pages.
            stored: called with keys; returns how many of the first are stored.
        """
        known = _Known(tokens, tenant, tenant_salt(tenant, self._secret))
        self._known[request] = known
        # An engine needs at least one token to compute, for its logits.
        self._extend(known, (len(tokens) - 1) // self._size)
        found = stored(known.keys) if known.keys else 0
        known.stored = found - found % self._page_blocks
        known.local = computed // self._size
        return max(0, known.stored * self._size - computed)

    def allocated(self, request: str, pages: Sequence[int], tokens: int) -> None:
        """Note that ``tokens`` of those that `match` found shall be loaded into the request's ``pages``."""
        known = self._known.get(request)
        if known is None or tokens <= 0:
            return
        first = known.local
        self._loads.append(self._blocks(known, first, first + tokens // self._size, pages))

    def step(self, progress: Iterable[StepProgress]) -> StepPlan:
        """Return the plan of a step and forget the loads and hints in it."""
        plan = StepPlan(self._loads, [], self._hinted)
        self._loads, self._hinted = [], []
        for request, end, pages in progress:
            known = self._known.get(request)
            if known is None:
                continue
            # Tokens that a draft proposes are computed too, and may be dropped: only those of the request count.
            whole = min(end, len(known.tokens)) // self._size
            known.pages = list(pages[: -(-whole // self._page_blocks)])
            if whole > known.stored:
                self._extend(known, whole)
                run = self._blocks(known, known.stored, whole, pages)
                plan.saves.append(run)
                known.stored = whole
                if self._planned is not None:
                    for block in run:
                        first = block.parent == ROOT
                        self._planned[block.key] = PlannedSave(block, known.tenant if first else "")
                    self._planned = keep_newest(self._planned, _MOST_PLANNED)
        return plan

    def stored(self, keys: Iterable[bytes]) -> list[PlannedSave]:
        """Return those among ``keys`` whose saves were planned here, each once."""
        planned = self._planned if self._planned is not None else {}
        return [planned.pop(key) for key in keys if key in planned]

    def failed(self, pages: Collection[int]) -> None:
        """Note pages that could not be loaded: they are computed again, and then saved again."""
        for known in self._known.values():
            bad = next((i for i, page in enumerate(known.pages) if page in pages), None)
            if bad is not None:
                known.stored = min(known.stored, bad * self._page_blocks)

    def finished(self, request: str, orders: Iterable[HintOrder] = ()) -> None:
        """Forget a request; ``orders``: what it asked for its context, for the next step."""
        known = self._known.pop(request, None)
        if known is None:
            return
        for order in orders:
            blocks = known.stored if order.tokens is None else min(known.stored, order.tokens // self._size)
            if blocks:
                self._hinted.append(HintedContext(known.keys[:blocks], order, known.tenant))

    def _extend(self, known: _Known, blocks: int) -> None:
        start = len(known.keys)
        if blocks > start:
            more = as_tokens(np.asarray(known.tokens[start * self._size : blocks * self._size], np.int64))
            parent = known.keys[-1] if known.keys else ROOT
            known.keys += prefix_keys(self._space, known.salt, more, self._size, parent)

    def _blocks(self, known: _Known, first: int, last: int, pages: Sequence[int]) -> list[PagedBlock]:
        size, count = self._size, self._page_blocks
        ids = as_tokens(np.asarray(known.tokens[first * size : last * size], np.int64))
        return [
            PagedBlock(
                known.keys[i],
                known.keys[i - 1] if i else ROOT,
                ids[(i - first) * size : (i - first + 1) * size].tobytes(),
                (i + 1) * size,
                int(pages[i // count]) * count + i % count,
            )
            for i in range(first, last)
        ]
