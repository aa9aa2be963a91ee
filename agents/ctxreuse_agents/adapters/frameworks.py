"""Frameworks that an adapter is for: what to install where one is missing, and a warning for one newer than tested."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ctxreuse.errors import ConfigError

__all__ = ["framework"]


@contextmanager
def framework(package: str, first: str, beyond: str) -> Iterator[None]:
    """Import a framework inside; versions from ``first`` up to ``beyond``, itself excluded, are tested.

    Raises ConfigError if it is missing or too old. A newer one is tried, with a warning.
    """
    fix = f"Run: pip install '{package}>={first}'"
    try:
        yield
    except ImportError as error:
        found = _installed(package)
        what = f"{package} {found} is not what this adapter needs: {error}" if found else f"{package} is not installed"
        raise ConfigError(what, fix=fix) from error
    version = _installed(package)
    if version and _number(version) < _number(first):
        raise ConfigError(f"{package} {version} is older than {first}", fix=fix)
    if version and _number(version) >= _number(beyond):
        text = f"{package} {version} is newer than this adapter was tested with (up to, not including, {beyond})"
        warnings.warn(f"{text}; it is tried. Another can be had: pip install '{package}<{beyond}'", stacklevel=3)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
