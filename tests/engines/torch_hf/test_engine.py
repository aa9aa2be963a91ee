"""What is particular to the torch engine: numbers like transformers', types, cuts, memory, failures in mid-flight."""

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from ctxreuse.block.format import parse
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Context, Engine, chunk_spans
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError, EngineError, FormatError
from ctxreuse.identity.model import LayerSpec
from ctxreuse.testing.engine import Sealed, continuation, random_tokens, resume, seal, views
from support.examples import examples

KINDS = ["llama", "gemma3", "qwen3next", "lfm2", "falconh1", "jamba"]


def plain_logits(model, ids):
    """All logits of transformers' own forward with its own attention and cache."""
    with torch.inference_mode():
        return model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=True).logits[0].numpy()


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_transformers(name, tiny, engine_of):
    engine, model = engine_of(name), tiny(name)
    ids = random_tokens(engine, 150)
    expected = plain_logits(model, ids)
    context = engine.new_context()
    for at, stop in ((0, 1), (1, 70), (70, 148), (148, 149), (149, 150)):
        got = engine.prefill(context, ids[at:stop])
        assert np.abs(got - expected[stop - 1]).max() <= 1e-5 * np.abs(expected).max()
    context.check()
    assert isinstance(engine, Engine)
    assert isinstance(context, Context)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3next", "falconh1"])
def test_half_types_go_through_blocks_bit_for_bit(name, dtype, tiny):
    engine = TorchEngine(tiny(name).to(dtype), block_tokens=16, chunk=64)
    assert engine.space.dtype == str(dtype).removeprefix("torch.")
    ids, suffix = random_tokens(engine, 96), random_tokens(engine, 5, seed=1)
    context = engine.new_context()
    engine.prefill(context, ids)
    sealed = Sealed(engine, context)
    expected = continuation(engine, context, engine.prefill(context, suffix), 3)
    copy, logits = resume(engine, sealed, 96, suffix)
    assert all(np.array_equal(a, b) for a, b in zip(continuation(engine, copy, logits, 3), expected))
    assert [a.tobytes() for a in Sealed(engine, copy).blocks] == [b.tobytes() for b in sealed.blocks]


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen3next"])
def test_any_way_to_cut_a_prompt_gives_the_same_logits(name, engine_of):
    engine = engine_of(name)
    ids = random_tokens(engine, 120)
    whole = engine.prefill(engine.new_context(), ids)

    @examples("heavy")
    @given(st.lists(st.integers(1, 119), max_size=5, unique=True), st.integers(0, 7))
    def cut(cuts, blocks):
        context = engine.new_context()
        if blocks:
            sealed = seal(engine, ids[: 16 * blocks])
            engine.load(context, *views(engine, sealed, 16 * blocks)).wait()
        for stop in [c for c in sorted(cuts) if c > context.n] + [120]:
            logits = engine.prefill(context, ids[context.n : stop])
            context.check()
        assert np.abs(logits - whole).max() <= 1e-5 * np.abs(whole).max()

    cut()


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 100), st.integers(0, 600), st.booleans())
def test_pieces_cover_a_run_once_and_cut_at_the_boundary(start, count, chunk, boundary, step):
    end = start + count
    parts = list(chunk_spans(start, end, chunk, boundary, step=step))
    assert [p[0] for p in parts] == [start, *(p[1] for p in parts[:-1])]
    assert parts[-1][1] == end
    if start < boundary < end:
        assert boundary in [p[1] for p in parts]
    for at, stop in parts:
        assert stop - at > 0
        if step and at:
            assert stop == at + 1
        elif not step:
            assert stop - at <= chunk + max(chunk // 2 - 1, 0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falconh1"])
def test_first_rows_depend_on_the_position(name, engine_of):
    engine = engine_of(name)
    ids, at = random_tokens(engine, 8), np.arange(8, dtype=np.int32)
    here, there = engine.first_rows(ids, at), engine.first_rows(ids, at + 5)
    assert here is not None
    assert there is not None
    assert np.abs(here[1] - there[1]).max() > 1e-2 * np.abs(here[1]).max()


@pytest.mark.parametrize("name", ["gemma3", "mistral", "lfm2", "zamba2"])
def test_models_whose_first_layer_keeps_no_k_have_no_first_rows(name, engine_of):
    engine = engine_of(name)
    assert engine.first_rows(random_tokens(engine, 8), np.arange(8, dtype=np.int32)) is None


def test_layers_are_told_apart(engine_of):
    def kinds(name):
        return [s.kind for s in engine_of(name).space.layers]

    assert engine_of("llama").space.layers == (LayerSpec("full", 2, 16, 16),) * 3
    assert engine_of("gemma3").space.layers[0] == LayerSpec("sliding", 2, 16, 16, 24)
    assert kinds("gemma3") == ["sliding", "full", "sliding"]
    assert kinds("qwen3next") == ["linear", "linear", "linear", "full"]
    assert kinds("falconh1") == ["hybrid", "hybrid"]
    assert not engine_of("llama").space.needs_state
    assert engine_of("lfm2").space.needs_state


def test_a_space_changes_with_weights_config_and_type_only(tiny):
    base = TorchEngine(tiny("llama")).space
    assert TorchEngine(tiny("llama"), chunk=32, attention="sdpa").space.digest == base.digest
    other = tiny("llama")
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert TorchEngine(other).space.weights != base.weights
    other = tiny("llama")
    other.config.rms_norm_eps = 1e-3
    assert TorchEngine(other).space.architecture != base.architecture
    other = tiny("llama")
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert TorchEngine(other).space.rope != base.rope
    assert TorchEngine(tiny("llama").to(torch.bfloat16)).space.digest != base.digest
    assert TorchEngine(tiny("llama"), attention="eager").space.digest != base.digest


def test_jamba_is_fed_token_by_token_after_a_context(tiny, engine_of):
    """Its multi-token continuation ignores the saved state; if that is repaired one day, this test says so."""
    model, engine = tiny("jamba"), engine_of("jamba")
    ids = random_tokens(engine, 40)
    expected = plain_logits(model, ids)[-1]
    cache = DynamicCache(config=model.config)
    wide = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.inference_mode():
        model(wide[:, :32], past_key_values=cache, position_ids=torch.arange(32)[None])
        together = model(wide[:, 32:], past_key_values=cache, position_ids=torch.arange(32, 40)[None]).logits[0, -1]
    context = engine.new_context()
    engine.prefill(context, ids[:32])
    ours = engine.prefill(context, ids[32:])
    scale = np.abs(expected).max()
    assert np.abs(together.numpy() - expected).max() > 1e-4 * scale
    assert np.abs(ours - expected).max() <= 1e-5 * scale


def test_windows_need_no_cut_for_a_snapshot(engine_of):
    engine = engine_of("gemma3", chunk=512)
    calls = []
    forward = engine._model.forward.call
    engine._model.forward.call = lambda ids, *rest: calls.append(len(ids)) or forward(ids, *rest)
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 75))
    assert calls == [75]
    assert context.states == (64,)


def test_only_the_newest_states_are_kept(engine_of):
    engine = engine_of("lfm2")
    context = engine.new_context()
    for _ in range(14):
        engine.prefill(context, random_tokens(engine, 16))
    assert context.states == tuple(range(48, 225, 16))
    for token in random_tokens(engine, 64):  # a generation costs none of those that runs ended at
        engine.prefill(context, token[None])
    assert context.states == (*range(80, 225, 16), 272, 288)
    context.check()
    assert not engine.crop(context, 64)
    assert engine.crop(context, 112)
    assert context.states == (80, 96, 112)
    context.check()


def test_a_dropped_context_gives_its_memory_to_the_next(engine_of):
    engine = engine_of("llama", reserve=1024)
    assert engine._model.pool.nbytes > 0
    context = engine.new_context(900)
    assert engine._model.pool.nbytes == 0
    where = context.lease.arena
    engine.prefill(context, random_tokens(engine, 100))
    del context
    gc.collect()
    engine._model.pool.check()
    assert engine.new_context(1000).lease.arena is where
    engine._model.pool.check()


@pytest.mark.parametrize("reserve", [1, 255, 257, 1023])
def test_what_was_reserved_serves_a_context_of_just_that_length(engine_of, reserve):
    engine = engine_of("llama", reserve=reserve)
    before = engine._model.pool.nbytes
    context = engine.new_context(reserve)
    assert (context.lease.arena.nbytes, engine._model.pool.nbytes) == (before, 0)


def test_a_load_in_flight_keeps_the_memory_of_a_dropped_context(engine_of):
    engine = engine_of("llama", reserve=256)
    sealed = seal(engine, random_tokens(engine, 64))
    context = engine.new_context(200)
    arena = context.lease.arena
    loading = engine.load(context, *views(engine, sealed, 64))
    del context
    gc.collect()
    assert engine.new_context(200).lease.arena is not arena
    loading.wait()
    assert any(free is arena for free in engine._model.pool._free)


def test_views_are_let_go_after_a_load(engine_of):
    engine = engine_of("llama")
    sealed = seal(engine, random_tokens(engine, 64))
    context = engine.new_context()
    blocks, _ = views(engine, sealed, 64)
    loading = engine.load(context, blocks)
    first = blocks.pop(0)
    before = sys.getrefcount(first)
    engine.prefill(context, sealed.tokens[:2])
    loading.wait()
    assert sys.getrefcount(first) < before
    assert context.loading is None


def test_an_interrupted_forward_leaves_a_usable_context_or_says_so(engine_of):
    for name, survives in (("llama", True), ("gemma3", True), ("lfm2", False)):
        engine = engine_of(name)
        ids = random_tokens(engine, 50)
        context, twin = engine.new_context(), engine.new_context()
        for one in (context, twin):
            engine.prefill(one, ids)
        last = engine.model.model.layers[-1]

        def stop(*_):
            raise KeyboardInterrupt

        hook = last.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(context, ids[:20])
        hook.remove()
        assert context.n == 50
        if survives:
            context.check()
            assert np.array_equal(engine.prefill(context, ids[:20]), engine.prefill(twin, ids[:20]))
        else:
            with pytest.raises(EngineError, match="interrupted"):
                engine.prefill(context, ids[:20])


def test_a_corrupt_layer_in_the_background_ends_the_thread_and_the_context(engine_of):
    engine = engine_of("llama", background=True)
    sealed = seal(engine, random_tokens(engine, 64))
    view = parse(sealed.blocks[2])
    sealed.blocks[2][view.offset(2, "v") + 7] ^= 1
    context = engine.new_context()
    loading = engine.load(context, *views(engine, sealed, 64))
    with pytest.raises(FormatError, match="plane 'v' of layer 2"):
        engine.prefill(context, sealed.tokens[:3])
    with pytest.raises(FormatError):
        loading.wait()
    assert loading._thread is not None
    assert not loading._thread.is_alive()
    with pytest.raises(EngineError, match="corrupt"):
        engine.export(context, sealed.keys, bytes(32), 0)


def test_a_state_with_other_planes_is_refused(engine_of):
    engine = engine_of("gemma3")
    sealed = seal(engine, random_tokens(engine, 32))
    early = seal(engine, sealed.tokens[:16])
    blocks, _ = views(engine, sealed, 32)
    with pytest.raises(FormatError, match="position 16"):
        engine.load(engine.new_context(), blocks, parse(early.states[16]))


def test_models_that_cannot_be_exported_are_refused(tiny):
    with pytest.raises(EngineError, match="does not continue"):  # its states are attributes of the model
        TorchEngine(tiny("recurrentgemma"))
    with pytest.raises(EngineError, match="not a transformers model"):
        TorchEngine(object())
    with pytest.raises(EngineError, match="on meta"):
        TorchEngine(tiny("llama").to("meta"))
    with pytest.raises(ConfigError, match="chunk"):
        TorchEngine(tiny("llama"), chunk=0)


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a known model") as refused:
        open_engine(str(tmp_path))
    assert "name a Hugging Face folder" in refused.value.fix
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not open"):
        open_engine(str(tmp_path))
    with pytest.raises(ConfigError, match="no such type"):
        open_engine(str(tmp_path), dtype="int4")


def test_python_of_a_model_folder_is_never_run_whoever_answers(tmp_path, monkeypatch):
    """transformers would ask on the terminal, and `yes |` would agree."""
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}})
    )
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w').write('x')\nclass C: pass\nclass M: pass\n")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="Python code of its own folder, which is never run"):
        open_engine(str(tmp_path))
    assert not ran.exists()


def test_pickled_weights_are_refused_by_name(tiny, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\*\.bin only, which are pickles.*save_pretrained"):
        open_engine(str(tmp_path))


def test_a_saved_folder_opens_and_equals_the_model_in_memory(tiny, tmp_path):
    model = tiny("qwen2")
    model.save_pretrained(tmp_path)
    engine = open_engine(str(tmp_path), block_tokens=16)
    assert engine.text is None
    assert engine.space.tokenizer == "none"
    ids = random_tokens(engine, 40)
    expected = plain_logits(model, ids)[-1]
    assert np.abs(engine.prefill(engine.new_context(), ids) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert open_engine(str(tmp_path), block_tokens=16).space.digest == engine.space.digest


def test_a_context_ends_where_its_rotation_would_change(tiny):
    model = tiny("llama")
    model.config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    assert TorchEngine(model).space.max_tokens == 512
    assert TorchEngine(tiny("llama")).space.max_tokens == 2048


def test_contexts_run_in_threads_of_their_own(engine_of):
    engine = engine_of("gemma3")
    prompts = [random_tokens(engine, 150, seed=i) for i in range(4)]
    expected = [engine.prefill(engine.new_context(), ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda ids: engine.prefill(engine.new_context(), ids), prompts))
            assert all(np.array_equal(a, b) for a, b in zip(got, expected))
    gc.collect()
    engine._model.pool.check()


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_opening_runs_a_model_once_unless_it_keeps_states(name, tiny):
    """Each run reads all weights, while nothing is served yet."""
    calls, model = [], tiny(name)
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    engine = TorchEngine(model)
    hook.remove()
    assert (len(calls) == 1) is not engine.space.needs_state
