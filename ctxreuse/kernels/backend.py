"""Which implementation the kernels run on: the native extension, or numpy where it is not built or not wanted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxreuse import _native as backend
elif os.environ.get("CTXREUSE_KERNELS") == "numpy":
    from ctxreuse.kernels import reference as backend
else:
    try:
        import ctxreuse._native as backend  # `from ctxreuse import` would tell absent and broken alike: ImportError
    except ModuleNotFoundError:  # never built here; a table that cannot run is a plain ImportError and goes on up
        from ctxreuse.kernels import reference as backend

__all__ = ["backend"]
