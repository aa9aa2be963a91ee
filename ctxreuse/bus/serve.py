"""A node that serves its peers from a store: what each tenant may find, give and have computed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ctxreuse.block import BlockView, block_layout
from ctxreuse.bus.base import Grant, Intake, Matched, Supply
from ctxreuse.bus.serve_audit import Audit, Auditor
from ctxreuse.bus.serve_intake import NOTHING, StoreIntake
from ctxreuse.bus.serve_pack import Packer
from ctxreuse.bus.serve_prefill import Making, MakingSupply, Prefiller, Sealed
from ctxreuse.bus.serve_quarantine import Quarantine
from ctxreuse.bus.serve_supply import StoreSupply
from ctxreuse.bus.tenants import Directory, Line, node_secret
from ctxreuse.errors import LinkRefusedError
from ctxreuse.keys import ROOT, Tokens, as_tokens, prefix_keys
from ctxreuse.store.base import WholeStore

__all__ = ["StoreService"]

log = logging.getLogger(__name__)

#: Corrupt blocks from one peer after which it is kept out: a disk can be bad, but then it should not be listened to.
_SLIPS = 8
#: Keys that a peer gave are remembered, to be dropped if it turns out to lie; those that are not held any more are
#: sorted out whenever there are twice as many as the last time, and more than this.
_GIVEN = 1024
#: Model spaces of tenants, for which no engine is here, whose layout is remembered: peers can invent them.
_LAYOUTS = 1024


class StoreService:
    """See `ctxreuse.bus.base.Service`: one thread calls its methods; `counts` and `close` are for any.

    ``store`` may have other users in this process. ``folder`` keeps the node's secret and the quarantine.
    ``tenant_of``: the tenant of a user of the allow-list, None for an unknown one (``ServerAuth.tenant``).
    ``tenants``: whose blocks the store may hold already (others' are found when they connect). ``prefiller``: who
    computes for peers. ``audit``: looks at given blocks (see `ctxreuse.runtime.audit`), which nobody finds before it
    has. ``making_bytes``: of contexts that are computed and wait in memory for slow peers; more are refused.
    ``packer``: encodes blocks for peers that allow it (it stays the caller's to close; None: all go out as they are
    held). ``quarantine_seconds``: how long a peer that gave false blocks is kept out. ``clock``: seconds since 1970.
    """

    def __init__(
        self,
        store: WholeStore,
        folder: str | os.PathLike[str],
        *,
        tenant_of: Callable[[str], str | None],
        tenants: Iterable[str] = (),
        prefiller: Prefiller | None = None,
        audit: Audit | None = None,
        audit_bytes: int = 128 << 20,
        making_bytes: int = 4 << 30,
        packer: Packer | None = None,
        quarantine_seconds: float = 24 * 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        place = Path(folder)
        self._store, self._tenant_of, self._prefiller = store, tenant_of, prefiller
        self._directory = Directory(store, node_secret(place / "node.secret"), tenants)
        self.quarantine = Quarantine(place / "quarantine.json", seconds=quarantine_seconds, clock=clock)
        self._auditor = Auditor(audit, limit=audit_bytes) if audit is not None else None
        self._making_bytes, self.packer = making_bytes, packer
        self._layouts: OrderedDict[Line, tuple[bytes, int]] = OrderedDict()
        self._gave: dict[str, dict[bytes, None]] = {}
        self._most: dict[str, int] = {}
        self._slips: Counter[str] = Counter()
        self._making: dict[tuple[str, bytes, bytes], Making] = {}
        self._lock = threading.Lock()
        #: What happened, by word: ``taken``, ``served``, ``computed``, ``shared``, ``refused:REASON``, …
        self.counts: Counter[str] = Counter()

    # ---- Service ----

    def admit(self, user: str, node: bytes, spaces: Sequence[bytes]) -> Grant:
        """See `Service.admit`."""
        self._settle()
        reason = self.quarantine.reason(user)
        if reason is not None:
            raise LinkRefusedError(f"this node is in quarantine: {reason}", where="unknown", fix="Ask its operator")
        tenant = self._tenant_of(user)
        if tenant is None:
            raise LinkRefusedError("this node's key is not allowed here", where="unknown")
        computed = tuple(self._prefiller.spaces) if self._prefiller is not None else ()
        return Grant(tenant, self._directory.salt(tenant), computed)

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> Matched:
        """See `Service.match`."""
        self._settle()
        mine = Line(tenant, space)
        n = next((i for i, key in enumerate(keys) if self._directory.line(key) != mine), len(keys))
        found = self._store.match(keys[:n])
        entries = self._store.entries(keys[: found.blocks])
        return Matched(found.blocks, found.state_blocks, sum(entry.nbytes for entry in entries if entry is not None))

    def supply(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> Supply:
        """See `Service.supply`."""
        self._settle()
        mine = Line(tenant, space)
        if not keys or any(self._directory.line(key) != mine for key in keys):
            raise LookupError("not held")
        first = self._store.entries(keys[:1])[0]
        if first is not None:
            self._store.asked(keys, first.tokens)
        self._store.touch([keys[-1]])
        self._count("served", len(keys))
        return StoreSupply(self._store, mine, self._directory.salt(tenant), keys, state)

    def intake(
        self,
        tenant: str,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        parent: bytes,
        *,
        user: str = "",
        state: bool = False,
    ) -> Intake:
        """See `Service.intake`."""
        self._settle()
        if self.quarantine.reason(user) is not None:
            raise LinkRefusedError("this node is in quarantine", where="unknown")
        mine, directory = Line(tenant, space), self._directory
        if state:
            entry = self._store.entries(keys[:1])[0]
            if len(keys) != 1 or entry is None or self._whose(keys[0]) != mine or entry.parent != parent:
                return NOTHING
            wanted = [] if entry.has_state else [0]
            end = entry.end
        else:
            if parent != ROOT and self._whose(parent) != mine:
                return NOTHING
            above = self._store.entries([parent])[0] if parent != ROOT else None
            if parent != ROOT and above is None:
                return NOTHING  # it went since: what follows would be an orphan, at no known position
            end = above.end if above is not None else 0
            wanted = self._lacking(mine, keys, sizes)
        salt, parents = directory.salt(tenant), [parent, *keys[:-1]]
        return StoreIntake(self, mine, salt, user, keys, parents, wanted, end, state)

    def prefill(self, tenant: str, space: bytes, tokens: Tokens, *, first: int, state: bool) -> Supply:
        """See `Service.prefill`."""
        self._settle()
        model = self._prefiller.spaces.get(space) if self._prefiller is not None else None
        if self._prefiller is None or model is None:
            raise LinkRefusedError("this node does not compute for this model", where="space")
        ids, size = as_tokens(tokens), model.block_tokens
        n = len(ids) // size
        if not 0 <= first < n or n * size > model.max_tokens or int(ids.max()) >= model.vocab_size:
            raise LinkRefusedError("these tokens are out of this model's range", where="tokens")
        ids, salt = ids[: n * size], self._directory.salt(tenant)
        keys = prefix_keys(space, salt, ids, size)
        held = self.match(tenant, space, keys)
        if held.blocks == n and (held.state_blocks == n or not model.needs_state):
            return self.supply(tenant, space, keys[first:], state=state)
        # Blocks without their parent could not be stored.
        start = min(first, held.blocks)
        name = tenant, space, keys[-1]
        with self._lock:
            making = self._making.get(name)
        who = making.join() if making is not None and making.first <= start else None
        if making is None or who is None:
            making = Making(model, keys, start, self._keep)
            held_back = sum(other.nbytes for other in self._making.values())
            if held_back and held_back + making.nbytes > self._making_bytes:
                raise LinkRefusedError("too many computed contexts wait for their peers", where="busy")
            who = making.join()
            assert who is not None
            making.cancel = self._prefiller.submit(space, salt, ids, start, making, held.blocks)
            if making.cancel is None:
                raise LinkRefusedError("too many contexts wait to be computed", where="busy")
            self._making[name] = making
            self._count("computed")
        else:
            self._count("shared")
        return MakingSupply(making, who, first, state, lambda: self._made(name, making))

    def held(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """See `Service.held`."""
        self._settle()
        return self._directory.held(tenant)

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """See `Service.changes`."""
        self._settle()
        return self._directory.changes(tenant, since)

    # ---- what a peer gives ----

    def take(self, user: str, line: Line, view: BlockView, data: memoryview) -> str:
        """Store a checked block or state; empty if it was taken, else why not."""
        key, block = view.header.key, view.header.kind == "block"
        if block and self._store.entries([key])[0] is not None:
            return ""  # another peer was faster
        if block and self._auditor is not None:
            self._directory.withhold(key, line)
            if not self._auditor.put(user, key, line.space, data):
                self._directory.release([key])
                return self.refused("busy")
        if not self._store.put(key, data, kind=view.header.kind):
            self._directory.release([key])
            return self.refused("full")
        if block:
            self._remember(user, key)
        self._count("taken")
        return ""

    def _remember(self, user: str, key: bytes) -> None:
        gave = self._gave.setdefault(user, {})
        gave[key] = None
        if len(gave) > self._most.get(user, _GIVEN):
            held = self._store.entries(list(gave))
            self._gave[user] = {known: None for known, entry in zip(gave, held) if entry is not None}
            self._most[user] = max(2 * len(self._gave[user]), _GIVEN)

    def fits(self, line: Line, view: BlockView) -> bool | None:
        """True if a block is laid out like those of our own engine for its space, False if not. Where no engine is for
        that space: True if it is laid out like what this tenant gave first, None if not, as either may be wrong."""
        header = view.header
        if header.kind == "state":
            return True
        mine = header.planes, len(view.tokens)
        model = self._prefiller.spaces.get(header.space) if self._prefiller is not None else None
        if model is not None:
            return mine == (block_layout(model).encoded, model.block_tokens)
        known = self._layouts.setdefault(line, mine)
        self._layouts.move_to_end(line)
        if len(self._layouts) > _LAYOUTS:
            self._layouts.popitem(last=False)
        return mine == known or None

    def slipped(self, user: str) -> str:
        """A block of this peer was damaged: refuse it, and the peer if that goes on."""
        self._slips[user] += 1
        if self._slips[user] >= _SLIPS:
            self.lied(user, "corrupt")
        return self.refused("corrupt")

    def lied(self, user: str, reason: str) -> None:
        """This peer gave what cannot be true: all that it gave is dropped, and it is kept out."""
        self._count("refused:foreign")
        for key in self._gave.pop(user, {}):
            self._store.drop(key, "audit")
        self._slips.pop(user, None)
        self._most.pop(user, None)
        self.quarantine.add(user, reason)

    def _whose(self, key: bytes) -> Line | None:
        return self._directory.line(key) or self._directory.withheld(key)

    def _lacking(self, mine: Line, keys: Sequence[bytes], sizes: Sequence[int]) -> list[int]:
        """Offered blocks that are not held, as many as do not push each other out of the store.

        What another tenant holds lacks here like anything else: nobody shall learn of it by offering its key.
        """
        room = self._store.stats().capacity // 2
        wanted = []
        for i, (key, entry, nbytes) in enumerate(zip(keys, self._store.entries(keys), sizes)):
            if entry is not None and self._whose(key) == mine:
                continue
            room -= nbytes
            if room < 0:
                break
            wanted.append(i)
        return wanted

    def refused(self, reason: str) -> str:
        """Count and return why a block is not taken."""
        self._count(f"refused:{reason}")
        return reason

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    # ---- beside the peers ----

    def _keep(self, key: bytes, data: Sealed, state: bool) -> None:
        self._store.put(key, data, kind="state" if state else "block")

    def _made(self, name: tuple[str, bytes, bytes], making: Making) -> None:
        if self._making.get(name) is making:
            del self._making[name]

    def _settle(self) -> None:
        """Follow the store and the audit."""
        if self._auditor is not None:
            for judged in self._auditor.judged():
                self._directory.release(judged.keys)
                if not judged.sound:
                    for key in judged.keys:
                        self._store.drop(key, "audit")
                    self.lied(judged.user, "audit: K of the first layer is not that of its tokens")
        self._directory.refresh()

    def wait_audits(self, timeout: float) -> bool:
        """True when all given blocks have been audited; False after ``timeout`` seconds. Any thread."""
        return self._auditor is None or self._auditor.wait(timeout)

    def check(self) -> None:
        """Raises AssertionError where parts disagree. O(entries)."""
        self._settle()
        self._directory.check()

    def close(self) -> None:
        """Stop auditing and following the store, which stays open. After the last call of a peer.

        Blocks that have not been audited are dropped: in the next life nobody would know that of them.
        """
        if self._auditor is not None:
            self._auditor.close()
            self._settle()
            for key in self._directory.waiting:
                self._store.drop(key, "audit")
        self._directory.close()
