"""An agent that remembers: ask about a document, stop, start again, and see what did not have to be computed twice.

    python examples/agent_memory.py [FOLDER]

Run it twice with the same folder: the second run finds the session, its text and its KV.
"""

from __future__ import annotations

import sys
import tempfile

from ctxreuse_agents import Memory

HANDBOOK = """The lighthouse of Ness was built in 1871. Its lamp turns once every twenty seconds. The keeper winds the
clockwork each evening at six, trims the wick at midnight and writes the log at dawn. Boats from the village bring oil
on the first Monday of the month, weather permitting. In fog the horn sounds twice a minute. Visitors may climb the
hundred and ninety steps on Sundays between two and four if the keeper is free to lead them.
"""


def main(folder: str) -> None:
    with Memory.open(folder, engine="smollm2") as memory:
        session = memory.session("handbook")
        if not session.head:
            session.system("Answer from this handbook in one sentence.\n\n" + 2 * HANDBOOK)
            print("A new session: the handbook will be read for the first time.")
        else:
            print(f"Found the session with {len(session.turns())} turns.")

        for question in ("When does the keeper write the log?", "How many steps are there?"):
            # A fork shares everything before it and costs one small record; the trunk stays clean.
            branch = session.fork()
            answer = branch.ask(question, max_tokens=24)
            print(f"\n{question}\n  ", end="")
            for piece in answer:
                print(piece, end="", flush=True)
            tokens = answer.usage.tokens
            print(f"\n  {tokens.prompt} prompt tokens, {tokens.cached} of them reused: {tokens.by_source}")

        # The last branch was worth keeping: its turns become the session's.
        branch.commit()
        print(f"\nThe session {session.name!r} has {len(session.turns())} turns now. It is in {folder}.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
