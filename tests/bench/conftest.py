"""Tiny models with random weights: one with full attention only, one with windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def engine_of() -> Iterator[Callable[[str], Any]]:
    """engine_of("llama" | "gemma3") -> an engine in float32 on one thread, the same weights each time."""
    import torch
    import transformers as hf

    from ctxreuse.engines.torch_hf import TorchEngine

    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(name: str) -> Any:
        torch.manual_seed(7)
        if name == "llama":
            model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, num_hidden_layers=2))
        else:
            types = ["sliding_attention", "full_attention"]
            config = hf.Gemma3TextConfig(
                **_BASE,
                head_dim=16,
                num_hidden_layers=2,
                sliding_window=200,
                layer_types=types,
                query_pre_attn_scalar=16,
            )
            model = hf.Gemma3ForCausalLM(config)
        for parameter in model.parameters():  # transformers' initial weights give nearly equal logits
            if parameter.ndim > 1:
                parameter.data.mul_(3)
        return TorchEngine(model)

    yield make
    torch.set_num_threads(before)
