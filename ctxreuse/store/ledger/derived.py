"""What lies beside a ledger and is made of it: an index of its texts, which goes when what was deleted must go."""

from __future__ import annotations

import shutil
from pathlib import Path

from ctxreuse.errors import StoreError

__all__ = ["INDEX", "drop_index"]

#: The index's folder, in a store's folder.
INDEX = "recall"


def drop_index(place: Path) -> None:
    """Delete the index of the store in a folder; the next search makes it again. Raises StoreError."""
    try:
        shutil.rmtree(place / INDEX)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"the index cannot be deleted: {error}", where=str(place / INDEX)) from None
