"""A Llama of three layers with random weights: blocks of 16 tokens, 1,024 positions."""

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
