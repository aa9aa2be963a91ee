"""Every error that ctxreuse raises, as one tree.

::

    CtxReuseError
    ├── ConfigError                 a setting, flag or file that the user can change is wrong
    │   └── GrammarError            a schema, pattern, grammar or tool that answers cannot be held to
    ├── FormatError                 bytes (from disk or wire) are not a block of this version
    ├── StoreError                  the store on disk cannot do this
    │   ├── StoreOwnedError         another process owns the store for writing
    │   ├── StoreFullError          the disk or the map has no room left
    │   ├── StoreReadOnlyError      a write on a store that was opened for reading
    │   ├── StoreClosedError        use after close()
    │   └── StoreDamagedError       bytes on disk are not what was written
    ├── LinkError                   another node cannot be reached or breaks what was agreed; work goes on without it
    │   ├── LinkDownError           no answer in time, or the connection was lost
    │   ├── LinkRefusedError        the peer does not accept this node: unknown or revoked key, version, model space
    │   └── ProtocolError           the peer sent what the protocol does not allow
    ├── SessionError                a session, turn or fork that does not exist or cannot be changed so
    └── EngineError                 the model or its engine cannot do this
        ├── EngineDiedError         the process of the engine has ended, and its contexts with it
        ├── ContextTooLongError     more tokens than the model has positions for
        └── TokenRangeError         a token id outside the vocabulary

A miss is never an error: it is a value, and it costs time only.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ContextTooLongError",
    "CtxReuseError",
    "EngineDiedError",
    "EngineError",
    "FormatError",
    "GrammarError",
    "LinkDownError",
    "LinkError",
    "LinkRefusedError",
    "ProtocolError",
    "SessionError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreOwnedError",
    "StoreReadOnlyError",
    "TokenRangeError",
]


class CtxReuseError(Exception):
    """Base of all. Says *what* went wrong, *where*, and how to *fix* it; each part is kept as an attribute."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        text = what if not where else f"{what} ({where})"
        super().__init__(text if not fix else f"{text}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields would be lost by the default pickling of exceptions.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[CtxReuseError], what: str, where: str, fix: str) -> CtxReuseError:
    return kind(what, where=where, fix=fix)


class ConfigError(CtxReuseError):
    """A setting, flag or file that the user can change is wrong."""


class GrammarError(ConfigError):
    """A schema, pattern, grammar or tool that answers cannot be held to: wrong, not supported or too complex."""


class FormatError(CtxReuseError):
    """Bytes from disk or wire are not what their format promises. The bytes are never used."""


class StoreError(CtxReuseError):
    """The store on disk cannot do what the call needs."""


class StoreOwnedError(StoreError):
    """Another process owns the store for writing."""


class StoreFullError(StoreError):
    """The disk or the map has no room left; what was acknowledged before is intact."""


class StoreReadOnlyError(StoreError):
    """A write on a store that was opened for reading."""


class StoreClosedError(StoreError):
    """The store was used after close()."""


class StoreDamagedError(StoreError):
    """Bytes on disk are not what was written. They are never used, and never changed."""


class LinkError(CtxReuseError):
    """Another node cannot be reached or does not do what was agreed. Requests go on without it."""


class LinkDownError(LinkError):
    """No answer in time, or the connection was lost; trying again later may work."""


class LinkRefusedError(LinkError):
    """The peer does not accept this node: its key, protocol version, tenant or model space."""


class ProtocolError(LinkError):
    """The peer sent what the protocol does not allow; the link to it is closed."""


class SessionError(CtxReuseError):
    """A session, turn or fork that does not exist or cannot be changed in that way."""


class EngineError(CtxReuseError):
    """The model or its engine cannot do what the call needs."""


class EngineDiedError(EngineError):
    """The process of the engine has ended: its contexts are gone, what was stored is not. It is started again."""

    def again(self) -> EngineDiedError:
        """The same error for another caller, as each raises its own."""
        return EngineDiedError(self.what, where=self.where, fix=self.fix)


class ContextTooLongError(EngineError):
    """More tokens than the model has positions for."""


class TokenRangeError(EngineError):
    """A token id outside the model's vocabulary."""
