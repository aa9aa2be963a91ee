"""Documents in int8, attended to in place and in any order, by the engine and by transformers' generate.

    python examples/in_place_attention.py [MODEL]

Nothing is copied or decompressed, and contexts share a document's memory.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from ctxreuse.block.format import parse
from ctxreuse.engines.chunks import BlockRows
from ctxreuse.engines.generate import generate
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import TextModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.reuse.inplace import AttachedRun, PinnedRun

HEAD = "Questions are answered from these notes, in a few words.\n\n"
NOTES = (
    "Lighthouse: The lamp of Ness turns once every twenty seconds. The keeper winds the clockwork each evening at six, "
    "trims the wick at midnight and writes the log at dawn. In fog the horn sounds twice a minute.\n\n",
    "Harbour: The harbour master opens the lock at high water. Boats from the village bring oil on the first Monday of "
    "the month. A boat pays two shillings a night, a herring boat in season one and six.\n\n",
)
QUESTIONS = ("What does a boat pay?", "When is the log written?")
NEW = 12


def pin_note(engine: TorchEngine, text: TextModel, note: str) -> PinnedRun:
    """Compute a note after the head, which every prompt begins with, and keep its rows in int8."""
    size, head, body = engine.space.block_tokens, text.encode(HEAD), text.encode(note)
    rest = -(len(head) + len(body)) % size  # the last block must be whole
    tokens = np.concatenate([head, body, np.resize(body, rest)])
    context = engine.new_context()
    engine.prefill(context, tokens)
    keys = prefix_keys(engine.space.digest, tenant_salt("example"), tokens, size)
    blocks = [parse(block) for block in engine.export(context, keys, ROOT, 0)]
    spans = [(max(len(head) - at, 0), min(len(head) + len(body) - at, size)) for at in range(0, len(tokens), size)]
    return engine.chunks.pin_run([BlockRows(block, a, b - a) for block, (a, b) in zip(blocks, spans) if a < b], "int8")


def context_of(engine: TorchEngine, head: Tokens, notes: list[PinnedRun], room: int) -> TorchContext:
    """Return a context of the head and the notes; only the head is computed."""
    context = engine.new_context(len(head) + sum(map(len, notes)) + room)
    engine.prefill(context, head)
    for one in notes:
        engine.chunks.attach(context, one.tokens, [AttachedRun(context.n, one, 0, len(one))], "approx")
    return context


def main(model: str = "smollm2") -> None:
    engine = TorchEngine.open(model)
    text = engine.text
    assert text is not None
    runs, head = [pin_note(engine, text, note) for note in NOTES], text.encode(HEAD)
    for order, question in zip(([0, 1], [1, 0]), QUESTIONS):
        query, notes = text.encode(f"{question}\nAnswer:"), [runs[i] for i in order]
        context = context_of(engine, head, notes, len(query) + NEW)
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        answer = [piece.token for piece in generate(engine, text, context, engine.prefill(context, query), sampling)]
        context = context_of(engine, head, notes, len(query) + NEW)
        prompt = torch.from_numpy(np.append(context.tokens, query).astype(np.int64))[None]
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = engine.model.generate(prompt, past_key_values=context.cache, **options)
        again = out[0, prompt.shape[1] :].tolist()
        print(f"{question}\n  engine: {text.decode(answer)!r}\n  transformers: {text.decode(again)!r}")
    print(f"{sum(map(len, runs))} tokens stored once, in {sum(one.nbytes for one in runs):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
