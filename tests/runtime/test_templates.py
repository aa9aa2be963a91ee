"""Chat templates that show a past answer otherwise than it was generated: reuse goes up to the end of the history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ctxreuse.engines.prompt import encode_prompt, rewrites_history
from ctxreuse.engines.text import HFText, Message
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store

BLOCK = 16
_TURNS = "{% for m in messages %}<s>{{ m.role }}\n{{ SHOWN }}</s>\n{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}<s>assistant\nSCAFFOLD{% endif %}"


def template(shown: str = "m.content", scaffold: str = "") -> str:
    return (_TURNS + _BEGIN).replace("SHOWN", shown).replace("SCAFFOLD", scaffold)


WITHOUT_THOUGHTS = "m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content"
#: By name: a template, and whether it rewrites.
TEMPLATES = {
    "plain": (template(), False),
    "trims": (template("m.content | trim"), False),
    "drops its scaffold": (template(scaffold="<think>\n\n</think>\n\n" + "." * 40), True),
    "drops thoughts": (template(WITHOUT_THOUGHTS), True),
    "drops both": (template(WITHOUT_THOUGHTS, "<think>\n"), True),
}


def text_of(name: str) -> HFText:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return HFText(tokenizer, template=TEMPLATES[name][0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_rewrite_answers_are_known(name: str) -> None:
    assert rewrites_history(text_of(name)) == TEMPLATES[name][1]


def test_a_template_that_refuses_the_trial_is_taken_as_plain() -> None:
    refusing = HFText(text_of("plain")._tokenizer, template="{{ raise_exception('no') }}")
    assert not rewrites_history(refusing)


@pytest.mark.parametrize("name", ["plain", "drops its scaffold", "drops both"])
@pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)
@pytest.mark.parametrize("restarted", [False, True])
def test_the_next_turn_reuses_the_whole_history(
    engine: TorchEngine, name: str, restarted: bool, tmp_path: Path
) -> None:
    """With its answer, if the template shows that as it was generated; with states, up to the end of the last turn."""
    text = text_of(name)
    messages = [Message("system", "You answer in few words. " * 3), Message("user", "What is a lighthouse for? " * 2)]
    options = RuntimeOptions(text=text)
    with open_store(path=tmp_path) as store:
        runtime = Runtime(engine, store, options)
        before, ends = np.array([], "<i4"), 0
        for turn in range(3):
            prompt = encode_prompt(text, messages)
            answer = f"<think>\nIt guides.\n</think>\n\nIt warns ships of rocks {turn}." + "!" * 60
            # The context that a conversation leaves: its prompt, and the answer as it was generated.
            whole = np.concatenate([prompt.ids, text.encode(answer)])
            branches = (prompt.ends[0], *prompt.ends[-2:])
            done = runtime.prefill(runtime.request(whole, parts=prompt.parts, branches=branches))
            if turn:
                least = min(len(before), len(prompt.ids))
                shared = int(np.argmin(np.append(before[:least] == prompt.ids[:least], False)))
                assert shared >= ends, "the history is the beginning of the next prompt"
                kept = ends if engine.space.needs_state and TEMPLATES[name][1] else shared
                assert done.usage.cached_tokens >= kept // BLOCK * BLOCK
            runtime.release(done)
            store.flush()
            if restarted:
                runtime.close()
                runtime = Runtime(engine, store, options)
            messages += [Message("assistant", answer), Message("user", "And at night? " * 3)]
            before, ends = whole, prompt.ends[-1]
        runtime.close()
        store.check()
