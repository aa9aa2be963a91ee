"""Names of sessions made of a framework's keys, which may be any text."""

from __future__ import annotations

import hashlib
from urllib.parse import quote, unquote

__all__ = ["key_of", "namespace_of", "session_name"]

#: Beside letters and digits, what a name may have as it is: no blank, which cannot end one, and no separator.
_PLAIN = "!$&'()*+,;=@[]^`{|}"
#: Characters of a part of a namespace; of a longer one stand its beginning and a digest.
_LONGEST, _BEGINNING = 100, 60


def session_name(room: str, *keys: str) -> str:
    """Return the name of the session of some keys in a room of names; `key_of` reads the last one again."""
    return f"{room}:" + "/".join(quote(key, safe=_PLAIN, errors="replace") for key in keys)


def key_of(name: str) -> str:
    """Return the last key in a session's name."""
    return unquote(name.partition(":")[2].rpartition("/")[2])


def namespace_of(room: str, *keys: str | None) -> str:
    """Return the namespace of some keys; None stands for a key that is not given. Of long keys it has a digest."""
    return "/".join([room, *map(_part, keys)])


def _part(key: str | None) -> str:
    if key is None:
        return "-"
    part = "=" + quote(key, safe=_PLAIN, errors="replace")
    return part if len(part) <= _LONGEST else part[:_BEGINNING] + hashlib.sha256(part.encode()).hexdigest()[:32]
