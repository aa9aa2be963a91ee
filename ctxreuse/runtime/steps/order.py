"""The order of prefills: shares between tenants, priorities that grow with waiting, turns between sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ctxreuse.fair import Turns

__all__ = ["BACKGROUND", "INTERACTIVE", "NORMAL", "PrefillOrder", "RequestCancelledError", "RequestTurn"]

#: Priorities: the lower, the sooner.
INTERACTIVE, NORMAL, BACKGROUND = -1, 0, 1
#: Seconds of waiting that raise a request by one priority, so that none waits for ever.
_AGEING = 30.0
#: Tokens that are computed for a tenant that comes back before it takes turns with those that compute all the time.
_BURST = 2048


class RequestCancelledError(Exception):
    """The request's caller does not want its answer any more."""


class RequestTurn:
    """One request's place among those that compute.

    Attributes:
        arrived: a number that grows with every request.
        since: the clock's reading when it came.
        priority: `INTERACTIVE`, `NORMAL` or `BACKGROUND`; raised while a more urgent request waits for its blocks.
        tenant: has a share of its own, whatever priorities its requests claim.
        session: requests of one session take turns with those of others; "": of none.
        started: some of its prompt was computed.
        cancelled: it is to end before its next pass.
    """

    __slots__ = ("arrived", "cancelled", "priority", "session", "since", "started", "tenant")

    def __init__(
        self, arrived: int = 0, since: float = 0.0, *, priority: int = NORMAL, tenant: str = "", session: str = ""
    ) -> None:
        self.arrived, self.since, self.tenant, self.session = arrived, since, tenant, session
        self.priority = max(INTERACTIVE, min(priority, BACKGROUND))
        self.started = self.cancelled = False

    def aged(self, now: float) -> int:
        """Return the priority that it has by now."""
        return max(INTERACTIVE, self.priority - int((now - self.since) / _AGEING))

    def check(self) -> None:
        """Raise RequestCancelledError if it was cancelled."""
        if self.cancelled:
            raise RequestCancelledError


class PrefillOrder:
    """Which prefill is next. Not thread-safe.

    Background prefills yield to all others. Of the rest, tenants take turns by the tokens computed for each. A tenant's
    own go by priority; of equal ones first the short (the next turn of a conversation need not wait until others' first
    ones are computed, and delays them by little), then who was begun (prefills end one after the other, as in turns all
    of them would end late), then the session whose turn it is, then who came first. Waiting raises no other of its
    priority above a short one, or where many are computed all questions would wait for them; such take turns with it.
    """

    def __init__(self) -> None:
        self._tenants = Turns[str](_BURST)
        self._sessions = Turns[tuple[str, str]]()
        self._was_short = False

    def first(self, turns: Sequence[RequestTurn], now: float, short: Collection[RequestTurn] = ()) -> RequestTurn:
        """Return which of ``turns`` (one or more) is next; ``short``: those of which little is left to compute."""
        if len(turns) == 1:
            return turns[0]
        came = sorted(turns, key=lambda turn: turn.arrived)
        tenants = {name: at for at, name in enumerate(self._tenants.order(dict.fromkeys(t.tenant for t in came)))}
        sessions = {name: at for at, name in enumerate(self._sessions.order(dict.fromkeys(map(_session, came))))}

        def rank(turn: RequestTurn) -> tuple[bool, int, int, bool, bool, int]:
            aged, of = turn.aged(now), sessions[_session(turn)]
            if turn in short and not self._was_short:
                aged = min(other.aged(now) for other in came if other.priority >= turn.priority)
            return aged >= BACKGROUND, tenants[turn.tenant], aged, turn not in short, not turn.started, of

        return min(came, key=rank)

    def had_less(self, tenant: str, others: Collection[str]) -> bool:
        """Return True if fewer tokens were computed for ``tenant`` than for each of ``others``, as turns count them."""
        return tenant not in others and self._tenants.order([*others, tenant])[0] == tenant

    def charge(self, turn: RequestTurn, computed: int, left: int, *, short: bool = False) -> None:
        """Note that ``computed`` tokens of a prefill were computed, the first ones unless it is `started`, and how many
        are left; ``short``: it was one of the short."""
        self._was_short = short
        self._tenants.charge(turn.tenant, computed)
        if not turn.started:
            self._sessions.charge(_session(turn), computed + left)


def _session(turn: RequestTurn) -> tuple[str, str]:
    return turn.tenant, turn.session or f"request {turn.arrived}"
