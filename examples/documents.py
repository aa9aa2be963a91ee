"""Questions over documents in any order and number: their KV is computed once and relocated.

    python examples/documents.py [FOLDER [MODEL]]

It needs torch, whose engine relocates KV. The error must be measured once per model; before that, only exact prefixes
are reused:

    ctxreuse calibrate smollm2 --chunks
"""

from __future__ import annotations

import sys
import tempfile

from ctxreuse_agents import Memory

from ctxreuse.engines import open_engine
from ctxreuse.errors import ConfigError

DOCUMENTS = {
    "lighthouse": "The lighthouse of Ness was built in 1871. Its lamp turns once every twenty seconds. The keeper "
    "winds the clockwork each evening at six, trims the wick at midnight and writes the log at dawn. In fog the horn "
    "sounds twice a minute, and no one sleeps.",
    "harbour": "The harbour master opens the lock at high water. Boats from the village bring oil on the first Monday "
    "of the month, weather permitting, and take back the log books. A boat pays two shillings a night, a herring boat "
    "in season one and six.",
    "museum": "Visitors may climb the hundred and ninety steps on Sundays between two and four. The oil store is a "
    "museum now; its log books lie in a glass case, opened at the night when the Marigold lost her rudder.",
}
ORDERS = (
    ("When does the keeper write the log?", ("lighthouse", "harbour", "museum")),
    ("What does a boat pay?", ("museum", "harbour", "lighthouse")),
    ("How many steps are there?", ("museum", "lighthouse")),
    ("When is the lock opened?", ("harbour",)),
)


def main(folder: str, model: str = "smollm2") -> None:
    max_kl = 0.05  # the next token's distribution may move by 0.05 nats; leave it out for exact reuse only
    engine = open_engine(model, engine="torch")
    try:
        memory = Memory.open(folder, engine=engine, max_kl=max_kl)
    except ConfigError as error:
        print(f"{error}\nExact reuse only, until then.")
        memory = Memory.open(folder, engine=engine)
    with memory:
        for question, names in ORDERS:
            session = memory.create()
            session.system("Answer from the documents in one short sentence.")
            answer = session.ask(question, documents=[DOCUMENTS[name] for name in names], max_tokens=24)
            usage, tokens = answer.usage, answer.usage.tokens
            print(f"\n{question} ({', '.join(names)})\n  {answer.text.strip()}")
            reused = f"{tokens.cached} of {tokens.prompt} tokens reused, {tokens.relocated} of them relocated"
            print(f"  {reused} · {tokens.recomputed} recomputed · {usage.seconds.total:.2f} s")
            print(f"  gate: {usage.gate_decision or 'nothing to relocate'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
