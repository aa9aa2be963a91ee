"""Compute a context once; then keep, fork, move and reuse it.

Names are imported when first used, so that ``import ctxreuse`` costs a few milliseconds and pulls in no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxreuse.block import BlockView as BlockView
    from ctxreuse.block import BlockWriter as BlockWriter
    from ctxreuse.engines import Engine as Engine
    from ctxreuse.engines import open_engine as open_engine
    from ctxreuse.engines.sampling import Sampling as Sampling
    from ctxreuse.engines.text import TextModel as TextModel
    from ctxreuse.errors import ConfigError as ConfigError
    from ctxreuse.errors import ContextTooLongError as ContextTooLongError
    from ctxreuse.errors import CtxReuseError as CtxReuseError
    from ctxreuse.errors import EngineError as EngineError
    from ctxreuse.errors import FormatError as FormatError
    from ctxreuse.errors import LinkDownError as LinkDownError
    from ctxreuse.errors import LinkError as LinkError
    from ctxreuse.errors import LinkRefusedError as LinkRefusedError
    from ctxreuse.errors import ProtocolError as ProtocolError
    from ctxreuse.errors import SessionError as SessionError
    from ctxreuse.errors import StoreClosedError as StoreClosedError
    from ctxreuse.errors import StoreError as StoreError
    from ctxreuse.errors import StoreFullError as StoreFullError
    from ctxreuse.errors import StoreOwnedError as StoreOwnedError
    from ctxreuse.errors import StoreReadOnlyError as StoreReadOnlyError
    from ctxreuse.errors import TokenRangeError as TokenRangeError
    from ctxreuse.model import LayerSpec as LayerSpec
    from ctxreuse.model import ModelSpace as ModelSpace
    from ctxreuse.runtime import Completion as Completion
    from ctxreuse.runtime import Runtime as Runtime
    from ctxreuse.runtime import Usage as Usage
    from ctxreuse.store import BlockStore as BlockStore
    from ctxreuse.store import Ledger as Ledger
    from ctxreuse.store import open_store as open_store
    from ctxreuse.tree import ContextTree as ContextTree
    from ctxreuse.tree import Match as Match

    __version__: str

__all__ = [
    "BlockStore",
    "BlockView",
    "BlockWriter",
    "Completion",
    "ConfigError",
    "ContextTooLongError",
    "ContextTree",
    "CtxReuseError",
    "Engine",
    "EngineError",
    "FormatError",
    "LayerSpec",
    "Ledger",
    "LinkDownError",
    "LinkError",
    "LinkRefusedError",
    "Match",
    "ModelSpace",
    "ProtocolError",
    "Runtime",
    "Sampling",
    "SessionError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreOwnedError",
    "StoreReadOnlyError",
    "TextModel",
    "TokenRangeError",
    "Usage",
    "__version__",
    "open_engine",
    "open_store",
]

_HOME = {
    "BlockStore": "store",
    "BlockView": "block",
    "BlockWriter": "block",
    "Completion": "runtime",
    "ContextTree": "tree",
    "Engine": "engines",
    "LayerSpec": "model",
    "Ledger": "store",
    "Match": "tree",
    "ModelSpace": "model",
    "Runtime": "runtime",
    "Sampling": "engines.sampling",
    "TextModel": "engines.text",
    "Usage": "runtime",
    "open_engine": "engines",
    "open_store": "store",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("ctxreuse")
    elif name in __all__:
        from importlib import import_module

        value = getattr(import_module(f"ctxreuse.{_HOME.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'ctxreuse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
