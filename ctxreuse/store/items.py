"""Items: bytes by key beside the sessions of a ledger, in its file, as durable as turns, and backed up with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ctxreuse.store.ledger.history import History
from ctxreuse.store.ledger.items import ItemTable, item_key
from ctxreuse.store.ledger.ledger import Ledger

__all__ = ["ItemTable", "Items", "item_key"]

T = TypeVar("T")


class Items:
    """The items of a ledger. Any thread may call; what `write` did is on disk when it returns."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @contextmanager
    def read(self) -> Iterator[ItemTable]:
        """Read one state of them, whatever is written meanwhile. Keep it short. Raises StoreError."""
        with self._ledger._read() as (txn, _):
            yield ItemTable(txn, self._ledger._env.tables)

    def write(self, work: Callable[[ItemTable], T]) -> T:
        """Run ``work`` in one transaction: all that it writes or nothing. It may run again, after the file has grown.

        Raises what methods of `Ledger` that write raise, and what ``work`` raises.
        """

        def run(txn: Any, _: History) -> T:
            table = ItemTable(txn, self._ledger._env.tables)
            result = work(table)
            if table.removed:
                self._ledger._deletions(txn).add()  # so that `compact` has work
            return result

        return self._ledger._write(run)
