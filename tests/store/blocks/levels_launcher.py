"""Run by test_levels_crash: forks children that write to a full store of several levels until they are killed."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

import numpy as np

from ctxreuse.block.format import parse
from ctxreuse.block.levels import EXACT, PACKED, family
from ctxreuse.store import BlockStore
from ctxreuse.store.lmdb.records import footprint
from ctxreuse.testing.store_levels import CodedContext, codec

CAPACITY = 24 * footprint(CodedContext(1).block(0).nbytes)
CONTEXTS = [CodedContext(4, seed=seed) for seed in range(16)]
BLOCKS = {key: (context, i) for context in CONTEXTS for i, key in enumerate(context.keys)}


def verified(folder: Path) -> BlockStore:
    """Open the store as its next owner; raises AssertionError unless all that is left is what was put."""
    store = BlockStore.open(folder, capacity=CAPACITY)
    store.register_codec(codec())
    assert store.stats().recovered in ("", "kept"), store.stats().recovered
    store.check()
    assert store.verify() == []
    assert store.stats().nbytes <= CAPACITY
    with store.read(0.05) as reader:
        for entry in store.walk():
            context, i = BLOCKS[entry.key]
            view = context.get(reader, i)
            assert view is not None
            assert view.header.level == entry.level
            raw, real = parse(codec().decode(view)), parse(context.block(i))
            most = 0.0 if entry.level in (EXACT, PACKED) else 0.5
            assert np.abs(raw.array(0, "k") - real.array(0, "k")).max() <= most
    return store


def child(folder: Path, say: int, seed: int) -> None:
    store, random_ = verified(folder), random.Random(seed)
    os.write(say, b"ready\n")
    while True:
        context = random_.choice(CONTEXTS)
        for i, key in enumerate(context.keys):
            store.put(key, context.block(i), max_kl=random_.choice([None, 0.05, 0.05]))
        if random_.random() < 0.3:
            store.drop(random_.choice(context.keys), "test")
        store.flush()
        os.write(say, b".")


def main(folder: Path, kills: int, seed: int) -> None:
    random_ = random.Random(seed)
    seen: set[str] = set()
    for n in range(kills):
        hear, say = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(hear)
            try:
                child(folder, say, seed + n)
            except BaseException as error:
                os.write(say, f"error {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.close(say)
        heard, flushes = b"", random_.randrange(16)
        while len(heard) < len(b"ready\n") + flushes and (more := os.read(hear, 65536)):
            heard += more
        select.select([], [], [], random_.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while more := os.read(hear, 65536):
            heard += more
        assert heard.startswith(b"ready\n"), f"after {n} kills: {heard.decode()}"
        assert not heard.removeprefix(b"ready\n").strip(b"."), f"after {n} kills: {heard.decode()}"
        os.close(hear)
    store = verified(folder)
    seen |= {family(entry.level) for entry in store.walk()}
    store.close()
    print(json.dumps(sorted(seen)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
