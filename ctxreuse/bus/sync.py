"""Giving clouds what they lack of a device's contexts, in idle time.

There is no queue: each round compares what the store holds with what a cloud has announced and offers the difference,
the last used contexts first, parents before children. So a cut, a restart, or a week offline needs no care: the next
round finds what is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ctxreuse.bus.base import Given, Greeting, Link
from ctxreuse.bus.serve_quarantine import Quarantine
from ctxreuse.bus.sync_plan import Holdings, Run, Translation
from ctxreuse.errors import LinkError, StoreError
from ctxreuse.keys import KEY_BYTES
from ctxreuse.store.base import Buffer, WholeStore

__all__ = ["LinkSync", "Sync", "SyncStatus"]

log = logging.getLogger(__name__)

#: Bytes of one offer: what a request that comes meanwhile has to share its link with.
_OFFER = 8 << 20
#: Seconds until something that a cloud did not want or refused is offered again; doubled each time, to a day.
_BACKOFF, _BACKOFF_MOST = 60.0, 86_400.0
#: The least time between two looks at the store, and how often the request that is served is asked about.
_PERIOD, _POLL = 2.0, 0.2


class LinkSync(msgspec.Struct, frozen=True):
    """One link: blocks (and bytes) that its cloud lacks as far as is known, what was given since the start, how many
    blocks were refused or not wanted, and the time (``Sync``'s clock) of the last round that came to its end, 0 for
    none."""

    name: str
    state: str
    pending_blocks: int
    pending_bytes: int
    sent_blocks: int
    sent_bytes: int
    refused: int
    last: float


class SyncStatus(msgspec.Struct, frozen=True):
    """All links, whether a round is under way, and whether it waits for a request to end."""

    links: tuple[LinkSync, ...]
    running: bool
    paused: bool


class _Target:
    """What is known of one link. Owned by the thread that runs the round."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.epoch = 0
        self.translation: Translation | None = None
        self.given: set[bytes] = set()  # blocks and (with a mark) states that the cloud is known to have
        self.backoff: dict[bytes, tuple[float, float]] = {}  # until, and how long the last wait was
        self.pending_blocks = self.pending_bytes = self.sent_blocks = self.sent_bytes = self.refused = 0
        self.last = 0.0

    def meet(self, greeting: Greeting, holdings: Holdings) -> Translation:
        """Follow what the cloud said: with another life of it, what is known of it is void."""
        if self.translation is None or self.translation.salt != greeting.salt:
            self.translation = Translation(holdings, greeting.salt)
            self.epoch = 0
        if self.epoch != greeting.epoch:
            self.epoch = greeting.epoch
            self.given.clear()
        self.translation.refresh()
        return self.translation

    def due(self, key: bytes, now: float) -> bool:
        return self.backoff.get(key, (0.0, 0.0))[0] <= now

    def defer(self, key: bytes, now: float) -> None:
        wait = min(max(2 * self.backoff.get(key, (0.0, 0.0))[1], _BACKOFF), _BACKOFF_MOST)
        self.backoff[key] = now + wait, wait


class Sync:
    """Gives clouds what they lack of ``tenant``'s contexts. Any thread may call.

    ``busy``: True while a request is served; nothing new is offered meanwhile. ``rate``: bytes/s at most (0: no limit).
    ``quarantine``: clouds that are given nothing while they are in it (`Clouds.quarantine`).
    ``on_sent(link, blocks, bytes)`` is told what was given, for metrics. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        store: WholeStore,
        links: Iterable[Link],
        *,
        tenant: str = "default",
        busy: Callable[[], bool] = lambda: False,
        rate: float = 0.0,
        quarantine: Quarantine | None = None,
        on_sent: Callable[[str, int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = [_Target(link) for link in links]
        self._holdings = Holdings(store, tenant)
        self._busy, self._rate, self._on_sent, self._clock = busy, rate, on_sent, clock
        self._quarantine = quarantine
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
        """Begin no other offer; returns at once. One on its way ends when its link is closed. Idempotent."""
        self._stop.set()
        self._changed.set()
        self._unwatch()

    def close(self) -> None:
        """End the thread after the offer that is on its way. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def sync_now(self, progress: Callable[[int, int], None] | None = None) -> SyncStatus:
        """Run one round here and now, whatever else is served; ``progress(done, total)`` counts bytes."""
        # A round that pauses while requests are served must not make this wait too: who calls may be such a request.
        with self._counting:
            self._waiting += 1
        try:
            self._one_round(progress, urgent=True)
        finally:
            with self._counting:
                self._waiting -= 1
        return self.status()

    def status(self) -> SyncStatus:
        """The figures of this moment."""
        links = (
            LinkSync(
                target.link.name,
                target.link.state,
                target.pending_blocks,
                target.pending_bytes,
                target.sent_blocks,
                target.sent_bytes,
                target.refused,
                target.last,
            )
            for target in self._targets
        )
        return SyncStatus(tuple(links), self._running, self._paused)

    def _loop(self) -> None:
        seen: list[tuple[str, int]] = []
        while not self._stop.is_set():
            # Links say nothing when they come up, so they are asked.
            states = [(t.link.state, t.link.welcome.epoch if t.link.welcome is not None else 0) for t in self._targets]
            retry = any(t.backoff and min(u for u, _ in t.backoff.values()) <= self._clock() for t in self._targets)
            if self._changed.is_set() or states != seen or retry:
                self._changed.clear()
                seen = states
                self._one_round(None, urgent=False)
            self._stop.wait(_PERIOD)

    def _one_round(self, progress: Callable[[int, int], None] | None, *, urgent: bool) -> None:
        with self._round:
            self._running = True
            try:
                if not self._holdings.refresh(lambda: not self._go_on(urgent)):
                    return
                looked = [(target, self._lacks(target)) for target in self._targets]
                plans = [(target, keys) for target, keys in looked if keys is not None]
                total = sum(target.pending_bytes for target, _ in plans)
                done = 0
                for target, keys in plans:
                    for nbytes in self._give(target, keys, urgent):
                        done = min(done + nbytes, total)
                        if progress is not None:
                            progress(done, total)
            except StoreError as error:
                log.warning("sync could not read the store: %s", error)
            except Exception:
                # A thread that dies would end sync for good, without a word.
                log.exception("a round of sync failed; it is tried again with the next change")
            finally:
                self._running = self._paused = False

    def _go_on(self, urgent: bool) -> bool:
        """Wait until no request is served; False if this is to end."""
        while not urgent and not self._waiting and self._busy():
            self._paused = True
            if self._stop.wait(_POLL):
                return False
        self._paused = False
        return not self._stop.is_set()

    def _lacks(self, target: _Target) -> list[bytes] | None:
        """The store's keys that the cloud is not known to have, in the order to give them; None if it gets nothing."""
        greeting = target.link.welcome
        if target.link.state != "up" or greeting is None:
            return None
        if self._quarantine is not None and self._quarantine.reason(target.link.name) is not None:
            return None
        translation, holdings, now = target.meet(greeting, self._holdings), self._holdings, self._clock()
        held = set(holdings.order)
        target.backoff = {key: entry for key, entry in target.backoff.items() if key[:KEY_BYTES] in held}
        target.given = {key for key in target.given if key[:KEY_BYTES] in held}
        lacks = [key for key in holdings.order if not target.link.announced([translation.key(key)])]
        target.pending_blocks = len(lacks)
        target.pending_bytes = sum(holdings.said(key).nbytes for key in lacks)
        return [key for key in lacks if key not in target.given and target.due(key, now)]

    def _give(self, target: _Target, keys: Sequence[bytes], urgent: bool) -> Iterable[int]:
        """Offer blocks, then the states of what the cloud has; yields bytes as they are dealt with."""
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
                if not self._holdings.entries[key].has_state or mark in target.given:
                    continue
                if not target.due(mark, self._clock()) or not target.due(key, self._clock()):
                    continue
                if not self._go_on(urgent):
                    return
                run = Run(self._holdings.said(key).space, (key,), self._holdings.entries[key].parent, ())
                yield self._offer(target, run, state=True)
        except LinkError as error:
            # Down or refused: the next round begins where this one ended.
            log.info("sync with %s ends for now: %s", target.link.name, error)
            self._changed.set()
            return
        if target.link.state == "up":
            target.last = self._clock()

    def _offer(self, target: _Target, run: Run, *, state: bool) -> int:
        translation = target.translation
        assert translation is not None
        sizes, held = run.sizes, None
        if state:
            try:
                held = translation.read(run.keys[0], "state")
            except LookupError:
                return 0
            sizes = (held.nbytes,)

        def read(item: int) -> Buffer:
            return held if held is not None else translation.read(run.keys[item], "block")

        began = self._clock()
        given = target.link.put(
            run.space,
            [translation.key(key) for key in run.keys],
            sizes,
            read,
            parent=translation.key(run.parent),
            state=state,
        )
        sent = self._book(target, run, given, sizes, b"state" if state else b"")
        if self._on_sent is not None and given.taken:
            self._on_sent(target.link.name, 0 if state else len(given.taken), sent)
        if self._rate and sent:
            self._stop.wait(max(0.0, sent / self._rate - (self._clock() - began)))
        return sum(sizes) if not state else 0

    def _book(self, target: _Target, run: Run, given: Given, sizes: Sequence[int], mark: bytes) -> int:
        now = self._clock()
        for item in given.taken:
            name = run.keys[item] + mark
            target.given.add(name)
            target.backoff.pop(name, None)
        sent = sum(sizes[item] for item in given.taken)
        for item in given.present:
            # Held already, or no room or no parent there: an announcement will tell, or the next offer.
            target.defer(run.keys[item] + mark, now)
        for item, reason in given.refused.items():
            if reason != "gone":
                target.refused += 1
                target.defer(run.keys[item] + mark, now)
        target.sent_bytes += sent
        if not mark:
            target.sent_blocks += len(given.taken)
            target.pending_blocks -= len(given.taken)
            target.pending_bytes -= sent
        return sent
