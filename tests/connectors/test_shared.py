"""vLLM and the torch engine on one KV: what one computed serves the other, within the bounds that the guide states."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT
from ctxreuse.codec import ProfileStore
from ctxreuse.engines.text import HFText, Message
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import ROOT, as_tokens, prefix_keys, tenant_salt
from ctxreuse.store import open_store
from support.cluster import DOCUMENTS, Cluster, body, save_slow_model
from support.pages import ROOT as REPOSITORY
from support.vllm_engine import Vllm
from support.waiting import until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]

SHARED = {"share_with": "torch"}
#: Of this context so many tokens are reused, and distributions behind each of the next ones are compared.
REUSED, COMPARED = 1024, 32


def keys_of(engine: TorchEngine, tokens: Sequence[int]) -> list[bytes]:
    size = engine.space.block_tokens
    return prefix_keys(engine.space.digest, tenant_salt("local"), as_tokens(tokens), size)


def compute(engine: TorchEngine, store: Path, tokens: Sequence[int], level: str = EXACT) -> None:
    """Let the torch engine compute a context, and store its whole blocks at a level."""
    context, keys = engine.new_context(), keys_of(engine, tokens)
    engine.prefill(context, as_tokens(tokens))
    with open_store(store) as opened:
        for key, data in zip(keys, engine.export(context, keys, ROOT, 0)):
            assert opened.put(key, engine.codec.encode(parse(data), level))
        opened.flush()


def rows_of_torch(engine: TorchEngine, tokens: Sequence[int], store: Path | None, max_kl: float | None = None) -> Any:
    """Log-probabilities [COMPARED, vocab] behind the first REUSED tokens, loaded from a store or computed."""
    context, ids = engine.new_context(), as_tokens(tokens)
    size = engine.space.block_tokens
    if store is None:
        engine.prefill(context, ids[:REUSED])
    else:
        with open_store(store, readonly=True) as opened, opened.read(max_kl) as reader:
            views = [
                reader.block(key, ids[i * size : (i + 1) * size], engine.space.digest)
                for i, key in enumerate(keys_of(engine, tokens[:REUSED]))
            ]
            assert None not in views
            engine.load(context, views).wait()  # type: ignore[arg-type]
            views.clear()
    assert context.n == REUSED
    return normalised([engine.prefill(context, ids[at : at + 1]) for at in range(REUSED, REUSED + COMPARED)])


def rows_of_vllm(vllm: Vllm, tokens: Sequence[int]) -> Any:
    """The same of vLLM, which reuses what its connector finds; all of it must be found."""
    found = vllm.ask(*(tokens[: REUSED + 1 + i] for i in range(COMPARED)), new=1, whole=True)
    assert {one["cached"] for one in found} == {REUSED}
    return normalised([one["whole"][0] for one in found])


def normalised(rows: Sequence[Any]) -> Any:
    """Log-probabilities in float64, that add up to one more exactly than those of float32."""
    found = np.array(rows, np.float64)
    found -= found.max(1, keepdims=True)
    return found - np.log(np.exp(found).sum(1, keepdims=True))


def difference(one: Any, other: Any) -> dict[str, float]:
    """The largest difference of log-probabilities of 1e-4 or more, the mean KL in nats a token, the share of greedy
    tokens that are the same."""
    largest = float(np.abs(one - other)[one > np.log(1e-4)].max())
    kl = float((np.exp(one) * (one - other)).sum(1).mean())
    return {"largest": largest, "kl": kl, "greedy": float((one.argmax(1) == other.argmax(1)).mean())}


def english(engine: TorchEngine) -> list[int]:
    assert engine.text is not None
    found: list[int] = engine.text.encode((REPOSITORY / "LICENSE").read_text("utf-8"))[: REUSED + COMPARED].tolist()
    return found


OPTIONS: dict[str, Any] = {"block_size": 128, "max_model_len": 1536, "max_logprobs": -1}


@pytest.mark.parametrize(("dtype", "largest", "kl"), [("float32", 1e-3, 1e-8), ("bfloat16", 2.0, 0.01)])
def test_smollm2_continues_the_others_kv_as_its_own(
    smollm2: Path, tmp_path: Path, dtype: str, largest: float, kl: float
) -> None:
    engine = TorchEngine.open(smollm2, dtype=dtype)
    prompt, options = english(engine), OPTIONS | {"dtype": dtype, "settings": SHARED}
    theirs, ours = tmp_path / "vllm", tmp_path / "torch"
    compute(engine, ours, prompt)
    with Vllm(smollm2, theirs, tmp_path / "log", **options) as vllm:
        alone = vllm.ask(prompt, new=16)[0]
        assert alone["cached"] == 0
        until(lambda: stored(theirs) >= REUSED // 64)
        own = rows_of_vllm(vllm, prompt)
    with Vllm(smollm2, ours, tmp_path / "log", **options) as vllm:
        shared = vllm.ask(prompt, new=16)[0]
        behind = rows_of_vllm(vllm, prompt)
    torch_own = rows_of_torch(engine, prompt, None)
    found = {
        "vLLM behind torch": difference(own, behind),
        "torch behind vLLM": difference(torch_own, rows_of_torch(engine, prompt, theirs)),
    }
    print(dtype, json.dumps(found), "each alone", difference(own, torch_own))
    assert shared["cached"] == REUSED
    for one in found.values():
        assert one["largest"] < largest
        assert one["kl"] < kl
    if dtype == "float32":
        assert shared["ids"] == alone["ids"]
        assert all(one["greedy"] == 1 for one in found.values())


def test_lossy_blocks_of_a_device_are_loaded_where_the_engine_allows_them(
    smollm2: Path, smollm2_card: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    ProfileStore().add(smollm2_card)
    engine, store = TorchEngine.open(smollm2, dtype="float32"), tmp_path / "store"
    prompt, options = english(engine), OPTIONS | {"role": "kv_consumer"}
    compute(engine, store, prompt, "kl-0.01")
    with Vllm(smollm2, store, tmp_path / "log", settings=SHARED, **options) as vllm:
        assert vllm.ask(prompt)[0]["cached"] == 0
    with Vllm(smollm2, store, tmp_path / "log", settings=SHARED | {"max_kl": "0.01"}, **options) as vllm:
        found = rows_of_vllm(vllm, prompt)
    assert difference(rows_of_torch(engine, prompt, store, 0.01), found)["kl"] < 1e-8, "both read the same numbers"
    assert difference(rows_of_torch(engine, prompt, None), found)["kl"] > 1e-5, "which are not the exact ones"


def stored(store: Path) -> int:
    with open_store(store, readonly=True) as opened:
        return opened.stats().blocks


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
def test_models_that_may_be_shared_keep_the_same_k_and_v(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The planes of all blocks, compared number by number."""
    engine = TorchEngine.open(made(name, tmp_path / "model", **more))
    prompt = np.random.default_rng(3).integers(1, 500, 600).tolist()
    theirs, ours = tmp_path / "vllm", tmp_path / "torch"
    compute(engine, ours, prompt)
    with Vllm(tmp_path / "model", theirs, tmp_path / "log", block_size=64, settings=SHARED) as vllm:
        assert vllm.ask(prompt)[0]["cached"] == 0
        until(lambda: stored(theirs) >= 9)
    ids = as_tokens(prompt)
    with (
        open_store(theirs, readonly=True) as one,
        open_store(ours, readonly=True) as other,
        one.read() as reader,
        other.read() as oracle,
    ):
        for i, key in enumerate(keys_of(engine, prompt)):
            wanted = ids[i * 64 : (i + 1) * 64], engine.space.digest
            got, right = reader.block(key, *wanted), oracle.block(key, *wanted)
            assert got is not None
            assert right is not None
            for plane in right.layout.planes:
                a, b = (view.array(plane.layer, plane.role) for view in (got, right))
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4 * float(np.abs(b).max()))
            del got, right


def made(name: str, folder: Path, **more: Any) -> Path:
    """A folder with a random model of that class, whose biases and norms are random, too."""
    import torch
    import transformers as hf

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0,
    }  # fmt: skip
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes | more))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        else:
            parameter.data.mul_(3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, save_slow_model(tmp_path / "model"))
    yield found
    found.close()


def test_a_device_and_vllm_answer_from_what_the_other_computed(cluster: Cluster, tmp_path: Path) -> None:
    """The connector serves its store to an edge daemon, over CURVE; nothing else runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        cluster.bus = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    device, text = cluster.edge("phone"), HFText.open(cluster.model)
    assert text is not None
    settings = SHARED | {
        "bus": cluster.bus, "bus_key": str(tmp_path / "cloud.key"), "bus_allow": str(cluster.allowed.path),
    }  # fmt: skip
    prompts = []
    for document in DOCUMENTS[:2]:
        messages = [Message(one["role"], one["content"]) for one in body(document)["messages"]]
        prompts.append(text.encode(text.render(messages, generate=True)).tolist())
    store, log = tmp_path / "vllm", tmp_path / "log"
    options: dict[str, Any] = {"block_size": 128, "max_model_len": 4096, "processes": True}
    with Vllm(cluster.model, store, log, settings=settings, **options) as vllm:
        device.start().ready()
        answer, sources = device.ask(DOCUMENTS[0])
        assert sources["cloud"] == 0
        until(lambda: stored(store) >= len(prompts[0]) // 64, 60)
        assert vllm.ask(prompts[0], salt="other tenant")[0]["cached"] == 0
        found = vllm.ask(prompts[0], salt="home", new=12)[0]
        assert found["cached"] == len(prompts[0]) // 128 * 128
        assert text.decode(found["ids"]) == answer
        found = vllm.ask(prompts[1], salt="home", new=12)[0]
        assert found["cached"] == 0
        until(lambda: device.link()["announced"] >= sum(len(prompt) // 64 for prompt in prompts), 60)
        answer, sources = device.ask(DOCUMENTS[1])
        assert sources["cloud"] >= 512
        assert text.decode(found["ids"]) == answer
