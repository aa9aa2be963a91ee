"""The engine for decoder folders on ONNX Runtime; all use of onnxruntime is in this package."""

from __future__ import annotations

from ctxreuse.engines.onnx_rt.engine import OnnxEngine

__all__ = ["OnnxEngine"]
