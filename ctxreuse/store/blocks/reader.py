"""Reading blocks straight out of the memory map: found, parsed, compared with the request, or a counted miss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lmdb

from ctxreuse.block.format import BlockView, Buffer, Kind, parse
from ctxreuse.block.levels import allowed_by
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.store.blocks.tables import table_of
from ctxreuse.store.lmdb.records import diagnose

__all__ = ["DiskReader", "prove", "prove_key"]


def prove(data: Buffer, key: bytes, tokens: Tokens, space: bytes, kind: Kind) -> tuple[BlockView | None, str]:
    """Parse bytes that should be the value of ``key``. Returns the view, or None and the reason."""
    view, reason = prove_key(data, key, kind)
    if view is None:
        return None, reason
    if view.header.space != space:
        return None, "space"
    if view.header.tokens != tokens.tobytes():
        return None, "tokens"
    return view, ""


def prove_key(data: Buffer, key: bytes, kind: Kind) -> tuple[BlockView | None, str]:
    """As `prove`, without token ids and space."""
    try:
        view = parse(data)
    except FormatError:
        return None, diagnose(bytes(data[:32]), len(data))
    if view.header.key != key or view.header.kind != kind:
        return None, "foreign"
    return view, ""


class DiskReader:
    """A read over one LMDB transaction; see ``Reader``. ``buffers`` of the transaction must be on.

    py-lmdb touches every page of a value inside ``get`` with the interpreter lock released, so populating its range
    with MADV_POPULATE_READ as well gains nothing: 1.33 GB/s either way where the file is not in the page cache, 4.9
    where it is (new process, 64 values of 1.5 MB).
    """

    def __init__(
        self, txn: Any, tables: dict[str, Any], miss: Callable[[bytes, str], None], max_kl: float | None = None
    ) -> None:
        self._txn, self._tables, self._miss, self._max_kl = txn, tables, miss, max_kl
        self._views: list[BlockView] = []
        self.used: list[bytes] = []
        self.served: dict[str, int] = {}
        self.missed = ""

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("block", key, tokens, space)

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        return self._get("state", key, tokens, space)

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        """See `Reader.peek`; a value that is not this key's counts as a miss and is dropped."""
        try:
            data = self._txn.get(key, db=self._tables[table_of(kind)])
            view, reason = prove_key(data, key, kind) if data is not None else (None, "absent")
        except lmdb.Error:
            view, reason = None, "unreadable"
        if view is not None and not allowed_by(view.header.level, self._max_kl):
            view, reason = None, "absent"
        if view is not None:
            self._views.append(view)
        elif reason != "absent":
            self._miss(key, reason)
        return view

    def _get(self, kind: Kind, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        view, reason = None, "absent"
        try:
            data = self._txn.get(key, db=self._tables[table_of(kind)])
            if data is not None:
                view, reason = prove(data, key, tokens, space, kind)
            if view is not None and not allowed_by(view.header.level, self._max_kl):
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
        """Invalidate the views, as their memory may be reused."""
        for view in self._views:
            # An array on the page keeps the export alive; it must not be read any more.
            with contextlib.suppress(BufferError):
                view.buffer.release()
        self._views.clear()
