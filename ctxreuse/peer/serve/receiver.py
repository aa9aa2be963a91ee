"""Blocks that peers put: accepted only if they are missing, fit, and match their keys."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from ctxreuse.block.format import BlockView, block_layout, parse
from ctxreuse.block.levels import EXACT
from ctxreuse.bus.protocol.base import BlockReceiver
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import prefix_key
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.serve.audit import Auditor, Given
from ctxreuse.peer.serve.owners import Namespace, OwnerIndex
from ctxreuse.peer.serve.prefill import Prefiller
from ctxreuse.peer.serve.withdrawals import Withdrawals
from ctxreuse.store.base import Store

__all__ = ["Contributions", "PutOffer", "StoreReceiver"]

#: Corrupt blocks from one peer after which it is quarantined: its disk may be bad, but then it is no source.
_CORRUPT_LIMIT = 8
#: Namespaces without an engine here whose layout is remembered: peers can invent them.
_LAYOUTS = 1024


class Contributions:
    """Blocks that peers have put into ``store``, and the handling of bad ones. One thread calls.

    ``count(what)`` counts events. Without an ``auditor`` blocks are visible at once.
    """

    def __init__(
        self,
        store: Store,
        owners: OwnerIndex,
        quarantine: Quarantine,
        prefiller: Prefiller | None,
        auditor: Auditor | None,
        withdrawals: Withdrawals,
        count: Callable[[str], None],
    ) -> None:
        self._store, self._owners, self._quarantine = store, owners, quarantine
        self._prefiller, self._auditor, self._count = prefiller, auditor, count
        self._withdrawals = withdrawals
        self._layouts: OrderedDict[Namespace, tuple[bytes, int]] = OrderedDict()
        self._corrupt: Counter[str] = Counter()

    def accept(self, user: str, giver: bytes, namespace: Namespace, view: BlockView, data: memoryview) -> str:
        """Store a checked block or state; returns "" or why it was not stored."""
        key, block = view.header.key, view.header.kind == "block"
        if block and self._store.entries([key])[0] is not None:
            return ""  # another peer was faster
        auditor = self._auditor
        if auditor is not None and not auditor.has_room(namespace.tenant, len(data)):
            return self.reject("busy")
        if auditor is not None and block:
            self._owners.withhold(key, namespace)
        # A state is stored once it has been audited.
        if (block or auditor is None) and not self._store.put(key, data, kind=view.header.kind, giver=giver):
            self._owners.release([key])
            return self.reject("full")
        if auditor is not None:
            auditor.put(Given(namespace.tenant, user, giver, key, namespace.space, data, not block))
        self._count("taken")
        return ""

    def fits(self, namespace: Namespace, view: BlockView) -> bool | None:
        """Return True if a block has the layout of this node's engine for its space, False if not.

        Without an engine for it: True for the layout that the tenant put first, else None, as either may be wrong.
        """
        header = view.header
        if header.kind == "state":
            return True
        mine = header.planes, len(view.tokens)
        model = self._prefiller.spaces.get(header.space) if self._prefiller is not None else None
        if model is not None:
            return mine == (block_layout(model).encoded, model.block_tokens)
        known = self._layouts.setdefault(namespace, mine)
        self._layouts.move_to_end(namespace)
        if len(self._layouts) > _LAYOUTS:
            self._layouts.popitem(last=False)
        return mine == known or None

    def report_corrupt(self, user: str, giver: bytes) -> str:
        """Reject a block that arrived damaged; quarantine the peer if that goes on."""
        self._corrupt[user] += 1
        if self._corrupt[user] >= _CORRUPT_LIMIT:
            self.report_forged(user, giver, "corrupt")
        return self.reject("corrupt")

    def report_forged(self, user: str, giver: bytes, reason: str) -> None:
        """Drop all that a peer put, ever, and quarantine it: it sent what cannot be true."""
        self._count("refused:foreign")
        self._corrupt.pop(user, None)
        self._quarantine.add(user, reason)
        self._withdrawals.withdraw([giver])

    def reject(self, reason: str) -> str:
        """Count and return the reason for which a block is not stored."""
        self._count(f"refused:{reason}")
        return reason


class PutOffer(msgspec.Struct, frozen=True):
    """The offer of a put: keys, and the keys that the items' headers must name as parents; ``end`` is where the context
    ends before the first block (for a state: the position at which it is valid)."""

    user: str
    giver: bytes
    namespace: Namespace
    salt: bytes
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    end: int
    state: bool


class StoreReceiver(BlockReceiver):
    """Checks each item of ``offer`` and hands the good ones to ``contributions``.

    Wrong checksums can come from a bad disk; anything else that is wrong is forged.
    """

    def __init__(self, contributions: Contributions, offer: PutOffer, wanted: Sequence[int]) -> None:
        self._contributions, self._offer = contributions, offer
        self.wanted = tuple(wanted)

    def put(self, item: int, data: memoryview) -> str:
        """See `BlockReceiver.put`."""
        made, user, giver = self._contributions, self._offer.user, self._offer.giver
        namespace = self._offer.namespace
        try:
            view = parse(data)
        except FormatError:
            return made.report_corrupt(user, giver)
        reason = self._forged(item, view)
        if reason:
            made.report_forged(user, giver, reason)
            return "foreign"
        if made.fits(namespace, view) is None:
            return made.reject("foreign")
        try:
            view.verify()
        except FormatError:
            return made.report_corrupt(user, giver)
        return made.accept(user, giver, namespace, view, data)

    def _forged(self, item: int, view: BlockView) -> str:
        """Return the error in a head; "" if it is right."""
        offer, header, size = self._offer, view.header, len(view.tokens)
        key, end = offer.keys[item], offer.end if offer.state else offer.end + (item + 1) * size
        if header.kind != ("state" if offer.state else "block"):
            return "another kind"
        if header.space != offer.namespace.space:
            return "another model space"
        if (header.key, header.parent) != (key, offer.parents[item]):
            return "another key"
        if prefix_key(header.space, offer.salt, header.parent, view.tokens) != key:
            return "token ids that do not hash to the key"
        if header.level != EXACT:
            return "another level"
        if self._contributions.fits(offer.namespace, view) is False:
            return "another layout"
        if header.end != end or (not offer.state and header.rope_at not in (-1, end - size)):
            return "another position"
        return ""
