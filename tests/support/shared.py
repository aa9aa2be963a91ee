"""Values that take a minute to compute: once for all processes of a run, and kept for the next run of the same code."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

__all__ = ["computed_once", "smollm2_card"]

ROOT: Final = Path(__file__).resolve().parents[2]
_FOLDER: Final = ROOT / "build" / "tests"


def computed_once(name: str, sources: Iterable[str], compute: Callable[[], bytes]) -> bytes:
    """Return what ``compute`` returned for these sources, in this process or another, now or in an earlier run.

    Args:
        name: file name of the value under ``build/tests``.
        sources: files and folders, relative to the repository, that the value depends on.
        compute: called by one process while the others wait.
    """
    digest = hashlib.sha256()
    for path in _files(sources):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    _FOLDER.mkdir(parents=True, exist_ok=True)
    kept = _FOLDER / f"{name}-{digest.hexdigest()[:16]}"
    with (_FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for old in _FOLDER.glob(f"{name}-*"):
                old.unlink()
            new = kept.with_suffix(".new")
            new.write_bytes(compute())
            new.rename(kept)
    return kept.read_bytes()


def smollm2_card() -> bytes:
    """A profile of SmolLM2 with most usual levels, from an eighth of the usual text; takes a minute or two once."""
    core = ("block", "calibrate", "codec", "engines", "identity", "kernels", "models")
    sources = [*(f"ctxreuse/{part}" for part in core), "native", "constraints.txt", "tests/support/shared.py"]
    return computed_once("smollm2-card", sources, _calibrated)


def _calibrated() -> bytes:

    from ctxreuse.calibrate import DEFAULT_TARGETS, calibrate, default_texts, settings_for
    from ctxreuse.codec import write_profile
    from ctxreuse.engines import open_for_calibration

    gauge, text = open_for_calibration("smollm2")
    # One joint level will do: of so little text such transforms are poor, and each takes its time.
    targets = tuple(target for target in DEFAULT_TARGETS if not target.joint or target.kl == 0.05)
    settings = settings_for(gauge, calibration=5, validation=3, held_out=2)
    settings = settings._replace(prefix=384, scored=64, targets=targets)
    return write_profile(calibrate(gauge, text, default_texts(), settings, lambda *_: None, {"model": "smollm2"}))


def _files(sources: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        path = ROOT / source
        inside = [path] if path.is_file() else path.rglob("*")
        found += [one for one in inside if one.is_file() and one.suffix not in (".pyc", ".so")]
    return sorted(found)
