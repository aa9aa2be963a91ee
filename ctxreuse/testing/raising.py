"""The error that a call has to end with, as a value, for contracts that do without pytest themselves."""

from __future__ import annotations

__all__ = ["raises"]


def raises(
    kind: type[Exception] | tuple[type[Exception], ...], action: object, *arguments: object, **options: object
) -> Exception:
    """The error of that kind that the action raises."""
    assert callable(action)
    try:
        action(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{action} did not raise {kind}")
