"""What a search is limited to, as conditions of SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from ctxreuse.errors import SessionError
from ctxreuse.store.ledger.records import check_namespace, require_text

__all__ = ["Filters", "field_value"]

#: Conditions on meta, at most.
_MOST = 32


class Filters(msgspec.Struct, frozen=True):
    """Limits of a search; None: no limit.

    ``session``: id or name; what its forks share with it counts. ``namespace``: it and those below it. ``role``: of the
    turn. ``since``: seconds since 1970, or a datetime. ``where``: values that the turn's meta must have: text, numbers,
    True, False or None. ``beside``: id or name of a session whose own turns are left out.
    """

    session: str | None = None
    beside: str | None = None
    namespace: str | None = None
    role: str | None = None
    since: float | datetime | None = None
    where: Mapping[str, Any] | None = None

    def sql(self, turns_of: Callable[[str], list[int]]) -> tuple[str, list[Any]]:
        """Return conditions on the table ``turns`` and their values; ``turns_of``: of a session, by its id or name.

        Raises SessionError for a limit that cannot be one.
        """
        conditions, values = ["1"], list[Any]()
        for name, within in ((self.session, "IN"), (self.beside, "NOT IN")):
            if name is not None:
                conditions.append(f"turns.id {within} (SELECT value FROM json_each(?))")
                values.append(json.dumps(turns_of(name)))
        if self.namespace is not None:
            name = check_namespace(self.namespace)
            if name:
                # "0" comes after "/": all that begins with the name and a slash, by the table's own order.
                conditions.append("(turns.namespace = ? OR (turns.namespace >= ? AND turns.namespace < ?))")
                values += [name, f"{name}/", f"{name}0"]
        if self.role is not None:
            conditions.append("turns.role = ?")
            values.append(require_text(self.role, "a role").decode())
        if self.since is not None:
            conditions.append("turns.created >= ?")
            values.append(_seconds(self.since))
        where = {} if self.where is None else self.where
        if not isinstance(where, Mapping) or len(where) > _MOST:
            raise SessionError(f"where is no mapping of at most {_MOST} values", fix='Give where={"name": value}')
        for name, value in where.items():
            wanted = field_value(value)
            if wanted is None or not isinstance(name, str):
                fix = "Use text, a number, True, False or None, by names that are text"
                raise SessionError(f"where[{name!r}] is {type(value).__name__}, which cannot be searched for", fix=fix)
            conditions.append("turns.id IN (SELECT turn FROM fields WHERE name = ? AND value = ?)")
            values += [require_text(name, "a name of meta").decode(), wanted]
        return " AND ".join(conditions), values


def _seconds(value: object) -> float:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return float(value)
    raise SessionError(f"since is {value!r:.60}", fix="Give seconds since 1970, or a datetime")


def field_value(value: object) -> str | None:
    """Return a value of meta as the index has it; None for what cannot be searched for."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str) and len(value) <= 1000:
        return json.dumps(value)
    return None
