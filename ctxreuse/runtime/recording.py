"""What a runtime tells whoever records its traffic, see `ctxreuse.lab.recorder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Recorder"]


class Recorder(Protocol):
    """Takes requests as they come. Any thread may call; calls are quick and never raise."""

    def prompt(self, keys: Sequence[bytes], tokens: int) -> int:
        """A prompt of ``tokens`` tokens came; ``keys``: of its whole blocks. Its number, below 0 if it is left out."""
        ...

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """The context of ``keys``, which goes on from a recorded prompt, paused for the reason ``label``."""
        ...

    def ended(self, number: int, *, output: int = 0, busy: float = 0.0) -> None:
        """The prompt ``number`` was answered: tokens of the answer, seconds since it came."""
        ...
