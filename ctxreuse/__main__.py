"""``python -m ctxreuse`` is the command ``ctxreuse``."""

from __future__ import annotations

from ctxreuse.cli.app import main

if __name__ == "__main__":
    main()
