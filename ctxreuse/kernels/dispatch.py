"""The native extension: imported here and nowhere else, and which table of kernels the process uses."""

from __future__ import annotations

try:
    import ctxreuse._native as native
except ModuleNotFoundError as error:  # a table that cannot run raises a plain ImportError with its own message
    raise ImportError(
        "the native extension ctxreuse._native is not built. Install ctxreuse from a wheel, or run `pip install .` "
        "in its source tree with a C compiler present",
        name="ctxreuse._native",
    ) from error

__all__ = ["active", "available", "native", "use"]


def active() -> str:
    """Return the name of the table in use: `avx512`, `avx2`, `neon` or `generic`."""
    return native.active()


def available() -> tuple[str, ...]:
    """Return the names of the tables that run here, best first; the last is `generic`."""
    return native.kernels()


def use(name: str) -> None:
    """Switch the whole process to a table, for tests and benchmarks. ValueError if it is not in `available()`."""
    native.use(name)
