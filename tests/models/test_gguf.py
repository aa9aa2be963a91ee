"""A GGUF becomes a folder whose weights are exactly the ones that went in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ctxreuse.errors import FormatError
from ctxreuse.models import gguf
from support.calls import calls_of
from support.examples import examples


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def same(model: Any, other: Any) -> None:
    left, right = model.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_llama_comes_back_bit_for_bit(llama_gguf: Path, tiny_llama: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    result = gguf.convert(llama_gguf, tmp_path, seen=seen.append)
    loaded = load(tmp_path)
    same(tiny_llama[0], loaded)
    weights = tmp_path / "model.safetensors"
    assert result.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert result.weights_bytes == weights.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == sum(4 * p.numel() for p in tiny_llama[0].parameters())
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.tie_word_embeddings is False
    assert loaded.generation_config.eos_token_id == [2]


def test_gemma3_comes_back_bit_for_bit(gemma_gguf: Path, tiny_gemma: Any, tmp_path: Path) -> None:
    gguf.convert(gemma_gguf, tmp_path)
    loaded = load(tmp_path)
    same(tiny_gemma[0], loaded)
    assert loaded.config.layer_types == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert loaded.config.sliding_window == 8
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_pieces_do_not_change_the_weights(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.mkdir()
    pieces.mkdir()
    expected = gguf.convert(llama_gguf, whole)
    monkeypatch.setattr(gguf, "_ELEMENTS_AT_ONCE", 700)  # eleven rows of 64 at a time: the last piece is short
    assert gguf.convert(llama_gguf, pieces) == expected


def test_quantized_tensors_are_dequantized(tiny_llama: Any, forms: Any, make_gguf: Any, tmp_path: Path) -> None:
    model, settings = tiny_llama
    tensors = forms[2](model)
    name, kind = "blk.1.ffn_up.weight", reference.GGMLQuantizationType.Q8_0
    original = tensors[name]
    path = make_gguf(tmp_path / "q.gguf", "llama", settings, forms[0](), tensors | {name: (original, kind)})
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf.convert(path, folder)
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(stored, reference.dequantize(reference.quantize(original, kind), kind))
    assert not np.array_equal(stored, original)
    assert np.abs(stored - original).max() < 1 / 127  # half a step of the largest block value, 0.5


def test_every_truncation_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    data = llama_gguf.read_bytes()
    for cut in [0, 3, 8, 23, 100, 1000, 5000, len(data) // 2, len(data) - 33]:
        broken, folder = tmp_path / f"{cut}.gguf", tmp_path / str(cut)
        broken.write_bytes(data[:cut])
        folder.mkdir()
        with pytest.raises(FormatError):
            gguf.convert(broken, folder)


@examples("normal")
@given(data=st.data())
def test_altered_bytes_are_refused_or_harmless(llama_gguf: Path, data: st.DataObject) -> None:
    content = bytearray(llama_gguf.read_bytes())
    header = content.index(b"blk.1.ffn_norm") + 100
    spots = st.tuples(st.integers(0, header - 1), st.sampled_from([0, 1, 127, 255]) | st.integers(0, 255))
    for spot, value in data.draw(st.lists(spots, min_size=1, max_size=6)):
        content[spot] = value
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FormatError):
        source = Path(folder, "altered.gguf")
        source.write_bytes(content)
        # Either it is refused in our own words, or what comes out is as long as it says.
        result = gguf.convert(source, Path(folder))
        assert result.weights_bytes == Path(folder, "model.safetensors").stat().st_size


@pytest.mark.parametrize(("kind", "count"), [(0, 1 << 20), (0, 1 << 63), (4, 1 << 40), (8, 1 << 20), (9, 1)])
def test_counts_beyond_the_file_are_refused_at_once(llama_gguf: Path, tmp_path: Path, kind: int, count: int) -> None:
    """A reader that believes them makes an object for each."""
    content, name = bytearray(llama_gguf.read_bytes()), b"tokenizer.ggml.token_type"
    at = content.index(name) + len(name) + 4
    content[at : at + 12] = struct.pack("<IQ", kind, count)
    source = tmp_path / "lies.gguf"
    source.write_bytes(content)

    def read() -> None:
        with pytest.raises(FormatError, match="not a readable GGUF"):
            gguf.convert(source, tmp_path)

    read()  # what is imported on the way is now
    assert calls_of(read) < 10_000


def test_impossible_settings_are_refused(tiny_llama: Any, forms: Any, make_gguf: Any, tmp_path: Path) -> None:
    model, settings = tiny_llama
    for n, wrong in enumerate(({"block_count": 2**32 - 1}, {"block_count": 0}, {"head_count": 3}, {"head_count": 0})):
        path = make_gguf(tmp_path / f"{n}.gguf", "llama", settings | wrong, forms[0](), forms[2](model))
        with pytest.raises(FormatError):
            gguf.convert(path, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_q.weight": np.zeros((60, 64), np.float32)}, "divide into heads"),
        ({"blk.0.ssm_a.weight": np.zeros((4, 4), np.float32)}, "no place in this architecture"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "no place in this architecture"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tiny_llama: Any, forms: Any, make_gguf: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model, settings = tiny_llama
    path = make_gguf(tmp_path / "x.gguf", "llama", settings, forms[0](), forms[2](model) | change)
    with pytest.raises(FormatError, match=message):
        gguf.convert(path, tmp_path)


def test_unknown_architecture_and_missing_settings(tiny_llama: Any, forms: Any, make_gguf: Any, tmp_path: Path) -> None:
    _, settings = tiny_llama
    with pytest.raises(FormatError, match="'mamba' is not known"):
        gguf.convert(make_gguf(tmp_path / "m.gguf", "mamba", {}, forms[0](), {}), tmp_path)
    partial = {key: value for key, value in settings.items() if key != "embedding_length"}
    with pytest.raises(FormatError, match="incomplete"):
        gguf.convert(make_gguf(tmp_path / "p.gguf", "llama", partial, forms[0](), {}), tmp_path)
    scaled = settings | {"rope_scaling_type": reference.RopeScalingType.YARN}
    with pytest.raises(FormatError, match="scaled rotary"):
        gguf.convert(make_gguf(tmp_path / "s.gguf", "llama", scaled, forms[0](), {}), tmp_path)


def test_the_folder_is_plain_hugging_face(llama_gguf: Path, tmp_path: Path) -> None:
    gguf.convert(llama_gguf, tmp_path)
    assert {item.name for item in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
