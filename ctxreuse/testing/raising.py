"""The error that a call has to end with, as a value, for contracts that do without pytest themselves."""

from __future__ import annotations

__all__ = ["raises"]


def raises(kind: type[Exception], action: object, *arguments: object) -> Exception:
    """The error of that kind that the action raises."""
    assert callable(action)
    try:
        action(*arguments)
    except kind as error:
        return error
    raise AssertionError(f"{action} did not raise {kind.__name__}")
