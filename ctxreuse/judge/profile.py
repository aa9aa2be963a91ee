"""How far a model can be trusted to judge steps, as measured; written as checked bytes."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

import msgspec
import xxhash

from ctxreuse.codec.profile_store import SingleProfileStore
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.identity.keys import KEY_BYTES

__all__ = [
    "LEAST_AUC",
    "MAX_STEP",
    "JudgeProfile",
    "JudgeProfileStore",
    "Judged",
    "read_judge_profile",
    "write_judge_profile",
]

#: A judge that puts a right step above a wrong one less often is refused.
LEAST_AUC = 0.7
#: Tokens of a step at most: the logits of all of them are in memory at once.
MAX_STEP = 128
_MOST, _VERSION = 1 << 16, 1
_FIX = "Calibrate again: `ctxreuse calibrate NAME --judge`"


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """One way of judging, as measured on labelled steps.

    Attributes:
        auc: how probably a right step scores above a wrong one.
        threshold: the score from which on a step is accepted, unless a request says another.
        steps: how many were judged.
        tasks: ``auc`` by kind of task, as far as there are right and wrong steps of it.
    """

    auc: float
    threshold: float
    steps: int
    tasks: Mapping[str, float] = {}

    def check(self, name: str) -> None:
        """Raise ConfigError if it cannot be trusted; ``name``: of the judge, for people."""
        if not self.auc >= LEAST_AUC:
            what = (
                f"the judge {name} puts a right step above a wrong one {self.auc:.0%} of the time, by chance it is 50 %"
            )
            fix = f"Take a larger model or another way of judging: at least {LEAST_AUC:.0%} is needed"
            raise ConfigError(what, where=f"{self.steps} labelled steps", fix=fix)


class JudgeProfile(msgspec.Struct, frozen=True, array_like=True):
    """How well one model judges, by the way: ``likelihood``, ``digit``. ``model``: its `model_digest`; ``notes``: of
    what and when, for people."""

    model: bytes
    judges: Mapping[str, Judged]
    notes: Mapping[str, str] = {}


def write_judge_profile(profile: JudgeProfile) -> bytes:
    """Return the bytes of a profile. FormatError if they could not be read back."""
    body = msgspec.msgpack.encode((_VERSION, profile))
    data = xxhash.xxh3_64_digest(body) + body
    read_judge_profile(data)
    return data


def read_judge_profile(data: bytes) -> JudgeProfile:
    """Parse a profile. Raises FormatError with the reason."""
    if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
        raise FormatError("judge profile is damaged", fix=_FIX)
    try:
        version, profile = msgspec.msgpack.decode(data[8:], type=tuple[int, JudgeProfile])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"judge profile is malformed: {error}", fix=_FIX) from None
    if version != _VERSION or len(profile.model) != KEY_BYTES:
        raise FormatError(f"judge profile is of version {version}, this reads version {_VERSION}", fix=_FIX)
    if not all(0 <= one.auc <= 1 and isfinite(one.threshold) for one in profile.judges.values()):
        raise FormatError("judge profile has a number that cannot be", fix=_FIX)
    return profile


class JudgeProfileStore(SingleProfileStore[JudgeProfile]):
    """The judge profiles of this user, one file a model beside its codec profiles."""

    def __init__(self, folder: Path | str | None = None) -> None:
        super().__init__(folder, "steps.judge", read_judge_profile, write_judge_profile, most=_MOST)
