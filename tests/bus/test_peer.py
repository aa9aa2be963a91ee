"""Every way to reach a node keeps the contract: in memory here, over sockets below."""

from __future__ import annotations

from typing import Any

import pytest

from ctxreuse.bus.serve import StoreService
from ctxreuse.testing.peer import MemoryNode, PeerContract


@pytest.fixture(scope="module")
def engine() -> Any:
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


class TestMemory(PeerContract):
    def serve(self, service: StoreService) -> MemoryNode:
        return MemoryNode(service)
