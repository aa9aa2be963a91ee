"""Turns a GGUF (llama or gemma3) into an ordinary Hugging Face folder with float32 weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.models.gguf_head import check_head
from ctxreuse.models.tokenizer import write_tokenizer

__all__ = ["WEIGHTS_FILE", "Converted", "check_extras", "convert"]

WEIGHTS_FILE = "model.safetensors"
_MOST_LAYERS = 4096
_ELEMENTS_AT_ONCE = 1 << 23  # 32 MB of float32: large embeddings never stand in memory whole

_ROOT_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA3_NAMES = _LLAMA_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


class Converted(msgspec.Struct, frozen=True):
    """What `convert` wrote: SHA-256 (hex) and size in bytes of the weights file."""

    weights_sha256: str
    weights_bytes: int


def check_extras() -> None:
    """Raise ConfigError unless the packages that a conversion needs are installed; imports none of them."""
    from importlib.util import find_spec

    missing = [name for name in ("gguf", "tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting a model needs {', '.join(missing)}", fix="Run: pip install 'ctxreuse[torch]'")


def convert(source: Path, folder: Path, *, seen: Callable[[int], None] = lambda so_far: None) -> Converted:
    """Write `source` into the existing, empty `folder`: weights, config, generation config and tokenizer.

    All tensors become float32, bit-equal to the ones transformers dequantizes. `seen` is called with the weight
    bytes written so far. The GGUF is mapped and tensors pass in pieces, so the vocabulary and the imported libraries
    make most of the memory used. Raises FormatError for a file that is no GGUF of a known architecture, ConfigError
    if a package is missing, OSError when writing fails.
    """
    check_extras()
    check_head(source)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
        raise FormatError(f"not a readable GGUF: {error}", where=str(source)) from error
    architecture = meta.get("general.architecture")
    if architecture not in ("llama", "gemma3"):
        raise FormatError(f"GGUF architecture {architecture!r} is not known", where=str(source))
    from huggingface_hub.errors import StrictDataclassError

    try:
        layers = meta[f"{architecture}.block_count"]
        if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:  # before a list of them is made
            raise ValueError(f"{layers} layers")
        config = _llama_config(meta) if architecture == "llama" else _gemma3_config(meta)
        heads = {name: int(meta[f"{architecture}.attention.{name}"]) for name in ("head_count", "head_count_kv")}
    except (KeyError, TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise FormatError(f"the GGUF's settings are incomplete or wrong: {error}", where=str(source)) from error
    tensors = [_Tensor(item, architecture, heads) for item in reader.tensors]
    config.tie_word_embeddings = "output.weight" not in {item.name for item in reader.tensors}
    config.dtype = "float32"
    config.save_pretrained(folder)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": [config.eos_token_id],
        "pad_token_id": config.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    write_tokenizer(meta, folder)
    return _write_safetensors(tensors, folder / WEIGHTS_FILE, seen)


class _Tensor:
    """One tensor on its way from GGUF to Hugging Face: its new name, its shape and its float32 rows."""

    def __init__(self, source: Any, architecture: str, heads: dict[str, int]) -> None:
        self._source = source
        self.name = _hf_name(source.name, _GEMMA3_NAMES if architecture == "gemma3" else _LLAMA_NAMES)
        self.shape = tuple(int(size) for size in reversed(source.shape))  # GGUF counts the fastest axis first
        self.bytes = 4 * int(np.prod(self.shape, dtype=np.int64))
        if not self.bytes:
            raise FormatError(f"tensor {source.name!r} is empty")
        self._minus_one = architecture == "gemma3" and self.name.endswith("norm.weight")
        self._heads = 0
        if architecture == "llama" and re.fullmatch(r".*\.attn_[qk]\.(weight|bias)", source.name):
            self._heads = heads["head_count" if ".attn_q." in source.name else "head_count_kv"]
            if not self._heads or self.shape[0] % (2 * self._heads):
                raise FormatError(f"tensor {source.name!r} of shape {self.shape} does not divide into heads")

    def rows(self) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        """The tensor's values, row-major, in pieces."""
        from gguf import dequantize

        data, kind = self._source.data, self._source.tensor_type
        if self._heads or self._minus_one or len(self.shape) < 2:
            whole = np.asarray(dequantize(data, kind), dtype=np.float32).reshape(self.shape)
            if self._heads:
                whole = _undo_rope_order(whole, self._heads)
            # transformers keeps Gemma's norms as weight - 1 and adds the 1 when it runs.
            yield whole - np.float32(1) if self._minus_one else np.ascontiguousarray(whole)
            return
        step = max(1, _ELEMENTS_AT_ONCE // self.shape[-1])
        for start in range(0, len(data), step):
            yield np.ascontiguousarray(dequantize(data[start : start + step], kind), dtype=np.float32)


def _hf_name(name: str, names: dict[str, str]) -> str:
    if name in _ROOT_NAMES:
        return _ROOT_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        raise FormatError(f"tensor {name!r} has no place in this architecture")
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def _undo_rope_order(
    weight: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of q or k from interleaved pairs (llama.cpp's ``llama``) back to halves (Hugging Face)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_safetensors(tensors: list[_Tensor], target: Path, seen: Callable[[int], None]) -> Converted:
    """Stream the tensors out as safetensors (8-byte header length, JSON header, data), hashing on the way."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.name in header:
            raise FormatError(f"the GGUF holds {tensor.name!r} twice")
        header[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must begin on a multiple of eight
    digest = hashlib.sha256()
    with open(target, "wb") as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        put(struct.pack("<Q", len(text)))
        put(text)
        done = 0
        for tensor in tensors:
            written = 0
            for piece in tensor.rows():
                put(piece.data.cast("B"))
                written += piece.nbytes
                seen(done + written)
            if written != tensor.bytes:
                raise FormatError(f"tensor {tensor.name!r} holds {written} bytes instead of {tensor.bytes}")
            done += written
        file.flush()
        os.fsync(file.fileno())
    return Converted(digest.hexdigest(), 8 + len(text) + offset)


def _plain(value: float) -> float:
    """A float32 setting as the short decimal it was written from (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _common(meta: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta[f"{prefix}.embedding_length"],
        "intermediate_size": meta[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": meta[f"{prefix}.block_count"],
        "num_attention_heads": meta[f"{prefix}.attention.head_count"],
        "num_key_value_heads": meta[f"{prefix}.attention.head_count_kv"],
        "max_position_embeddings": meta[f"{prefix}.context_length"],
        "rms_norm_eps": _plain(meta[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
    }


def _llama_config(meta: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    common = _common(meta, "llama")
    head = meta.get("llama.rope.dimension_count", common["hidden_size"] // common["num_attention_heads"])
    rope = {"rope_type": "default", "rope_theta": _plain(meta.get("llama.rope.freq_base", 10000.0))}
    if any(key.startswith("llama.rope.scaling.") for key in meta):
        raise FormatError("a GGUF with scaled rotary positions is not known")
    return LlamaConfig(**common, head_dim=head, rope_parameters=rope, architectures=["LlamaForCausalLM"])


def _gemma3_config(meta: dict[str, Any]) -> Any:
    from transformers import Gemma3TextConfig

    common = _common(meta, "gemma3")
    head = meta["gemma3.attention.key_length"]
    # Gemma 3: five local layers, then one global; local layers keep theta 1e4 (Gemma 3 report, section 2).
    kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(common["num_hidden_layers"])]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": _plain(meta["gemma3.rope.freq_base"])},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if any(key.startswith("gemma3.rope.scaling.") for key in meta):
        raise FormatError("a GGUF with scaled rotary positions is not known")
    return Gemma3TextConfig(
        **common,
        head_dim=head,
        query_pre_attn_scalar=head,
        sliding_window=meta["gemma3.attention.sliding_window"],
        layer_types=kinds,
        rope_parameters=rope,
        architectures=["Gemma3ForCausalLM"],
    )
