"""Reading blocks straight out of the map: found, parsed, proven to be the one meant, or a counted miss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lmdb

from ctxreuse.block import BlockView, parse
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.levels import fits
from ctxreuse.store.base import Buffer, Kind
from ctxreuse.store.records import diagnose

__all__ = ["DiskReader", "prove", "prove_key"]


def prove(data: Buffer, key: bytes, tokens: Tokens, space: bytes, kind: Kind) -> tuple[BlockView | None, str]:
    """Parse bytes that should be the value of ``key``; the view, or None and the reason."""
    view, reason = prove_key(data, key, kind)
    if view is None:
        return None, reason
    if view.header.space != space:
        return None, "space"
    if view.header.tokens != tokens.tobytes():
        return None, "tokens"
    return view, ""


def prove_key(data: Buffer, key: bytes, kind: Kind) -> tuple[BlockView | None, str]:
    """As `prove`, where token ids and space are not known."""
    try:
        view = parse(data)
    except FormatError:
        return None, diagnose(bytes(data[:32]), len(data))
    if view.header.key != key or view.header.kind != kind:
        return None, "foreign"
    return view, ""


class DiskReader:
    """A read over one LMDB transaction; see ``Reader``. ``buffers`` of the transaction must be on.

    py-lmdb touches every page of a value inside ``get`` with the interpreter lock released, so a separate populating
    call would come too late: a fresh process reads and copies a map that is in the page cache at 8.8 GB/s either way.
    """

    def __init__(
        self, txn: Any, tables: dict[str, Any], miss: Callable[[bytes, str], None], lossy: str | None = None
    ) -> None:
        self._txn, self._tables, self._miss, self._lossy = txn, tables, miss, lossy
        self._views: list[BlockView] = []
        self.used: list[bytes] = []
        self.served: dict[str, int] = {}
        self.missed = ""

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("block", key, tokens, space)

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("state", key, tokens, space)

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        """See `Reader.peek`; what is there but is not this key's counts as a miss and is dropped."""
        try:
            data = self._txn.get(key, db=self._tables["blocks" if kind == "block" else "states"])
            view, reason = prove_key(data, key, kind) if data is not None else (None, "absent")
        except lmdb.Error:
            view, reason = None, "unreadable"
        if view is not None and not fits(view.header.level, self._lossy):
            view, reason = None, "absent"
        if view is not None:
            self._views.append(view)
        elif reason != "absent":
            self._miss(key, reason)
        return view

    def _get(self, kind: Kind, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        view, reason = None, "absent"
        try:
            data = self._txn.get(key, db=self._tables["blocks" if kind == "block" else "states"])
            if data is not None:
                view, reason = prove(data, key, tokens, space, kind)
            if view is not None and not fits(view.header.level, self._lossy):
                view, reason = None, "level"
        except lmdb.Error:
            reason = "unreadable"
        if view is None:
            self.missed = self.missed or reason
            self._miss(key, reason)
            return None
        self._views.append(view)
        self.used.append(key)
        if kind == "block":
            self.served["disk"] = self.served.get("disk", 0) + len(tokens)
        return view

    def release(self) -> None:
        """Make the views unusable, as their memory changes hands; arrays taken from them are the caller's."""
        for view in self._views:
            # An array that still looks at the page keeps the export alive; it must not be read any more.
            with contextlib.suppress(BufferError):
                view.buffer.release()
        self._views.clear()
