"""Compute a context once; then keep, fork, move and reuse it.

``from ctxreuse import LLM, Memory, AsyncMemory, SamplingParams, Usage``. Errors are in `ctxreuse.errors`, formats in
`ctxreuse.block`, what to extend in `ctxreuse.engines`, `ctxreuse.store` and `ctxreuse.testing`. Names are imported when
first used, so that ``import ctxreuse`` costs a few milliseconds and pulls in no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxreuse_agents import AsyncMemory as AsyncMemory
    from ctxreuse_agents import Memory as Memory

    from ctxreuse.engines.sampling import SamplingParams as SamplingParams
    from ctxreuse.errors import CtxReuseError as CtxReuseError
    from ctxreuse.llm import LLM as LLM
    from ctxreuse.llm import Generation as Generation
    from ctxreuse.usage import Usage as Usage

    __version__: str

__all__ = ["LLM", "AsyncMemory", "CtxReuseError", "Generation", "Memory", "SamplingParams", "Usage", "__version__"]

_MODULES = {
    "CtxReuseError": "errors",
    "Generation": "llm",
    "LLM": "llm",
    "SamplingParams": "engines.sampling",
    "Usage": "usage",
}
#: Faces register what they offer here as entry points: the core imports none of them.
_FACES = "ctxreuse.faces"
#: Names of 0.1 and where they are now; they can be had from here for one version more.
_OLD_NAMES = {
    "BlockStore": "store",
    "BlockView": "block.format",
    "BlockWriter": "block.format",
    "Completion": "runtime",
    "ContextTree": "tree",
    "Engine": "engines",
    "LayerSpec": "identity.model",
    "Ledger": "store",
    "Match": "tree",
    "ModelSpace": "identity.model",
    "Runtime": "runtime",
    "Sampling": "engines.sampling",
    "TextModel": "engines.text",
    "open_engine": "engines",
    "open_store": "store",
    **dict.fromkeys(
        (
            "ConfigError",
            "ContextTooLongError",
            "EngineError",
            "FormatError",
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
        ),
        "errors",
    ),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "__version__":
        value: Any = metadata.version("ctxreuse")
    elif name in _MODULES:
        value = getattr(import_module(f"ctxreuse.{_MODULES[name]}"), name)
    elif name in __all__:
        value = next(iter(metadata.entry_points(group=_FACES, name=name))).load()
    elif name in _OLD_NAMES:
        import warnings

        module, now = f"ctxreuse.{_OLD_NAMES[name]}", "SamplingParams" if name == "Sampling" else name
        warnings.warn(f"ctxreuse.{name} is now {module}.{now}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(module), now)
    else:
        raise AttributeError(f"module 'ctxreuse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
