"""Blocks that a peer gives: taken only if they are lacking, fit, and are what their keys say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.block import BlockView, parse
from ctxreuse.bus.tenants import Line
from ctxreuse.errors import FormatError
from ctxreuse.keys import prefix_key

if TYPE_CHECKING:
    from ctxreuse.bus.serve import StoreService

__all__ = ["NOTHING", "Nothing", "StoreIntake"]


class Nothing:
    """An intake that wants nothing."""

    wanted: Sequence[int] = ()

    def put(self, item: int, data: memoryview) -> str:
        """Refuses."""
        return "unwanted"

    def close(self) -> None:
        """Nothing to do."""


NOTHING = Nothing()


class StoreIntake:
    """See `ctxreuse.bus.base.Intake`. Checks each item and hands the good ones to ``service``.

    ``parents`` are the keys that the items' headers must name; ``end`` is where the context ends before the first block
    (for a state: the position at which it is valid). Wrong checksums can come from a bad disk; whoever sends anything
    else that is wrong has made it up.
    """

    def __init__(
        self,
        service: StoreService,
        line: Line,
        salt: bytes,
        user: str,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        wanted: Sequence[int],
        end: int,
        state: bool,
    ) -> None:
        self._service, self._line, self._salt, self._user = service, line, salt, user
        self._keys, self._parents, self._end, self._state = keys, parents, end, state
        self.wanted = tuple(wanted)

    def put(self, item: int, data: memoryview) -> str:
        """See `Intake.put`."""
        try:
            view = parse(data)
        except FormatError:
            return self._service.slipped(self._user)
        reason = self._foreign(item, view)
        if reason:
            self._service.lied(self._user, reason)
            return "foreign"
        if self._service.fits(self._line, view) is None:
            return self._service.refused("foreign")
        try:
            view.verify()
        except FormatError:
            return self._service.slipped(self._user)
        return self._service.take(self._user, self._line, view, data)

    def _foreign(self, item: int, view: BlockView) -> str:
        """What is wrong with a head; empty if nothing is."""
        header, key = view.header, self._keys[item]
        if header.kind != ("state" if self._state else "block"):
            return "another kind"
        if header.space != self._line.space:
            return "another model space"
        if (header.key, header.parent) != (key, self._parents[item]):
            return "another key"
        if prefix_key(header.space, self._salt, header.parent, view.tokens) != key:
            return "token ids that the key does not belong to"
        if header.level != "exact":
            return "another level"
        size = len(view.tokens)
        if self._service.fits(self._line, view) is False:
            return "another layout"
        end = self._end if self._state else self._end + (item + 1) * size
        if header.end != end or (not self._state and header.rope_at not in (-1, end - size)):
            return "another position"
        return ""

    def close(self) -> None:
        """See `Intake.close`."""
