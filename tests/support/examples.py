"""How much a property test or a loop tries: by weight, in numbers that the hypothesis profile gives."""

from __future__ import annotations

from math import ceil
from typing import Any, Final, Literal, NamedTuple

from hypothesis import HealthCheck, settings

__all__ = ["PROFILES", "Weight", "examples", "register_profiles", "scale"]

Weight = Literal["light", "normal", "heavy"]


class _Depth(NamedTuple):
    examples: dict[Weight, int]
    default: int
    """Examples of a property that names no weight."""
    loops: float
    """Rounds of a loop, as a share of the usual ones."""


PROFILES: Final = {
    "ci": _Depth({"light": 50, "normal": 16, "heavy": 6}, 25, 0.25),
    "nightly": _Depth({"light": 400, "normal": 120, "heavy": 40}, 200, 1.0),
    "fuzz": _Depth({"light": 4000, "normal": 1200, "heavy": 400}, 2000, 20.0),
}
#: A slow machine is no finding.
_SUPPRESSED: Final = (HealthCheck.too_slow,)


def register_profiles(load: str = "ci") -> None:
    """Register all profiles and load one; ``--hypothesis-profile`` loads another later."""
    for name, depth in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=depth.default,
            deadline=None,
            suppress_health_check=_SUPPRESSED,
            print_blob=True,
        )
    settings.load_profile(load)


def examples(weight: Weight = "normal", **other: Any) -> settings:
    """Return settings (a decorator, or a state machine's) for examples that cost this much.

    ``light``: under a few milliseconds each, ``normal``: some tens, ``heavy``: engines, disks, processes.
    """
    suppressed = {*_SUPPRESSED, *other.pop("suppress_health_check", ())}
    return settings(max_examples=_depth().examples[weight], suppress_health_check=list(suppressed), **other)


def scale(rounds: int) -> int:
    """Return how many of ``rounds`` usual rounds the profile asks for, at least one."""
    return max(1, ceil(rounds * _depth().loops))


def _depth() -> _Depth:
    return PROFILES[settings.get_current_profile_name()]
