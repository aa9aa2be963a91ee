"""The file that keeps over restarts what drafts are made from, and what was learnt of them."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import msgspec

from ctxreuse.private import write_private
from ctxreuse.speculate.memory import CallerTexts, DraftMemory
from ctxreuse.speculate.policy import DraftPolicy, LearntRates

__all__ = ["DraftFile", "remove_draft_files"]

log = logging.getLogger(__name__)

_VERSION, _DIGEST = 1, 16


class _Saved(msgspec.Struct, array_like=True):
    version: int
    owner: bytes
    costs: dict[int, list[float]]
    rates: LearntRates
    since: float
    callers: tuple[CallerTexts, ...]


class DraftFile:
    """One model's and one tenant's, in a folder; only its owner may read it. Any thread may call.

    A file that is damaged, of another version, model or tenant counts as none: texts are learnt again as they come.
    """

    def __init__(self, folder: Path, space: bytes, salt: bytes, memory: DraftMemory, policy: DraftPolicy) -> None:
        """``space``: digest of the model space; ``salt``: of the tenant."""
        self._owner = hashlib.blake2b(space, digest_size=_DIGEST, key=salt).digest()
        self.path = folder / f"drafts-{self._owner.hex()[:16]}.bin"
        self._memory, self._policy = memory, policy
        self._lock = threading.Lock()
        self._saved, self._saved_at = (0, 0), -inf

    def load(self) -> bool:
        """Read it, before anything was learnt; False if there is none that counts."""
        try:
            raw = self.path.read_bytes()
        except OSError:
            return False
        try:
            if hashlib.blake2b(raw[_DIGEST:], digest_size=_DIGEST).digest() != raw[:_DIGEST]:
                raise ValueError("it is damaged")
            saved = msgspec.msgpack.decode(raw[_DIGEST:], type=_Saved)
            if (saved.version, saved.owner) != (_VERSION, self._owner):
                raise ValueError("it is of another version, model or tenant")
            self._memory.restore(saved.callers, saved.since)
        except (ValueError, UnicodeDecodeError, RecursionError) as error:  # msgspec's errors are ValueErrors
            log.warning("drafts begin without texts: %s", error, extra={"file": str(self.path)})
            return False
        self._policy.restore(saved.rates)
        self._policy.costs.restore(saved.costs)
        self._saved = self._state
        return True

    @property
    def _state(self) -> tuple[int, int]:
        return self._memory.changes, self._memory.cleared

    def save(self, seconds: float = 0.0) -> None:
        """Write it if anything is new, but not twice within so many seconds; its time is that of its oldest text. A
        disk that fails is logged, and the old file stays."""
        with self._lock:
            state, now, since = self._state, time.monotonic(), self._memory.since
            if state == self._saved or now - self._saved_at < seconds:
                return
            costs, rates = self._policy.costs.dump(), self._policy.dump()
            raw = msgspec.msgpack.encode(_Saved(_VERSION, self._owner, costs, rates, since, self._memory.dump()))
            self._saved, self._saved_at = state, now
            try:
                write_private(self.path, hashlib.blake2b(raw, digest_size=_DIGEST).digest() + raw)
                os.utime(self.path, (since, since))
            except OSError as error:
                log.warning("what drafts are made from could not be written: %s", error, extra={"file": str(self.path)})

    def forget(self) -> None:
        """Forget all texts, in memory and on disk. Raises OSError if a file cannot be removed."""
        with self._lock:  # after who writes it now
            self._memory.clear()
            self._saved = self._state
            remove_draft_files(self.path.parent)


def remove_draft_files(folder: Path, before: float = inf) -> None:
    """Remove the files of all models, also of those that are not open, whose oldest text is from before a time (seconds
    since 1970). Raises OSError if one cannot be removed."""
    for path in folder.glob("drafts-*.bin*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before:
                path.unlink()
