"""The engine for GGUF files on llama.cpp's library; all use of foreign libraries by ctypes is in this package."""

from __future__ import annotations

from ctxreuse.engines.llama_cpp.engine import LlamaEngine

__all__ = ["LlamaEngine"]
