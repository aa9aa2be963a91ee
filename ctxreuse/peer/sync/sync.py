"""Sends blocks of a device's contexts that a cloud does not have yet, in idle time.

There is no queue: each round compares the store with what a cloud has announced and offers the difference, the last
used contexts first, parents before children. So nothing special happens after a cut, a restart, or a week
offline: the next round continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol.base import Link, PutRequest, PutResult
from ctxreuse.bus.protocol.messages import PREFIX_BYTES, Welcome
from ctxreuse.errors import LinkError, StoreError
from ctxreuse.identity.keys import KEY_BYTES, giver_id
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.sync.plan import Holdings, Run, Translation
from ctxreuse.store.base import Store

__all__ = ["LinkSync", "Sync", "SyncOptions", "SyncStatus"]

log = logging.getLogger(__name__)

#: Bytes of one offer, which a request that comes meanwhile shares its link with.
_OFFER = 8 << 20
#: Seconds until a block that a cloud did not want or refused is offered again; doubled each time, to a day.
_BACKOFF, _BACKOFF_MOST = 60.0, 86_400.0
#: Seconds between two looks at the store, and between checks whether a request is still being served.
_PERIOD, _POLL = 2.0, 0.2
#: Seconds after a withdrawal in which copies are still dropped: of requests that were running. Later ones are new.
_GRACE = 600.0


class LinkSync(msgspec.Struct):
    """One link: blocks and bytes that its cloud is not known to have, those sent since the start, how many blocks were
    refused, and when (``Sync``'s clock) the last round was completed (0: none)."""

    name: str
    state: str = "down"
    pending_blocks: int = 0
    pending_bytes: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    refused: int = 0
    last: float = 0.0


class SyncStatus(msgspec.Struct, frozen=True):
    """All links, whether a round is under way, and whether it waits for a request to end."""

    links: tuple[LinkSync, ...]
    running: bool
    paused: bool


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Options of a `Sync`.

    Attributes:
        tenant: owner of the contexts.
        busy: True while a request is served; nothing new is offered meanwhile.
        rate: maximum bytes/s (0: no limit).
        quarantine: clouds in it get nothing (`CloudPool.quarantine`).
        on_sent: called with (link, blocks, bytes) that were sent.
        on_withdrawn: called after stored blocks were dropped because of the cloud that they came from, or at its word.
        clock: monotonic seconds.
    """

    tenant: str = "default"
    busy: Callable[[], bool] = lambda: False
    rate: float = 0.0
    quarantine: Quarantine | None = None
    on_sent: Callable[[str, int, int], None] | None = None
    on_withdrawn: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


class _Target:
    """State of one link. Owned by the thread that runs the round."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.giver = giver_id(link.name.encode())  # as its blocks are marked in the store
        self.epoch = 0
        self.translation: Translation | None = None
        self.sent: set[bytes] = set()  # blocks and (with a mark) states that the cloud is known to have
        self.backoff: dict[bytes, tuple[float, float]] = {}  # until, and how long the last wait was
        self.withdrawn: dict[bytes, float] = {}  # when each withdrawal was seen first
        self.figures = LinkSync(link.name)

    def follow(self, welcome: Welcome, holdings: Holdings) -> Translation:
        """Follow the cloud's handshake: another epoch voids what is known of its contents."""
        if self.translation is None or self.translation.salt != welcome.salt:
            self.translation = Translation(holdings, welcome.salt)
            self.epoch = 0
        if self.epoch != welcome.epoch:
            self.epoch = welcome.epoch
            self.sent.clear()
        self.translation.refresh()
        return self.translation

    def due(self, key: bytes, now: float) -> bool:
        return self.backoff.get(key, (0.0, 0.0))[0] <= now

    def defer(self, key: bytes, now: float) -> None:
        wait = min(max(2 * self.backoff.get(key, (0.0, 0.0))[1], _BACKOFF), _BACKOFF_MOST)
        self.backoff[key] = now + wait, wait


class Sync:
    """Sends clouds the missing blocks of ``tenant``'s contexts. Any thread may call.

    ``store`` is the source of the blocks, ``links`` are the clouds.
    """

    def __init__(self, store: Store, links: Iterable[Link], options: SyncOptions | None = None) -> None:
        options = options or SyncOptions()
        self._targets = [_Target(link) for link in links]
        self._holdings = Holdings(store, options.tenant)
        self._busy, self._rate, self._on_sent = options.busy, options.rate, options.on_sent
        self._clock, self._quarantine, self._on_withdrawn = options.clock, options.quarantine, options.on_withdrawn
        self._round, self._counting = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._changed.set()
        self._thread: threading.Thread | None = None
        self._unwatch = store.watch(lambda _: self._changed.set())
        self._running = self._paused = False
        self._waiting = 0  # calls of `sync_now`

    def start(self) -> None:
        """Run rounds in a thread from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="ctxreuse-sync", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Start no other offer; returns at once. A running one ends when its link is closed. Idempotent."""
        self._stop.set()
        self._changed.set()
        self._unwatch()

    def close(self) -> None:
        """End the thread after the running offer. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def sync_now(self, progress: Callable[[int, int], None] | None = None) -> SyncStatus:
        """Run one round now, whatever else is served; ``progress(done, total)`` counts bytes."""
        # A round that pauses while requests are served must not block this call: it may be such a request.
        with self._counting:
            self._waiting += 1
        try:
            self._one_round(progress, urgent=True)
        finally:
            with self._counting:
                self._waiting -= 1
        return self.status()

    def status(self) -> SyncStatus:
        """Return the figures of this moment."""
        links = (msgspec.structs.replace(target.figures, state=target.link.state) for target in self._targets)
        return SyncStatus(tuple(links), self._running, self._paused)

    def _loop(self) -> None:
        seen: list[tuple[object, ...]] = []
        while not self._stop.is_set():
            # Links do not report when they come up.
            states = [self._state(target) for target in self._targets]
            retry = any(t.backoff and min(u for u, _ in t.backoff.values()) <= self._clock() for t in self._targets)
            if self._changed.is_set() or states != seen or retry:
                self._changed.clear()
                seen = states
                self._one_round(None, urgent=False)
            self._stop.wait(_PERIOD)

    def _state(self, target: _Target) -> tuple[object, ...]:
        link = target.link
        epoch = link.welcome.epoch if link.welcome is not None else 0
        return link.state, epoch, link.withdrawn, self._reason(target)

    def _one_round(self, progress: Callable[[int, int], None] | None, *, urgent: bool) -> None:
        with self._round:
            self._running = True
            try:
                if not self._holdings.refresh(lambda: not self._go_on(urgent)):
                    return
                if self._withdraw() and not self._holdings.refresh(lambda: not self._go_on(urgent)):
                    return
                looked = [(target, self._missing(target)) for target in self._targets]
                plans = [(target, keys) for target, keys in looked if keys is not None]
                total = sum(target.figures.pending_bytes for target, _ in plans)
                done = 0
                for target, keys in plans:
                    for nbytes in self._give(target, keys, urgent):
                        done = min(done + nbytes, total)
                        if progress is not None:
                            progress(done, total)
            except StoreError as error:
                log.warning("sync could not read the store: %s", error)
            except Exception:
                # A dead thread would end sync silently.
                log.exception("a round of sync failed; it is tried again with the next change")
            finally:
                self._running = self._paused = False

    def _go_on(self, urgent: bool) -> bool:
        """Wait until no request is served; returns False if this is to end."""
        while not urgent and not self._waiting and self._busy():
            self._paused = True
            if self._stop.wait(_POLL):
                return False
        self._paused = False
        return not self._stop.is_set()

    def _withdraw(self) -> int:
        """Drop what clouds have given and withdrawn, and all of those in quarantine; returns the number of blocks."""
        holdings, doomed = self._holdings, list[bytes]()
        for target in self._targets:
            target.withdrawn = dict.fromkeys(target.link.withdrawn, self._clock()) | target.withdrawn
            given = [key for key in holdings.order if holdings.givers.get(key) == target.giver]
            if given and self._reason(target) is not None:
                doomed += given
            elif given and target.link.withdrawn and target.link.welcome is not None:
                translation, late = target.follow(target.link.welcome, holdings), self._clock() - _GRACE
                seen = target.withdrawn
                doomed += [key for key in given if seen.get(translation.key(key)[:PREFIX_BYTES], late) > late]
        for key in doomed:
            holdings.store.drop(key, "audit")
        if doomed:
            log.warning("%d fetched blocks are dropped: their cloud lied, or has withdrawn them", len(doomed))
            self._on_withdrawn()
        return len(doomed)

    def _reason(self, target: _Target) -> str | None:
        return self._quarantine.reason(target.link.name) if self._quarantine is not None else None

    def _missing(self, target: _Target) -> list[bytes] | None:
        """Return the keys that the cloud is not known to have, in the order to send them; None if it gets nothing."""
        welcome = target.link.welcome
        if target.link.state != "up" or welcome is None:
            return None
        if self._reason(target) is not None:
            return None
        translation, holdings, now = target.follow(welcome, self._holdings), self._holdings, self._clock()
        stored = set(holdings.order)
        target.backoff = {key: entry for key, entry in target.backoff.items() if key[:KEY_BYTES] in stored}
        target.sent = {key for key in target.sent if key[:KEY_BYTES] in stored}
        own = [key for key in holdings.order if holdings.own(key, target.giver)]
        missing = [key for key in own if not target.link.announced([translation.key(key)])]
        target.figures.pending_blocks = len(missing)
        target.figures.pending_bytes = sum(holdings.header(key).nbytes for key in missing)
        return [key for key in missing if key not in target.sent and target.due(key, now)]

    def _give(self, target: _Target, keys: Sequence[bytes], urgent: bool) -> Iterable[int]:
        """Offer blocks, then states of what the cloud has; yields bytes as they are done."""
        try:
            for run in self._holdings.runs(keys, _OFFER):
                if not self._go_on(urgent):
                    return
                # What follows a block that was just put off would be an orphan.
                if run.parent in target.backoff and not target.due(run.parent, self._clock()):
                    continue
                yield self._offer(target, run, state=False)
            for key in self._holdings.order:
                mark = key + b"state"
                if not self._holdings.entries[key].has_state or mark in target.sent:
                    continue
                if not self._holdings.own(key, target.giver):
                    continue
                if not target.due(mark, self._clock()) or not target.due(key, self._clock()):
                    continue
                if not self._go_on(urgent):
                    return
                run = Run(self._holdings.header(key).space, (key,), self._holdings.entries[key].parent, ())
                yield self._offer(target, run, state=True)
        except LinkError as error:
            # Down or refused: the next round begins where this one ended.
            log.info("sync with %s ends for now: %s", target.link.name, error)
            self._changed.set()
            return
        if target.link.state == "up":
            target.figures.last = self._clock()

    def _offer(self, target: _Target, run: Run, *, state: bool) -> int:
        translation = target.translation
        assert translation is not None
        sizes, sealed = run.sizes, None
        if state:
            try:
                sealed = translation.read(run.keys[0], "state")
            except LookupError:
                return 0
            sizes = (sealed.nbytes,)

        def read(item: int) -> Buffer:
            return sealed if sealed is not None else translation.read(run.keys[item], "block")

        began = self._clock()
        keys = [translation.key(key) for key in run.keys]
        result = target.link.put(PutRequest(run.space, keys, sizes, translation.key(run.parent), state), read)
        sent = self._book(target, run, result, sizes, b"state" if state else b"")
        if self._on_sent is not None and result.taken:
            self._on_sent(target.link.name, 0 if state else len(result.taken), sent)
        if self._rate and sent:
            self._stop.wait(max(0.0, sent / self._rate - (self._clock() - began)))
        return sum(sizes) if not state else 0

    def _book(self, target: _Target, run: Run, result: PutResult, sizes: Sequence[int], mark: bytes) -> int:
        now = self._clock()
        for item in result.taken:
            name = run.keys[item] + mark
            target.sent.add(name)
            target.backoff.pop(name, None)
        sent = sum(sizes[item] for item in result.taken)
        for item in result.present:
            # There already, or no room or no parent there: an announcement or the next offer will tell.
            target.defer(run.keys[item] + mark, now)
        for item, reason in result.refused.items():
            if reason != "gone":
                target.figures.refused += 1
                target.defer(run.keys[item] + mark, now)
        target.figures.sent_bytes += sent
        if not mark:
            target.figures.sent_blocks += len(result.taken)
            target.figures.pending_blocks -= len(result.taken)
            target.figures.pending_bytes -= sent
        return sent
