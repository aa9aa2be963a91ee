"""A Llama with random weights as a GGUF: one token a byte, the two marks of ChatML, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.tiny_text import CHATML

WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 128


def write_tiny_gguf(path: Path, *, seed: int = 7, positions: int = 2048, window: int = 0) -> Path:
    """Write it, of 3 layers; ``window``: as a Gemma 3 of 7, all but the sixth with a sliding window."""
    import gguf

    layers = 7 if window else 3

    rng = np.random.default_rng(seed)
    arch = "gemma3" if window else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(positions)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if window:
        writer.add_sliding_window(window)
    _add_tokenizer(writer)

    def add(name: str, *shape: int) -> None:
        flat = len(shape) == 1
        data = np.ones(shape) if flat else rng.normal(0, 2 / np.sqrt(shape[-1]), shape)
        writer.add_tensor(name, data.astype(np.float32))

    head = WIDTH // HEADS
    add("token_embd.weight", 258, WIDTH)
    add("output_norm.weight", WIDTH)
    for n in range(layers):
        add(f"blk.{n}.attn_norm.weight", WIDTH)
        add(f"blk.{n}.attn_q.weight", HEADS * head, WIDTH)
        add(f"blk.{n}.attn_k.weight", KV_HEADS * head, WIDTH)
        add(f"blk.{n}.attn_v.weight", KV_HEADS * head, WIDTH)
        add(f"blk.{n}.attn_output.weight", WIDTH, HEADS * head)
        add(f"blk.{n}.ffn_norm.weight", WIDTH)
        add(f"blk.{n}.ffn_gate.weight", INNER, WIDTH)
        add(f"blk.{n}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{n}.ffn_down.weight", WIDTH, INNER)
        if window:
            for name in ("attn_q_norm", "attn_k_norm"):
                add(f"blk.{n}.{name}.weight", head)
            for name in ("post_attention_norm", "post_ffw_norm"):
                add(f"blk.{n}.{name}.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges(["no merge"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(CHATML)
