"""A node that serves peers from a store: lookups, puts and prefills by tenant."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from ctxreuse.bus.protocol.base import BlockReceiver, BlockSource, Grant, MatchResult, PutRequest, VerifySource
from ctxreuse.bus.protocol.messages import JudgeRule, Verify
from ctxreuse.errors import ConfigError, LinkRefusedError, StoreError
from ctxreuse.fair import Shares
from ctxreuse.identity.keys import ROOT, Tokens, as_tokens, giver_id, prefix_keys
from ctxreuse.identity.model import ModelSpace
from ctxreuse.judge import MAX_STEP, JudgeProfile, JudgeProfileStore
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.serve.audit import Audit, Auditor, AuditResult
from ctxreuse.peer.serve.checker import sampling_of
from ctxreuse.peer.serve.encoder import BlockEncoder
from ctxreuse.peer.serve.forgetting import DeletionMark, Forgetting
from ctxreuse.peer.serve.owners import Namespace, OwnerIndex, node_secret
from ctxreuse.peer.serve.prefill import Prefiller, PrefillJob, PrefillSource, Sealed
from ctxreuse.peer.serve.receiver import Contributions, PutOffer, StoreReceiver
from ctxreuse.peer.serve.source import StoreSource
from ctxreuse.peer.serve.verify import DraftVerifier, VerifyJob
from ctxreuse.peer.serve.withdrawals import Withdrawals
from ctxreuse.store.base import Store

__all__ = ["ServeOptions", "StoreService"]

#: In the folder: when the first deletion was since the cache was rewritten.
DELETED_FILE = "deleted"
#: How long a peer that put forged blocks is kept out.
_QUARANTINE_SECONDS = 24 * 3600.0
#: Bytes of blocks that may wait for the audit; of this and the next limit each tenant has a share.
_AUDIT_BYTES = 128 << 20
#: Bytes of computed contexts that may wait in memory for slow peers; more are refused.
_PREFILL_BYTES = 4 << 30
#: Answers that are decoded for peers at once; each tenant has a share.
_ANSWERS = 64


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a `StoreService`.

    Attributes:
        tenant_of: the tenant of a user of the allow-list, None for an unknown one (`ServerAuth.tenant`).
        giver_of: how blocks of such a user are marked (`ServerAuth.giver`; default: by its name).
        revoked: marks of users whose blocks are dropped, now and whenever it changes (`AllowList.revoked`).
        tenants: tenants whose blocks may be in the store already; those of others are found when they connect.
        prefiller: computes for peers.
        verifier: decodes answers that peers draft.
        judges: how far a model is trusted to judge steps of answers (default: as this user's profiles say).
        audit: examines blocks that peers put, which are not visible before (see `runtime.fetch.audit`).
        encoder: encodes blocks for peers that allow it (the caller closes it); None: they are sent as stored.
        clock: seconds since 1970.
    """

    tenant_of: Callable[[str], str | None]
    giver_of: Callable[[str], bytes] = lambda user: giver_id(user.encode())
    revoked: Callable[[], frozenset[bytes]] = frozenset
    tenants: Iterable[str] = ()
    prefiller: Prefiller | None = None
    verifier: DraftVerifier | None = None
    judges: Callable[[ModelSpace], JudgeProfile | None] = lambda space: JudgeProfileStore().find(space)
    audit: Audit | None = None
    encoder: BlockEncoder | None = None
    clock: Callable[[], float] = time.time


class StoreService:
    """A `Service` over a store: one thread calls its methods; `counts` and `close` are for any.

    Args:
        store: May have other users in this process.
        folder: Keeps the node's secret and the quarantine.
        options: See `ServeOptions`.
    """

    def __init__(self, store: Store, folder: str | os.PathLike[str], options: ServeOptions) -> None:
        place = Path(folder)
        self.encoder = options.encoder
        self._store, self._tenant_of, self._prefiller = store, options.tenant_of, options.prefiller
        self._verifier, self._judges = options.verifier, options.judges
        self._owners = owners = OwnerIndex(store, node_secret(place / "node.secret"), options.tenants)
        store.share_by(owners.over_share)
        self.quarantine = Quarantine(place / "quarantine.json", seconds=_QUARANTINE_SECONDS)
        self._auditor = None
        if options.audit is not None:
            self._auditor = Auditor(options.audit, limit=_AUDIT_BYTES, alone=owners.has_one_tenant)
        self.deleted = DeletionMark(place / DELETED_FILE, options.clock)
        self._forgetting = Forgetting(store, owners, self.deleted, options.clock)
        self._withdrawals = Withdrawals(store, self._owners, place / "withdrawn")
        self._contributions = Contributions(
            store, self._owners, self.quarantine, self._prefiller, self._auditor, self._withdrawals, self._count
        )
        self._giver_of, self._revoked, self._seen = options.giver_of, options.revoked, frozenset[bytes]()
        self._jobs: dict[tuple[str, bytes, bytes], PrefillJob] = {}
        self._used = deque[Sequence[bytes]]()  # by fetches of which the store does not know yet
        self._answers = Shares[str](_ANSWERS, owners.has_one_tenant)
        self._prefill_bytes = Shares[str](_PREFILL_BYTES, owners.has_one_tenant)
        self._lock = threading.Lock()
        #: Events by name: ``taken``, ``served``, ``computed``, ``shared``, ``refused:REASON``, …
        self.counts: Counter[str] = Counter()
        # The last process may have ended before all was dropped.
        self._withdrawals.withdraw({self._giver_of(user) for user in self.quarantine.names()})
        self._follow_revoked()

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
        verified = tuple(self._verifier.verifies()) if self._verifier is not None else ()
        return Grant(tenant, self._owners.salt(tenant), computed, verified)

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> MatchResult:
        """See `Service.match`."""
        self._settle()
        mine = Namespace(tenant, space)
        n = next((i for i, key in enumerate(keys) if self._owners.owner(key) != mine), len(keys))
        found = self._store.match(keys[:n])
        entries = self._store.entries(keys[: found.blocks])
        return MatchResult(
            found.blocks, found.state_blocks, sum(entry.nbytes for entry in entries if entry is not None)
        )

    def open_fetch(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> BlockSource:
        """See `Service.open_fetch`."""
        self._settle()
        mine = Namespace(tenant, space)
        if not keys or any(self._owners.owner(key) != mine for key in keys):
            raise LookupError("not found")
        self._count("served", len(keys))
        self._used.append(keys)
        return StoreSource(self._store, mine, self._owners.salt(tenant), keys, state, self._learn)

    def _learn(self) -> None:
        """Tell the store what was fetched, at the next call or a fetch's end: it takes as long as reading a block."""
        while self._used:
            keys = self._used.popleft()
            with contextlib.suppress(StoreError):  # closed or unreadable by now: its policy learns less, no fetch fails
                first = self._store.entries(keys[:1])[0]
                if first is not None:
                    self._store.on_lookup(keys, first.tokens)
                self._store.touch([keys[-1]])

    def open_put(self, tenant: str, request: PutRequest, *, user: str = "") -> BlockReceiver:
        """See `Service.open_put`."""
        self._settle()
        if self.quarantine.reason(user) is not None:
            raise LinkRefusedError("this node is in quarantine", where="unknown")
        keys, sizes, parent = request.keys, request.sizes, request.parent
        mine, wanted, end = Namespace(tenant, request.space), list[int](), 0
        if request.state:
            entry = self._store.entries(keys[:1])[0]
            if len(keys) == 1 and entry is not None and self._namespace(keys[0]) == mine and entry.parent == parent:
                wanted, end = [] if entry.has_state else [0], entry.end
        elif parent == ROOT:
            wanted = self._missing(mine, keys, sizes)
        elif self._namespace(parent) == mine:
            above = self._store.entries([parent])[0]
            if above is not None:  # else what follows would be an orphan, at no known position
                wanted, end = self._missing(mine, keys, sizes), above.end
        offer = PutOffer(
            user, self._giver_of(user), mine, self._owners.salt(tenant), keys, [parent, *keys[:-1]], end, request.state
        )
        return StoreReceiver(self._contributions, offer, wanted)

    def open_prefill(self, tenant: str, space: bytes, tokens: Tokens, *, first: int, state: bool) -> BlockSource:
        """See `Service.open_prefill`."""
        self._settle()
        model = self._prefiller.spaces.get(space) if self._prefiller is not None else None
        if self._prefiller is None or model is None:
            raise LinkRefusedError("this node does not compute for this model", where="space")
        ids, size = as_tokens(tokens), model.block_tokens
        n = len(ids) // size
        if not 0 <= first < n or n * size > model.max_tokens or int(ids.max()) >= model.vocab_size:
            raise LinkRefusedError("these tokens are out of this model's range", where="tokens")
        ids, salt = ids[: n * size], self._owners.salt(tenant)
        keys = prefix_keys(space, salt, ids, size)
        found = self.match(tenant, space, keys)
        if found.blocks == n and (found.state_blocks == n or not model.needs_state):
            return self.open_fetch(tenant, space, keys[first:], state=state)
        # Blocks without their parent could not be stored.
        start = min(first, found.blocks)
        name = tenant, space, keys[-1]
        with self._lock:
            job = self._jobs.get(name)
        who = job.join() if job is not None and job.first <= start else None
        if job is None or who is None:
            job = PrefillJob(model, keys, start, self._keep)
            if not self._prefill_bytes.fits(tenant, job.nbytes):
                raise LinkRefusedError("too many computed contexts wait for their peers", where="busy")
            who = job.join()
            assert who is not None
            job.cancel = self._prefiller.submit(space, salt, ids, start, job, found.blocks)
            if job.cancel is None:
                raise LinkRefusedError("too many contexts wait to be computed", where="busy")
            self._jobs[name] = job
            self._prefill_bytes.take(tenant, job.nbytes)
            self._count("computed")
        else:
            self._count("shared")
        return PrefillSource(job, who, first, state, lambda: self._end_job(name, job))

    def open_verify(self, tenant: str, request: Verify, wake: Callable[[], None]) -> VerifySource:
        """See `VerifyingService.open_verify`."""
        self._settle()
        verifier = self._verifier
        model = next((one for one in verifier.verifies() if one.digest == request.space), None) if verifier else None
        if verifier is None or model is None:
            raise LinkRefusedError("this node does not decode for this model", where="space")
        ids = np.frombuffer(request.tokens, "<i4")
        if len(ids) > model.max_tokens or int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
            raise LinkRefusedError("these tokens are out of this model's range", where="tokens")
        sampling_of(request.rule)
        if request.judge is not None:
            request = structs.replace(request, judge=self._judge_of(model, request))
        if not self._answers.fits(tenant, 1):
            raise LinkRefusedError("too many answers are being decoded", where="busy")
        salt = self._owners.salt(tenant)
        keys = prefix_keys(model.digest, salt, ids, model.block_tokens)
        job = VerifyJob(wake, lambda: self._answers.give_back(tenant, 1))
        job.answering = verifier.verify(salt, request, self.match(tenant, model.digest, keys).blocks, job)
        if job.answering is None:
            raise LinkRefusedError("no engine is up", where="busy")
        self._answers.take(tenant, 1)
        self._count("verified")
        return job

    def _judge_of(self, model: ModelSpace, request: Verify) -> JudgeRule:
        """Return how a step is judged, with a threshold. Raises LinkRefusedError for a judge that is not trusted."""
        rule = request.judge
        assert rule is not None
        if len(request.draft) > 4 * MAX_STEP or len(request.draft) > 4 * request.count:
            raise LinkRefusedError(
                f"a step of more than {MAX_STEP} tokens, or than its answer may have", where="tokens"
            )
        profile = self._judges(model)
        judged = profile.judges.get(rule.kind) if profile is not None else None
        if judged is None:
            raise LinkRefusedError(
                "this model's judgement was never measured: `ctxreuse calibrate NAME --judge`", where="judge"
            )
        try:
            judged.check(rule.kind)
        except ConfigError as error:
            raise LinkRefusedError(str(error), where="judge") from None
        return rule if rule.threshold is not None else JudgeRule(rule.kind, judged.threshold)

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        """See `Service.forget`."""
        self._settle()
        count = self._forgetting.forget(tenant, keys)
        self._count("forgotten", count)
        return count

    def snapshot(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """See `Service.snapshot`."""
        self._settle()
        return self._owners.keys(tenant)

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """See `Service.changes`."""
        self._settle()
        return self._owners.changes(tenant, since)

    def _namespace(self, key: bytes) -> Namespace | None:
        return self._owners.owner(key) or self._owners.withheld(key)

    def withdrawn(self, tenant: str) -> bytes:
        """See `Service.withdrawn`."""
        return self._withdrawals.of(tenant)

    def _missing(self, mine: Namespace, keys: Sequence[bytes], sizes: Sequence[int]) -> list[int]:
        """Return the offered blocks that are not stored, as many as do not evict each other.

        Blocks of another tenant count as missing: offering a key must not reveal them.
        """
        stats = self._store.stats()
        room = max(stats.capacity // 2 // self._owners.sharers(mine.tenant), (stats.capacity - stats.nbytes) // 2)
        wanted = []
        for i, (key, entry, nbytes) in enumerate(zip(keys, self._store.entries(keys), sizes)):
            if entry is not None and self._namespace(key) == mine:
                continue
            room -= nbytes
            if room < 0:
                break
            wanted.append(i)
        return wanted

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def _keep(self, key: bytes, data: Sealed, state: bool) -> None:
        self._store.put(key, data, kind="state" if state else "block")

    def _end_job(self, name: tuple[str, bytes, bytes], job: PrefillJob) -> None:
        self._prefill_bytes.give_back(name[0], job.nbytes)
        if self._jobs.get(name) is job:
            del self._jobs[name]

    def _settle(self) -> None:
        """Follow the store and the audit."""
        self._learn()
        if self._auditor is not None:
            for result in self._auditor.results():
                self._take_verdict(result)
        self._follow_revoked()
        self._owners.refresh()
        self._forgetting.settle()

    def _follow_revoked(self) -> None:
        revoked = self._revoked()
        if revoked != self._seen:
            self._owners.refresh()
            self._withdrawals.withdraw(revoked - self._seen)
            self._seen = revoked

    def _take_verdict(self, result: AuditResult) -> None:
        self._count(f"audit:{result.verdict}", len(result.keys))
        if result.verdict in ("sound", "unaudited"):
            self._owners.release(result.keys)
            if result.data is not None:
                self._store.put(result.keys[0], result.data, kind="state", giver=result.giver)
            return
        if result.data is None:  # they stay withheld, whatever still waits to be written
            for key in result.keys:
                self._store.drop(key, "audit")
        if result.verdict == "false":
            self._contributions.report_forged(result.user, result.giver, "audit: K or V is not that of its tokens")

    def wait_audits(self, timeout: float) -> bool:
        """Wait until all blocks are audited; returns False after ``timeout`` seconds. Any thread."""
        return self._auditor is None or self._auditor.wait(timeout)

    def check(self) -> None:
        """Raise AssertionError where parts disagree. O(entries)."""
        self._settle()
        self._owners.check()

    def close(self) -> None:
        """Stop auditing and following the store, which stays open; after the last call of a peer.

        Blocks that have not been audited are dropped: the next process could not tell them apart.
        """
        if self._auditor is not None:
            self._auditor.close()
            self._settle()
            for key in self._owners.withheld_keys:
                self._store.drop(key, "audit")
        self._withdrawals.close()
        self._owners.close()
