"""Decoder layers of few rows by the kernel: what transformers gives, alone and together, where that was seen."""

import numpy as np
import pytest
import torch

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.kernels.decoder import DecoderLayer
from ctxreuse.testing.engine import random_tokens
from support.tiny_models import tiny_model

KNOWN = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


def plain_logits(model, ids):
    with torch.inference_mode():
        return model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=True).logits[0].float().numpy()


@pytest.fixture
def entered(monkeypatch):
    """Rows of each call of the kernel."""
    calls, enter = [], DecoderLayer.enter

    def counted(self, x, cos, sin, qkv, rows, threads):
        calls.append(rows)
        enter(self, x, cos, sin, qkv, rows, threads)

    monkeypatch.setattr(DecoderLayer, "enter", counted)
    return calls


def stepped(engine, prompts, tokens):
    """Logits of each context, which continues its prompt by its tokens in steps with all others."""
    contexts = [engine.new_context() for _ in prompts]
    for context, prompt in zip(contexts, prompts):
        engine.prefill(context, prompt)
    for at in range(len(tokens[0])):
        logits = engine.step([(context, own[at : at + 1]) for context, own in zip(contexts, tokens)])
        for context in contexts:
            context.check()
    return logits


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_step_of_several_contexts_gives_what_transformers_gives(name, int8, entered):
    model = tiny_model(name)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear) and int8:  # so that int8 weights lose nothing
            scale = part.weight.data.abs().max(1, keepdim=True).values.clamp_min(1e-9) / 127
            part.weight.data = (part.weight.data / scale).round() * scale
    ids = random_tokens(TorchEngine(tiny_model(name)), 150)
    prompts, tokens = [ids[:40], ids[40:67], ids[67:68]], [ids[100:104], ids[104:108], ids[108:112]]
    expected = [plain_logits(model, np.concatenate(pair))[-1] for pair in zip(prompts, tokens)]
    engine = TorchEngine(model, int8_weights=int8)
    assert engine.batches
    entered.clear()
    found = stepped(engine, prompts, tokens)
    assert entered == [3] * 4 * model.config.num_hidden_layers
    for got, of in zip(found, expected):
        assert np.abs(got - of).max() <= (2e-3 if int8 else 2e-5) * np.abs(of).max()


@pytest.mark.parametrize("name", KNOWN)
def test_one_context_in_bfloat16_is_as_near_to_float32_as_transformers(name, entered):
    ids = random_tokens(TorchEngine(tiny_model(name)), 80)
    exact = plain_logits(tiny_model(name), ids)[-1]
    model = tiny_model(name).to(torch.bfloat16)
    plain = plain_logits(model, ids)[-1]
    engine = TorchEngine(model)
    context = engine.new_context()
    engine.prefill(context, ids[:70])
    entered.clear()
    for at in range(70, 80):
        got = engine.prefill(context, ids[at : at + 1])
    assert entered == [1] * 10 * model.config.num_hidden_layers
    assert np.linalg.norm(got - exact) <= 1.5 * np.linalg.norm(plain - exact)


def test_a_row_has_the_same_bits_alone_and_among_others(entered):
    engine = TorchEngine(tiny_model("qwen3").to(torch.bfloat16))
    ids = random_tokens(engine, 60)
    prompts, tokens = [ids[:20], ids[20:31]], [ids[40:43], ids[43:46]]
    together = stepped(engine, prompts, tokens)
    for i in range(2):
        context = engine.new_context()
        engine.prefill(context, prompts[i])
        for token in tokens[i]:
            alone = engine.prefill(context, np.array([token], "<i4"))
        assert np.array_equal(alone, together[i])
    assert set(entered[-6:]) == {1}


def test_float32_alone_is_left_to_transformers(entered):
    engine = TorchEngine(tiny_model("llama"))
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 9))
    entered.clear()
    engine.prefill(context, random_tokens(engine, 1))
    assert not entered


def doubled_norm(layer):
    norm = layer.post_attention_layernorm
    norm.forward = lambda x, plain=norm.forward: 2 * plain(x)


def other_gate(layer):
    layer.mlp.act_fn = torch.nn.ReLU()


def other_residual(layer):
    layer.self_attn.o_proj.forward = lambda x, plain=layer.self_attn.o_proj.forward: 1.2 * plain(x)


@pytest.mark.parametrize("change", [doubled_norm, other_gate, other_residual])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_computes_something_else_keeps_its_own_code(change, dtype, entered):
    model = tiny_model("llama").to(dtype)
    change(model.model.layers[1])
    engine = TorchEngine(model)
    assert engine.batches
    ids = random_tokens(engine, 140)
    expected = [plain_logits(model, ids[a:b])[-1] for a, b in ((0, 70), (70, 140))]
    entered.clear()
    found = stepped(engine, [ids[:69], ids[70:139]], [ids[69:70], ids[139:140]])
    assert [rows for rows in entered if rows == 2] == [2, 2]
    for got, of in zip(found, expected):
        assert np.linalg.norm(got - of) <= (1e-5 if dtype == torch.float32 else 0.05) * np.linalg.norm(of)


def test_weights_in_another_place_are_seen(entered):
    model = tiny_model("llama").to(torch.bfloat16)
    engine = TorchEngine(model)
    ids = random_tokens(engine, 30)
    for replaced in (False, True):
        if replaced:
            up = model.model.layers[0].mlp.up_proj
            up.weight = torch.nn.Parameter(up.weight.detach() * 3, requires_grad=False)
        expected = plain_logits(model, ids)[-1]
        context = engine.new_context()
        engine.prefill(context, ids[:29])
        got = engine.prefill(context, ids[29:])
        assert np.linalg.norm(got - expected) <= 0.05 * np.linalg.norm(expected)
    assert entered


def test_whoever_looks_into_a_layer_sees_it_compute(entered):
    engine = TorchEngine(tiny_model("llama").to(torch.bfloat16))
    layers, seen = engine.model.model.layers, []
    hook = layers[0].mlp.register_forward_hook(lambda *given: seen.append(given[2].shape))
    layers[1].self_attn.o_proj = torch.nn.Sequential(layers[1].self_attn.o_proj)
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 60))
    entered.clear()
    seen.clear()
    engine.prefill(context, random_tokens(engine, 1))
    assert entered == [1]
    assert len(seen) == 1
    hook.remove()
    engine.prefill(context, random_tokens(engine, 1))
    assert entered == [1, 1, 1]


def test_an_engine_with_another_attention_uses_the_models_own_layers(entered):
    model = tiny_model("llama").to(torch.bfloat16)
    TorchEngine(model)
    engine = TorchEngine(model, attention="eager")
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 60))
    entered.clear()
    engine.prefill(context, random_tokens(engine, 1))
    assert not entered
