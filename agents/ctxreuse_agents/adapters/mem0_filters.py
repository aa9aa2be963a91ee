"""mem0's filters on payloads: values, comparisons, lists, and AND, OR and NOT of them, as in its default store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ctxreuse.errors import ConfigError

__all__ = ["meets"]

#: Of conditions that others are made of; mem0 passes some on under the second name.
_JOINS: dict[str, Callable[[Any], bool]] = {"AND": all, "OR": any, "NOT": lambda found: not any(found)}
_JOINS |= {"$and": all, "$or": any, "$not": _JOINS["NOT"]}


def meets(payload: Mapping[str, Any], filters: Mapping[str, Any]) -> bool:
    """Return True if a payload meets all filters. Raises ConfigError for what is no filter of mem0."""
    for name, wanted in filters.items():
        join = _JOINS.get(name)
        if join is None:
            if not _fits(payload, name, wanted):
                return False
        elif not isinstance(wanted, list) or not all(isinstance(one, Mapping) for one in wanted):
            raise ConfigError(f"{name} is no list of filters", fix=f'Give {name}: [{{"name": "value"}}, …]')
        elif not join(meets(payload, one) for one in wanted):
            return False
    return True


def _fits(payload: Mapping[str, Any], name: str, wanted: Any) -> bool:
    if name not in payload:
        return False
    if isinstance(wanted, str) and wanted == "*":
        return True
    value = payload[name]
    values = value if isinstance(value, list) else [value]
    if isinstance(wanted, list):
        wanted = {"in": wanted}
    if not isinstance(wanted, Mapping):
        wanted = {"eq": wanted}
    for operator, other in wanted.items():
        compare = _OPERATORS.get(operator)
        if compare is None:
            raise ConfigError(f"there is no comparison {operator!r}"[:100], fix=f"Use {', '.join(_OPERATORS)}")
        if not any(compare(one, other) for one in values):
            return False
    return True


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _among(value: Any, others: Any) -> bool:
    return any(_same(value, one) for one in (others if isinstance(others, list | tuple) else [others]))


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compared(value: Any, other: Any) -> bool:
        one, two = _number(value), _number(other)
        return one is not None and two is not None and compare(one, two)

    return compared


def _number(value: Any) -> float | None:
    """A number, or a time as the number of its seconds; None for what has no order."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    return None


def _has(value: Any, text: Any) -> bool:
    return isinstance(value, str) and isinstance(text, str) and text in value


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": _same,
    "ne": lambda value, other: not _same(value, other),
    "in": _among,
    "nin": lambda value, others: not _among(value, others),
    "gt": _ordered(lambda value, other: value > other),
    "gte": _ordered(lambda value, other: value >= other),
    "lt": _ordered(lambda value, other: value < other),
    "lte": _ordered(lambda value, other: value <= other),
    "contains": _has,
    "icontains": lambda value, text: _has(str(value).casefold(), str(text).casefold()),
}
