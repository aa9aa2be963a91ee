"""How a store has its values encoded: the coders that engines brought along, by model space, and what they can do."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

from ctxreuse.block import parse
from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.levels import EXACT, PACKED, check_lossy, damage, fits, is_exact
from ctxreuse.store.base import Coder
from ctxreuse.store.put import Put

__all__ = ["Coders", "check_level"]

log = logging.getLogger(__name__)


def check_level(level: str) -> str:
    """A level that blocks may be kept at: ``exact``, ``exact+rans`` or a lossy one's name. Raises ConfigError."""
    try:
        return level if level in (EXACT, PACKED) else check_lossy(level)
    except ConfigError as error:
        fix = f"Use {EXACT}, {PACKED} or the name of a lossy level, such as kl-0.01"
        raise ConfigError(f"no such level: {level[:64]!r}", fix=fix) from error


class Coders:
    """Coders by the digest of their space; ``level`` is that at which blocks are to be kept. Any thread may call.

    A block whose space nobody brought a coder for is kept as it came.
    """

    def __init__(self, level: str = EXACT) -> None:
        self._level = check_level(level)
        self._coders: dict[bytes, Coder] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._coders)

    def adopt(self, coder: Coder) -> None:
        """Encode blocks of its space with it from now on; the last one adopted of a space is used."""
        with self._lock:
            self._coders[coder.space.digest] = coder

    def ratio(self, level: str) -> float | None:
        """Size of a block at a level as a share of its exact size, by what coders expect; None if none can make it."""
        with self._lock:
            coders = list(self._coders.values())
        shares = [s for s in (_share(coder, level) for coder in coders) if s is not None]
        return min(shares, default=None) if level != EXACT else 1.0

    def resting(self, put: Put) -> Put:
        """The put with the level at which it will be kept; its bytes stay."""
        return put._replace(level=self._target(put))

    def _target(self, put: Put) -> str:
        coder = self._coders.get(put.space)
        if coder is None or not is_exact(put.level) or self._level == EXACT:
            return put.level
        if self._level != PACKED and fits(self._level, put.lossy or None) and _share(coder, self._level) is not None:
            return self._level
        return PACKED if _share(coder, PACKED) is not None else put.level

    def encoded(self, put: Put) -> Put:
        """The put as it will be kept: encoded now if that makes it smaller. Takes time; never raises."""
        target = self._target(put)
        # What is no smaller at the level that was hoped for beats all the same what it would have beaten there.
        for to in dict.fromkeys((target, PACKED)) if target != put.level else ():
            made = self.shrink(put.data, to) if to != put.level else None
            again = Put.parse(put.key, made, put.kind, put.replace, put.lossy or None) if made is not None else None
            if again is not None and again.size < put.size:
                return again
        return put

    def shrink(self, data: memoryview, to: str) -> npt.NDArray[np.uint8] | None:
        """New bytes of a block or state at the level ``to``; None if nobody can make them or they are no smaller."""
        try:
            view = parse(data)
            coder = self._coders.get(view.header.space)
            if coder is None or damage(to) < damage(view.header.level) or _share(coder, to) is None:
                return None
            raw = view if view.header.level == EXACT else parse(coder.decode(view))
            made = coder.encode(raw, to)
        except CtxReuseError as error:
            log.warning("a value stays as it is: %s", error)
            return None
        except Exception:
            # Whatever is wrong with a coder, the writer must get its batch to the disk.
            log.exception("a value stays as it is: its coder failed")
            return None
        return made if made.nbytes < len(data) else None


def _share(coder: Coder, level: str) -> float | None:
    if level != EXACT and all(info.name != level for info in coder.levels):
        return None
    whole = coder.nbytes(EXACT)
    return coder.nbytes(level) / whole if whole else None
