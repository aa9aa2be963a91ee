"""A document that is only ever moved stays in a store that is too small for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store
from support.shuffled import forget_memory, gate, prefill, tokens


def test_what_is_moved_is_needed(llama: TorchEngine, tmp_path: Path) -> None:
    document, head = tokens(96, 1), tokens(32, 2)

    def ask(runtime: Runtime, n: int, text: Any) -> int:
        ids = np.concatenate([tokens(40, 100 + n), text, tokens(100, 200 + n)]).astype("<i4")
        done = prefill(runtime, (ids, (40, 40 + len(text))))
        forget_memory(runtime, runtime.store)
        return int(done.usage.tokens.relocated)

    block = (1 << 14) + 4096  # more than a block takes
    with open_store(tmp_path / "kv", capacity=64 * block, host_bytes=0) as store:
        runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
        ids = np.concatenate([head, document, tokens(20, 3)]).astype("<i4")
        prefill(runtime, (ids, (32, 128)))
        moved = []
        for n in range(18):
            again = n % 3 == 0
            moved.append(ask(runtime, n, document if again else tokens(96, 300 + n)))
        assert store.stats().evicted > 100
        assert moved[::3] == [96] * 6
        assert set(moved) == {0, 96}
