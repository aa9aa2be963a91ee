"""Questions over documents in any order and number: what was computed once is moved to where it is wanted.

    python examples/documents.py [FOLDER [MODEL]]

How far moved KV may be off has to be measured once for a model; without that only exact prefixes are reused:

    ctxreuse calibrate smollm2 --chunks
"""

from __future__ import annotations

import sys
import tempfile

from ctxreuse_agents import Memory

from ctxreuse.errors import ConfigError

DOCUMENTS = {
    "lighthouse": "The lighthouse of Ness was built in 1871. Its lamp turns once every twenty seconds. The keeper "
    "winds the clockwork each evening at six, trims the wick at midnight and writes the log at dawn. In fog the horn "
    "sounds twice a minute, and nobody sleeps.",
    "harbour": "The harbour master opens the lock at high water. Boats from the village bring oil on the first Monday "
    "of the month, weather permitting, and take back the log books. A boat pays two shillings a night, a herring boat "
    "in season one and six.",
    "museum": "Visitors may climb the hundred and ninety steps on Sundays between two and four. The oil store is a "
    "museum now; its log books lie in a glass case, opened at the night when the Marigold lost her rudder.",
}
ASKED = (
    ("When does the keeper write the log?", ("lighthouse", "harbour", "museum")),
    ("What does a boat pay?", ("museum", "harbour", "lighthouse")),
    ("How many steps are there?", ("museum", "lighthouse")),
    ("When is the lock opened?", ("harbour",)),
)


def main(folder: str, model: str = "smollm2") -> None:
    lossy = "kl-0.05"  # the next token's distribution may move by 0.05 nats; leave it out for exact reuse only
    try:
        memory = Memory.open(folder, engine=model, lossy=lossy)
    except ConfigError as error:
        print(f"{error}\nExact reuse only, until then.")
        memory = Memory.open(folder, engine=model)
    with memory:
        for question, names in ASKED:
            session = memory.create()
            session.system("Answer from the documents in one short sentence.")
            answer = session.ask(question, documents=[DOCUMENTS[name] for name in names], max_tokens=24)
            usage = answer.usage
            print(f"\n{question} ({', '.join(names)})\n  {answer.text.strip()}")
            print(
                f"  {usage.cached_tokens} of {usage.prompt_tokens} tokens reused, {usage.moved} of them moved", end=""
            )
            print(f" · {usage.mended} repaired · {usage.seconds_prefill + usage.seconds_load:.2f} s")
            print(f"  gate: {usage.gate or 'nothing to move'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
