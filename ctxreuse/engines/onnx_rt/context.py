"""One context of the ONNX Runtime engine: its slot."""

from __future__ import annotations

from collections.abc import Callable

from ctxreuse.engines.early import PendingRow
from ctxreuse.engines.onnx_rt.arena import KvSlot
from ctxreuse.engines.resident import ResidentContext
from ctxreuse.exits import ExitRow

__all__ = ["OnnxContext"]


class OnnxContext(ResidentContext):
    """See `ResidentContext`."""

    #: Every layer keeps K and V of all tokens.
    states: tuple[int, ...] = ()

    def __init__(self, room: Callable[[int], KvSlot], reserve: int) -> None:
        """``room`` leases a slot for so many tokens."""
        super().__init__()
        self._room = room
        #: See `EarlyContext`.
        self.pending, self.completed = list[PendingRow](), list[ExitRow]()
        self.slot = room(reserve)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the slot has room for."""
        return self.slot.nbytes

    def __repr__(self) -> str:
        return f"OnnxContext(n={self.n}, nbytes={self.nbytes})"

    def reserve(self, n: int) -> None:
        """Have room for ``n`` tokens; it doubles, and what is there is copied. No load may be in flight."""
        if n > self.slot.capacity:
            old, self.slot = self.slot, self._room(n)
            self.slot.copy(old, self.n)
