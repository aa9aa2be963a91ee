"""Tiny models whose last layers change little, and ramps for them that need no calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ctxreuse.codec import model_digest
from ctxreuse.exits.profile import ExitProfile, Ramp
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.linear import quantise_weights
from support.tiny_text import save_model, tiny_model, tiny_text

__all__ = ["early_engine", "early_folder", "early_model", "ramps_of"]


def early_model(*, faint: float = 0.02, layers: int = 6, **other: Any) -> Any:
    """Of some layers, the last half of which adds little to what the others give."""
    import torch

    model = tiny_model(num_hidden_layers=layers, **other)
    with torch.no_grad():
        for layer in model.model.layers[layers // 2 :]:
            layer.self_attn.o_proj.weight *= faint
            layer.mlp.down_proj.weight *= faint
    return model


def ramps_of(model: Any, space: ModelSpace, depths: tuple[int, ...] = (3, 5)) -> ExitProfile:
    """Ramps that are the model's own head, as if its other layers did nothing."""
    weight = (model.lm_head.weight * model.model.norm.weight).detach().cpu().numpy().astype(np.float32)
    count, width = weight.shape
    head = quantise_weights(weight, np.zeros(count, np.float32))
    tokens = np.arange(count, dtype=np.int32)
    ramps = tuple(Ramp(depth, tokens, head, 0.5) for depth in depths)
    return ExitProfile(model_digest(space), width, len(space.layers), ramps, {"model": "tiny"})


def early_engine(*, exits: bool = True, device: str = "cpu", **options: Any) -> Any:
    """A torch engine over `early_model`, with its ramps."""
    from ctxreuse.engines.torch_hf import TorchEngine

    model = early_model().to(device)
    engine = TorchEngine(model, tiny_text(), block_tokens=16, **options)
    if exits:
        engine.use_exits(ramps_of(model, engine.space))
    return engine


def early_folder(folder: Path) -> Any:
    """Write `early_model` as a Hugging Face folder that onnxruntime-genai's builder takes; returns the model."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    save_model(folder, **sizes)
    model = early_model(**{name: size for name, size in sizes.items() if name != "num_hidden_layers"})
    model.save_pretrained(folder)
    return model
