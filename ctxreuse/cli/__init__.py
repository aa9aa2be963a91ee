"""The command ``ctxreuse``: one module a group of commands, each importing what it needs when it runs."""

from __future__ import annotations

from ctxreuse.cli.app import main

__all__ = ["main"]
