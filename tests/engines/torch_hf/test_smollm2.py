"""SmolLM2-135M in float32: the same answers restored as computed, the same numbers as plain transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ctxreuse import models
from ctxreuse.engines.generate import generate
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.testing.engine import Sealed, resume, seal

pytestmark = pytest.mark.model

STORY = (
    "The lighthouse at Harrow Point was founded in 1839 by Captain Josiah Bellweather, who had lost two "
    "brothers to the reef. His daughter Eleanor kept the lamp for forty years with a grey terrier named "
    "Biscuit. On a night in November the Marigold lost her rudder and drifted towards the rocks with eighty-"
    "seven people on board. Eleanor lit a second fire on the eastern cliff, and the crew steered between the "
    "two lights. After the war the lamp was made electric and the last keeper left. The village bought the "
    "tower, painted it red and white, and opened a small museum in the oil store, where the log books of the "
    "keepers are shown in a glass case. "
)
QUESTIONS = ["Who founded the lighthouse?", "What was the dog's name?", "How many people were on board the Marigold?"]


def prompts(engine):
    for question in QUESTIONS:
        messages = [Message("system", "Answer from the passage. " + STORY), Message("user", question)]
        yield engine.text.encode(engine.text.render(messages, generate=True))


def test_answers_are_the_same_restored_as_computed(smollm2):
    size = smollm2.space.block_tokens
    prompted = list(prompts(smollm2))
    shared = next(i for i, column in enumerate(zip(*prompted)) if len(set(column)) > 1) // size * size
    assert shared >= 2 * size
    sealed = seal(smollm2, prompted[0][:shared])
    how = SamplingParams(max_tokens=48)
    said = set()
    for ids in prompted:
        context = smollm2.new_context()
        whole = list(generate(smollm2, smollm2.text, context, smollm2.prefill(context, ids), how))
        copy, logits = resume(smollm2, sealed, shared, ids[shared:])
        again = list(generate(smollm2, smollm2.text, copy, logits, how))
        assert [p.token for p in again] == [p.token for p in whole]
        said.add("".join(p.text for p in whole))
    assert len(said) == len(QUESTIONS)
    assert any("Bellweather" in text for text in said)
    assert any("Biscuit" in text for text in said)


def test_numbers_are_those_of_plain_transformers(smollm2):
    plain = AutoModelForCausalLM.from_pretrained(str(models.resolve("smollm2")), dtype=torch.float32)
    ids = np.concatenate(list(prompts(smollm2)) * 2)[:400]
    wide, cache, context = (
        torch.from_numpy(ids.astype(np.int64))[None],
        DynamicCache(config=plain.config),
        smollm2.new_context(),
    )
    with torch.inference_mode():
        for at, stop in ((0, 320), (320, 390), (390, 391), (391, 400)):
            theirs = plain(
                wide[:, at:stop], position_ids=torch.arange(at, stop)[None], past_key_values=cache, logits_to_keep=1
            ).logits[0, -1]
            ours = smollm2.prefill(context, ids[at:stop])
            assert np.abs(ours - theirs.numpy()).max() < 1e-4
    layer = cache.layers[7]
    assert torch.equal(context.cache.layers[7].keys, layer.keys)
    assert torch.equal(context.cache.layers[7].values, layer.values)


def test_a_space_is_the_same_each_time_and_blocks_have_the_size_it_says(smollm2):
    assert smollm2.space.weights == models.weights_digest(models.resolve("smollm2"))
    assert smollm2.space.token_nbytes == 46080
    context = smollm2.new_context()
    smollm2.prefill(context, next(prompts(smollm2))[:64])
    (block,) = Sealed(smollm2, context).blocks
    assert block.nbytes == pytest.approx(64 * 46080, rel=0.01)


def test_the_tokenizer_knows_text_of_all_kinds(smollm2):
    text = smollm2.text
    for sample in ("naïve café 12345 🌊\n\n\ttabs", STORY, "def f(x):\n    return x ** 2\n", "東京 — Ω"):
        assert text.decode(text.encode(sample)) == sample
    assert text.stop_ids == {2}
    messages = [Message("user", "Hi")]
    assert text.render(messages, generate=True).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("threads", [1, 2])  # torch rounds in another way with each number of them
def test_contexts_of_bfloat16_go_through_the_model_together(threads):
    engine = TorchEngine.open("smollm2", dtype="bfloat16", threads=threads)
    assert engine.batches
    ids = [np.asarray(one, "<i4")[:64] for one in prompts(engine)]
    together, alone = [engine.new_context() for _ in ids], [engine.new_context() for _ in ids]
    for one, two, tokens in zip(together, alone, ids):
        engine.prefill(one, tokens[:60])
        engine.prefill(two, tokens[:60])
    for at in range(60, 64):
        found = engine.step([(one, tokens[at : at + 1]) for one, tokens in zip(together, ids)])
        expected = [engine.prefill(two, tokens[at : at + 1]) for two, tokens in zip(alone, ids)]
        for got, want in zip(found, expected):
            assert np.array_equal(got, want)
