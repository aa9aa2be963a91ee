"""Eviction by sessions: the context that is least likely to be needed soon goes first, from its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Generic

from ctxreuse.pauses.estimator import Estimator, Pause
from ctxreuse.pauses.hints import HINTS
from ctxreuse.pauses.kinds import FIRST_HINT, PauseKind
from ctxreuse.pauses.sessions import Sessions
from ctxreuse.store.policy.base import Facts, K, Policy

__all__ = ["Pauses", "hint_of"]

#: Without calls of `Pauses.on_lookup`, a path that is used again within these seconds of its pause is the end of the
#: same request: its last blocks were just stored.
_TAIL = 0.2
#: Sixteenths of a session's path whose blocks identify it, although its last blocks were written again.
_ANCHORS = (16, 15, 12)


def hint_of(label: int) -> str:
    """Return the hint that a label stands for; ``""`` if it is none."""
    return HINTS[label - FIRST_HINT] if 0 <= label - FIRST_HINT < len(HINTS) else ""


class _Fresh(Estimator):
    """Rates from all that was counted up to now, where `Estimator` goes on with those that are nearly as good."""

    def _current(self, pause: Pause) -> Any:
        self._made.clear()
        return super()._current(pause)


class _Block(Generic[K]):
    __slots__ = ("children", "parent")

    def __init__(self, parent: K | None) -> None:
        self.parent, self.children = parent, 0


class _Session(Generic[K]):
    """``tip``: the last of its blocks that is cached, if any; ``anchors``: keys that identify it."""

    __slots__ = ("active", "anchors", "since", "tip")

    def __init__(self) -> None:
        self.tip: K | None = None
        self.anchors: tuple[K, ...] = ()
        self.active, self.since = False, float("-inf")


class Pauses(Policy[K]):
    """The order of eviction by sessions, see `ctxreuse.pauses.sessions`. Labels are those of `ctxreuse.pauses.kinds`.

    Sessions are not named: a path that goes on where one ended, or most of it, is that session's next turn; any other
    begins a session. A block that several sessions share is worth what the best of them is: it goes when all above it
    are gone. Blocks that a session's next turn left behind are orphans, which go before all others; a turn that is a
    beginning of the session's context leaves nothing behind. At most ``most`` sessions are known; the blocks of a
    forgotten one are orphans.

    ``access`` and ``remove`` take O(1) a block; ``order`` sorts the sessions and is then O(1) a block.
    """

    name = "pauses"
    #: The newest block may go at once: on agents' sessions in a small memory that is most of the gain.
    has_admission = True
    wants_lookups = True

    def __init__(self, estimator: Estimator | None = None, *, most: int = 2048) -> None:
        self._sessions: Sessions[int] = Sessions(_Fresh() if estimator is None else estimator, most=most)
        self._most = most
        self._blocks: dict[K, _Block[K]] = {}
        self._known: dict[int, _Session[K]] = {}
        self._anchors: dict[K, int] = {}
        #: Sessions that end at a block; with `_orphans` they cover each leaf.
        self._tips: dict[K, dict[int, None]] = {}
        self._orphans: OrderedDict[K, None] = OrderedDict()
        self._next = 0
        self._now = 0.0
        self._has_pauses = self._has_lookups = False

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, facts: Facts[K], now: float) -> None:
        if facts.key in self._blocks:
            return
        self._blocks[facts.key] = _Block(facts.parent)
        above = self._blocks.get(facts.parent) if facts.parent is not None else None
        if above is not None:
            above.children += 1
        self._orphans[facts.key] = None
        if facts.parent is not None:
            self._orphans.pop(facts.parent, None)

    def access(self, path: Sequence[K], now: float) -> None:
        if not path:
            return
        number = self._number(path, now)
        session = self._known[number]
        again = self._has_lookups or (self._has_pauses and (session.active or now - session.since < _TAIL))
        if not again or number not in self._sessions:
            self._begin(number, session, now)
        self._move(number, session, path)

    def on_lookup(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """Begin the next turn of the prompt's session. From the first call on, uses begin none."""
        if path:
            self._has_lookups = True
            number = self._number(path, now)
            session = self._known[number]
            self._begin(number, session, now)
            self._name(number, session, self._named(path))

    def _number(self, path: Sequence[K], now: float) -> int:
        self._now = now
        number = self._find(path)
        return self._new(now) if number is None else number

    def _begin(self, number: int, session: _Session[K], now: float) -> None:
        self._sessions.begin(number, now)
        session.active, session.since = True, now

    @staticmethod
    def _named(path: Sequence[K]) -> tuple[K, ...]:
        return tuple(path[(len(path) * share - 1) // 16] for share in _ANCHORS)

    def _find(self, path: Sequence[K]) -> int | None:
        anchors = self._anchors
        for key in reversed(path):
            if key in anchors:
                return anchors[key]
        return None

    def _new(self, now: float) -> int:
        if len(self._known) >= self._most:
            self._forget(self._sessions.ranked(now)[0])
        self._next += 1
        self._known[self._next] = _Session()
        return self._next

    def _forget(self, number: int) -> None:
        session = self._known.pop(number)
        self._sessions.forget(number)
        self._leave(number, session)
        self._name(number, session, ())

    def _leave(self, number: int, session: _Session[K]) -> None:
        """Take the session from its tip; a leaf where no session ends is an orphan."""
        tip, session.tip = session.tip, None
        if tip is None:
            return
        there = self._tips[tip]
        del there[number]
        if not there:
            del self._tips[tip]
            if not self._blocks[tip].children:
                self._orphans[tip] = None

    def _name(self, number: int, session: _Session[K], keys: tuple[K, ...]) -> None:
        for key in session.anchors:
            if self._anchors.get(key) == number:
                del self._anchors[key]
        session.anchors = keys
        for key in keys:
            self._anchors[key] = number

    def _move(self, number: int, session: _Session[K], path: Sequence[K]) -> None:
        tip = path[-1]
        if not self._reaches(session.tip, tip):
            self._leave(number, session)
            session.tip = tip
            self._tips.setdefault(tip, {})[number] = None
            self._orphans.pop(tip, None)
        self._name(number, session, self._named(path))

    def _reaches(self, tip: K | None, key: K) -> bool:
        """Return True if a session that ends at ``tip`` has the block in its context."""
        while tip is not None and tip != key:
            block = self._blocks.get(tip)
            tip = block.parent if block is not None else None
        return tip is not None

    def on_pause(self, tip: K, label: int, now: float) -> None:
        number = self._anchors.get(tip)
        if number is None:
            return
        self._now = now
        hint = hint_of(label)
        if hint:
            self._sessions.hint(number, hint, now)
            return
        session = self._known[number]
        self._has_pauses, session.active, session.since = True, False, now
        self._sessions.pause(number, PauseKind.of(label), now)

    def remove(self, key: K, now: float) -> None:
        block = self._blocks.pop(key)
        self._orphans.pop(key, None)
        parent = block.parent
        above = self._blocks.get(parent) if parent is not None else None
        if above is not None:
            above.children -= 1
        ended = self._tips.pop(key, {})
        for number in ended:
            self._known[number].tip = parent if above is not None else None
        if above is None or parent is None:
            return
        if ended:
            self._tips.setdefault(parent, {}).update(ended)
            self._orphans.pop(parent, None)
        elif not above.children and parent not in self._tips:
            self._orphans[parent] = None

    def order(self) -> Iterator[K]:
        blocks, tips = self._blocks, self._tips
        left: dict[K, int] = {}
        # Sessions that share a tip go when the best of them does.
        waiting = {tip: len(numbers) for tip, numbers in tips.items() if len(numbers) > 1}

        def climb(key: K | None) -> Iterator[K]:
            while key is not None and key in blocks and key not in done:
                block = blocks[key]
                if left.get(key, block.children) or (key in tips and key not in passed):
                    return
                done.add(key)
                yield key
                key = block.parent
                if key is not None and key in blocks:
                    left[key] = left.get(key, blocks[key].children) - 1

        done: set[K] = set()
        passed: set[K] = set()
        for orphan in self._orphans:
            yield from climb(orphan)
        for number in self._sessions.ranked(self._now):
            tip = self._known[number].tip
            if tip is None:
                continue
            if waiting.get(tip, 1) > 1:
                waiting[tip] -= 1
                continue
            passed.add(tip)
            yield from climb(tip)

    def dump(self) -> bytes:
        return self._sessions.estimator.dump()

    def load(self, raw: bytes) -> bool:
        return self._sessions.estimator.load(raw)

    def check(self) -> None:
        self._sessions.check()
        children: dict[K, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
        for key, block in self._blocks.items():
            assert block.children == children.get(key, 0), f"children of {key!r} are counted wrongly"
            named = (key in self._tips) + (key in self._orphans)
            assert named <= 1, f"{key!r} is a tip and an orphan"
            assert named or block.children, f"no session ends at the leaf {key!r}"
        for tip, numbers in self._tips.items():
            assert numbers, f"no session ends at {tip!r}"
            assert all(self._known[number].tip == tip for number in numbers), f"another session ends at {tip!r}"
        assert set(self._known) == {number for number in self._known if number in self._sessions}, "unknown sessions"
