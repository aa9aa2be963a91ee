"""Reads what is left in a damaged LMDB file, page by page and without LMDB, which would trust what it reads."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ctxreuse.store.lmdb.recovery import Meta, metas
from ctxreuse.store.types import Progress

__all__ = ["Salvaged", "salvage"]

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _TABLE_RECORD = 1, 2
_HEAD, _NODE_HEAD = 16, 8
_NO_PAGE = (1 << 64) - 1


class Salvaged(NamedTuple):
    """Entries by table, as far as trees could be walked; ``strays``: those of pages that no tree leads to any more, or
    whose head is damaged, some of which may have been deleted or replaced before. ``lost``: what could not be read, in
    words. ``whole``: the tables of which nothing is lost.
    """

    tables: dict[str, dict[bytes, bytes]]
    strays: list[tuple[bytes, bytes]]
    lost: list[str]
    whole: set[str]


class _Node(NamedTuple):
    key: bytes
    value: bytes
    flags: int
    child: int


def salvage(home: Path, progress: Progress | None = None) -> Salvaged:
    """Read ``home/data.mdb``, which no process may write meanwhile."""
    with open(home / "data.mdb", "rb") as file:
        return _Salvage(file.fileno(), metas(home)).run(progress)


class _Salvage:
    def __init__(self, fd: int, found: list[Meta]) -> None:
        self._fd, self._meta = fd, found[0] if found else None
        self._psize = found[0].page_size if found else 4096
        self._pages = os.fstat(fd).st_size // self._psize
        self._seen: set[int] = {0, 1}
        self._lost: list[str] = []
        self._strays: list[tuple[bytes, bytes]] = []
        if len(found) < 2:
            self._lost.append(f"{2 - len(found)} of the two meta pages: the last change may be missing")

    def run(self, progress: Progress | None) -> Salvaged:
        tables: dict[str, dict[bytes, bytes]] = {}
        whole: set[str] = set()
        meta = self._meta
        if meta is not None and meta.main is not None:
            for node in self._walk(meta.main, "the table of tables"):
                if node.flags & _TABLE_RECORD and len(node.value) == 48:
                    name = node.key.decode("ascii", "replace")
                    root, before = int.from_bytes(node.value[40:], "little"), len(self._lost)
                    nodes = self._walk(root, f"table {name!r}") if root != _NO_PAGE else ()
                    tables[name] = {node.key: node.value for node in nodes}
                    if len(self._lost) == before:
                        whole.add(name)
        free = self._free()
        # Leaves whose head is whole first: what they point to is text, whatever it looks like.
        for sure in (True, False):
            for page in range(2, self._pages):
                if page not in self._seen and page not in free:
                    raw = self._read(page)
                    flags, head = _PAGE.unpack_from(raw)[2], _is_whole(raw, page)
                    if (head and flags == _LEAF) if sure else flags not in (_BRANCH, _OVERFLOW):
                        self._seen.add(page)
                        self._stray(self._nodes(raw, "a page that was cut off", head))
                if progress is not None and not sure and (not page % 256 or page == self._pages - 1):
                    progress(page + 1, self._pages)
        if meta is not None and meta.last >= self._pages:
            self._lost.append(f"{meta.last + 1 - self._pages} pages at the end of the file")
        return Salvaged(tables, self._strays, self._lost, whole)

    def _stray(self, nodes: Iterator[_Node]) -> None:
        self._strays += [(node.key, node.value) for node in nodes]

    def _read(self, page: int, count: int = 1) -> bytes:
        return os.pread(self._fd, count * self._psize, page * self._psize)

    def _free(self) -> set[int]:
        """Return the pages that are free, as far as that list can be read."""
        free: set[int] = set()
        root = self._meta.free if self._meta is not None else None
        for node in self._walk(root, "the list of free pages") if root is not None else ():
            numbers = struct.unpack(f"<{len(node.value) // 8}Q", node.value[: len(node.value) & ~7])
            free.update(numbers[1:])
        return free

    def _walk(self, root: int, what: str) -> Iterator[_Node]:
        """Iterate over the entries below a page; what cannot be read is noted."""
        todo = [root]
        while todo:
            page = todo.pop()
            raw = self._read(page) if 2 <= page < self._pages else b""
            if page in self._seen or not raw:
                self._lost.append(f"page {page} of {what}: it is not in the file")
                continue
            flags, whole = _PAGE.unpack_from(raw)[2], _is_whole(raw, page)
            self._seen.add(page)
            if not whole:
                self._lost.append(f"page {page} of {what}: its head is damaged")
            nodes = self._nodes(raw, what, whole)
            if flags == _BRANCH:
                todo += [node.child for node in nodes][::-1]
            elif whole:
                yield from nodes
            else:
                self._stray(nodes)

    def _nodes(self, raw: bytes, what: str, whole: bool) -> Iterator[_Node]:
        """Iterate over the nodes of a page; where its head is not whole, over all that may be nodes."""
        _, _, flags, lower, _ = _PAGE.unpack_from(raw)
        first = self._psize
        at = _HEAD
        while at + 2 <= (min(first, lower) if whole else first):
            (start,) = struct.unpack_from("<H", raw, at)
            at += 2
            if not at <= start <= self._psize - _NODE_HEAD:
                return
            first = min(first, start)
            low, high, node_flags, key_size = _NODE.unpack_from(raw, start)
            begin = start + _NODE_HEAD + key_size
            if begin > self._psize:
                continue
            key = raw[start + _NODE_HEAD : begin]
            if flags == _BRANCH:
                yield _Node(key, b"", 0, low | high << 16 | node_flags << 32)
                continue
            size = low | high << 16
            if node_flags & _BIG:
                value = self._big(int.from_bytes(raw[begin : begin + 8], "little"), size, what)
            else:
                value = raw[begin : begin + size] if begin + size <= self._psize else None
            if value is not None:
                yield _Node(key, value, node_flags, 0)

    def _big(self, page: int, size: int, what: str) -> bytes | None:
        """Return a value that has pages of its own; None if they are not in the file."""
        count = (_HEAD - 1 + size) // self._psize + 1
        if not 2 <= page <= self._pages - count:
            self._lost.append(f"page {page} of {what}: it is not in the file")
            return None
        self._seen.update(range(page, page + count))
        return self._read(page, count)[_HEAD : _HEAD + size]


def _is_whole(raw: bytes, page: int) -> bool:
    """Return True if the head of a tree's page is what LMDB writes."""
    number, _, flags, lower, upper = _PAGE.unpack_from(raw)
    return number == page and flags in (_BRANCH, _LEAF) and _HEAD <= lower <= upper <= len(raw)
