"""Models of three layers with random weights: blocks of 16 tokens, 1,024 positions."""

from __future__ import annotations

from typing import Any


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ctxreuse.engines.torch_hf import TorchEngine

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return TorchEngine(LlamaForCausalLM(config).eval(), block_tokens=16)


def tiny_gemma() -> Any:
    """Windows and one layer that keeps all: it needs states, and its first layer cannot be audited."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from ctxreuse.engines.torch_hf import TorchEngine

    torch.manual_seed(7)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return TorchEngine(Gemma3ForCausalLM(config).eval(), block_tokens=16)
