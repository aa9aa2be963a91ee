"""Documents kept in int8 and attended to where they are, in any order, by the engine and by transformers' generate.

    python examples/held_chunks.py [MODEL]

Nothing is copied or decompressed, and two contexts that show a document hold it once.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from ctxreuse.block import parse
from ctxreuse.engines import open_engine
from ctxreuse.engines.generate import generate
from ctxreuse.engines.moving import Rows
from ctxreuse.engines.sampling import Sampling
from ctxreuse.engines.text import TextModel
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.reuse.attend import Held, HeldMove

HEAD = "Questions are answered from these notes, in a few words.\n\n"
NOTES = (
    "Lighthouse: The lamp of Ness turns once every twenty seconds. The keeper winds the clockwork each evening at six, "
    "trims the wick at midnight and writes the log at dawn. In fog the horn sounds twice a minute.\n\n",
    "Harbour: The harbour master opens the lock at high water. Boats from the village bring oil on the first Monday of "
    "the month. A boat pays two shillings a night, a herring boat in season one and six.\n\n",
)
QUESTIONS = ("What does a boat pay?", "When is the log written?")
NEW = 12


def hold(engine: TorchEngine, text: TextModel, note: str) -> Held:
    """Compute a note behind the head, where it sees what every prompt begins with, and keep its rows in int8."""
    size, head, body = engine.space.block_tokens, text.encode(HEAD), text.encode(note)
    rest = -(len(head) + len(body)) % size  # the last block must be whole
    tokens = np.concatenate([head, body, np.resize(body, rest)])
    live = engine.start()
    engine.prefill(live, tokens)
    keys = prefix_keys(engine.space.digest, tenant_salt("example"), tokens, size)
    blocks = [parse(block) for block in engine.export(live, keys, ROOT, 0)]
    spans = [(max(len(head) - at, 0), min(len(head) + len(body) - at, size)) for at in range(0, len(tokens), size)]
    return engine.hold([Rows(block, a, b - a) for block, (a, b) in zip(blocks, spans) if a < b], "int8")


def show(engine: TorchEngine, head: Tokens, notes: list[Held], room: int) -> TorchLive:
    """A context of the head and the notes; only the head is computed."""
    live = engine.start(len(head) + sum(map(len, notes)) + room)
    engine.prefill(live, head)
    for one in notes:
        engine.show(live, one.tokens, [HeldMove(live.n, one, 0, len(one))], "approx")
    return live


def main(model: str = "smollm2") -> None:
    engine = open_engine(model)
    text = engine.text
    assert text is not None
    held, head = [hold(engine, text, note) for note in NOTES], text.encode(HEAD)
    for order, question in zip(([0, 1], [1, 0]), QUESTIONS):
        asked, notes = text.encode(f"{question}\nAnswer:"), [held[i] for i in order]
        live = show(engine, head, notes, len(asked) + NEW)
        sampling = Sampling(temperature=0, max_tokens=NEW, ignore_eos=True)
        answer = [piece.token for piece in generate(engine, text, live, engine.prefill(live, asked), sampling)]
        live = show(engine, head, notes, len(asked) + NEW)
        prompt = torch.from_numpy(np.append(live.tokens, asked).astype(np.int64))[None]
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = engine.model.generate(prompt, past_key_values=live.cache, **options)
        again = out[0, prompt.shape[1] :].tolist()
        print(f"{question}\n  engine: {text.decode(answer)!r}\n  transformers: {text.decode(again)!r}")
    print(f"{sum(map(len, held))} tokens held once, in {sum(one.nbytes for one in held):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
