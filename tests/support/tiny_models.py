"""Tiny models with random weights, one of each kind of layer."""

from typing import Any

import torch
import transformers as hf

from ctxreuse.engines.torch_hf import TorchEngine

_BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
_MAMBA = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_PURE = {"vocab_size": 512, "hidden_size": 64, "state_size": 16, "pad_token_id": 0}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 64}


def engine_of(name: str, seed: int = 7, **options: Any) -> TorchEngine:
    """Return an engine on `tiny_model`, with blocks of 16 tokens unless ``options`` say otherwise."""
    return TorchEngine(tiny_model(name, seed), **{"block_tokens": 16, "chunk": 64, **options})


def tiny_model(name: str, seed: int = 7) -> hf.PreTrainedModel:
    """The same weights each time, float32, evaluation mode."""
    torch.manual_seed(seed)
    model = _made(name).eval()
    for parameter in model.parameters():  # transformers' initial weights give nearly equal logits
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return model


def _made(name: str) -> hf.PreTrainedModel:
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, num_hidden_layers=3))
    if name == "llama64":  # heads as wide as the CUDA kernels of attention want them
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, num_hidden_layers=2, head_dim=64))
    if name == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_BASE, num_hidden_layers=2))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_BASE, head_dim=16, num_hidden_layers=2))
    if name == "gemma3":
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        config = hf.Gemma3TextConfig(
            **_BASE, head_dim=16, num_hidden_layers=3, sliding_window=24, layer_types=types, query_pre_attn_scalar=16
        )
        return hf.Gemma3ForCausalLM(config)
    if name == "mistral":  # windows only: blocks without planes, all in the state
        return hf.MistralForCausalLM(hf.MistralConfig(**_BASE, num_hidden_layers=2, sliding_window=24))
    if name == "qwen3next":
        config = hf.Qwen3NextConfig(
            **_BASE,
            num_hidden_layers=4,
            head_dim=16,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            decoder_sparse_step=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[],
        )
        return hf.Qwen3NextForCausalLM(config)
    if name == "lfm2":
        types = ["conv", "full_attention", "conv"]
        return hf.Lfm2ForCausalLM(
            hf.Lfm2Config(**_BASE, num_hidden_layers=3, layer_types=types, block_auto_adjust_ff_dim=False)
        )
    if name == "falconh1":
        return hf.FalconH1ForCausalLM(hf.FalconH1Config(**_BASE, **_MAMBA, num_hidden_layers=2))
    if name == "granitemoehybrid":
        types = ["mamba", "attention", "mamba"]
        shared = {k: v for k, v in _MAMBA.items() if k != "mamba_d_ssm"}
        return hf.GraniteMoeHybridForCausalLM(
            hf.GraniteMoeHybridConfig(**_BASE, **shared, **_MOE, num_hidden_layers=3, layer_types=types)
        )
    if name == "nemotronh":
        config = hf.NemotronHConfig(
            **_BASE,
            layers_block_type=["mamba", "attention", "mlp", "mamba"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
            conv_kernel=4,
            chunk_size=32,
            use_mamba_kernels=False,
        )
        return hf.NemotronHForCausalLM(config)
    if name == "zamba2":
        config = hf.Zamba2Config(
            **_BASE,
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_ngroups=1,
            n_mamba_heads=4,
            chunk_size=32,
            num_mem_blocks=1,
            use_mamba_kernels=False,
        )
        return hf.Zamba2ForCausalLM(config)
    if name == "bamba":
        shared = {k: v for k, v in _MAMBA.items() if k != "mamba_d_ssm"}
        return hf.BambaForCausalLM(
            hf.BambaConfig(**_BASE, **shared, num_hidden_layers=3, attn_layer_indices=[1], num_logits_to_keep=1)
        )
    if name == "jamba":
        config = hf.JambaConfig(
            **_BASE,
            num_hidden_layers=3,
            attn_layer_period=3,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            mamba_d_state=16,
            mamba_d_conv=4,
        )
        return hf.JambaForCausalLM(config)
    if name == "mamba2":
        return hf.Mamba2ForCausalLM(
            hf.Mamba2Config(**_PURE, num_heads=4, head_dim=32, n_groups=1, num_hidden_layers=2, chunk_size=32)
        )
    if name == "mamba":  # fed token by token after a context, as Jamba
        return hf.MambaForCausalLM(hf.MambaConfig(**_PURE, num_hidden_layers=2))
    if name == "olmohybrid":
        return hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**{**_BASE, "eos_token_id": 1}, **_DELTA))
    if name == "zaya":  # windows and linear states in one layer, beside full attention and linear states in one
        types = ["hybrid_sliding", "hybrid"] * 2
        return hf.ZayaForCausalLM(
            hf.ZayaConfig(**_BASE, num_hidden_layers=4, head_dim=16, sliding_window=24, layer_types=types)
        )
    if name == "recurrentgemma":
        shared = {key: value for key, value in _BASE.items() if key != "max_position_embeddings"}
        return hf.RecurrentGemmaForCausalLM(
            hf.RecurrentGemmaConfig(**shared, num_hidden_layers=3, lru_width=64, attention_window_size=24, head_dim=16)
        )
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=1024, bos_token_id=0, eos_token_id=0
        )
        return hf.GPT2LMHeadModel(config)
    raise KeyError(name)
