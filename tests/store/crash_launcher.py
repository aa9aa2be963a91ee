"""Run by test_crash: forks children that write to a store until they are killed, and compares what they acknowledged.

A child is forked from this single-threaded process, so that it starts in milliseconds. It first checks what the
children before it acknowledged, says ``ready``, then writes at random, saying each change *after* the call returned.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

from ctxreuse.store import BlockStore, Ledger, NewTurn
from ctxreuse.store.chunks.index import ChunkLocation
from ctxreuse.testing.store import Context

CAPACITY = 40 * 4096


def verify(folder: Path, acked: list[list[object]], random_: random.Random) -> tuple[Ledger, BlockStore]:
    """Open the store as its next owner and compare; raises AssertionError."""
    ledger = Ledger.open(folder, map_size=1 << 20)
    turns = {a[1]: a for a in acked if a[0] == "turn"}
    heads = {a[1]: a[2] for a in acked if a[0] in ("fork", "turn_head")}
    sample = list(turns) if len(turns) < 100 else [*random_.sample(list(turns), 50), *list(turns)[-50:]]
    for id in sample:
        _, _, parent, content = turns[id]
        turn = ledger.turn(id)
        assert (turn.parent, turn.content) == (parent, content), f"turn {id} differs"
    for session, head in heads.items():
        assert ledger.ancestor(head, ledger.session(session).head), f"session {session} lost turn {head}"
    ledger.check()
    blocks = BlockStore.open(folder, capacity=CAPACITY, map_size=1 << 20)
    assert blocks.stats().recovered in ("", "kept"), blocks.stats().recovered
    blocks.check()
    assert blocks.verify() == []
    blocks.chunks.check()
    for _, chunk in [a for a in acked if a[0] == "chunk"][-100:]:
        assert blocks.chunks.locations(bytes.fromhex(str(chunk))), f"chunk {chunk} was lost"
    return ledger, blocks


def write(ledger: Ledger, blocks: BlockStore, say: int, random_: random.Random) -> None:
    """Change things until killed."""

    def tell(*what: object) -> None:
        os.write(say, json.dumps(what).encode() + b"\n")

    ids = [session.id for session in ledger.sessions(limit=20)]
    while True:
        choice = random_.random()
        if not ids or choice < 0.1:
            session = ledger.fork(random_.choice(ids)) if ids else ledger.create()
            tell("fork", session.id, session.head)
            ids.append(session.id)
        elif choice < 0.5:
            session_id = random_.choice(ids)
            new = [NewTurn("user", f"{random_.random()}" * random_.choice([1, 1, 300])) for _ in range(3)]
            for turn in ledger.append(session_id, new):
                tell("turn", turn.id, turn.parent, turn.content)
            tell("turn_head", session_id, turn.id)
        else:
            context = Context(6, seed=random_.randrange(5), branch=random_.randrange(3), fork=3, floats=700)
            for i, key in enumerate(context.keys):
                blocks.put(key, context.block(i))
            blocks.put(context.keys[2], context.state(2), kind="state")
            chunk = random_.randbytes(32)
            if blocks.chunks.add(chunk, ChunkLocation(tuple(context.keys[1:3]), 2, 5, 4)):
                tell("chunk", chunk.hex())
            if random_.random() < 0.2:
                blocks.drop(context.keys[random_.randrange(6)], "test")


def child(folder: Path, acked: list[list[object]], say: int, seed: int) -> None:
    random_ = random.Random(seed)
    ledger, blocks = verify(folder, acked, random_)
    os.write(say, b'["ready"]\n')
    write(ledger, blocks, say, random_)


def main(folder: Path, kills: int, seed: int) -> None:
    random_ = random.Random(seed)
    acked: list[list[object]] = []
    for n in range(kills):
        hear, say = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(hear)
            try:
                child(folder, acked, say, seed + n)
            except BaseException as error:
                os.write(say, json.dumps(["error", f"{type(error).__name__}: {error}"]).encode() + b"\n")
            os._exit(1)
        os.close(say)
        # Some die while they open and check, most while they write.
        heard = b""
        early = random_.random() < 0.1
        # Counted in what was acknowledged, as a slow machine writes less in the same time.
        lines = 0 if early else random_.randrange(1, 20)
        while heard.count(b"\n") < lines and (more := os.read(hear, 65536)):
            heard += more
        select.select([], [], [], random_.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while more := os.read(hear, 1 << 20):
            heard += more
        os.close(hear)
        for line in heard.split(b"\n")[:-1]:
            what = json.loads(line)
            assert what[0] != "error", f"after {n} kills: {what[1]}"
            acked.append(what)
    ledger, blocks = verify(folder, acked, random_)
    print(json.dumps({"turns": sum(a[0] == "turn" for a in acked), "blocks": blocks.stats().blocks}))
    ledger.close()
    blocks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
