"""A request is made once: keys are hashed once, what is known of its context travels with it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.cost import CostModel
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import TokenRangeError
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.runtime import Runtime, RuntimeOptions, RuntimeProtocol
from ctxreuse.runtime.request import ContextRecord, Request
from ctxreuse.store import open_store
from support.letters import Letters

BLOCK = 16


def tokens(n: int) -> Any:
    return np.random.default_rng(n).integers(3, 256, n).astype("<i4")


class Recorder:
    """Takes what a runtime records."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def prompt(self, keys: Any, tokens: int) -> int:
        self.calls.append(("prompt", list(keys)))
        return len(self.calls)

    def mark(self, keys: Any, label: int) -> None:
        self.calls.append(("mark", list(keys)))

    def ended(self, number: int, *, output: int = 0, busy: float = 0.0) -> None:
        self.calls.append(("ended", output))


class Nobody:
    """A remote that never has anything."""

    def offer(self, *_: Any, **__: Any) -> None:
        return None


def test_each_block_of_prompt_and_answer_is_hashed_once(
    llama: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counting(space: bytes, salt: bytes, ids: Any, size: int, parent: bytes = ROOT) -> list[bytes]:
        hashed.append(len(ids) // size)
        return prefix_keys(space, salt, ids, size, parent)

    monkeypatch.setattr("ctxreuse.runtime.request.prefix_keys", counting)
    ids, recorder, cost = tokens(10 * BLOCK + 3), Recorder(), CostModel()
    cost.prefill.observe(100, 0, 10.0)  # slow enough to ask others
    remote: Any = Nobody()
    text: Any = Letters()
    with open_store(tmp_path, capacity=1 << 24) as store:
        options = RuntimeOptions(text=text, recorder=recorder, remote=remote, cost=cost)
        runtime = Runtime(llama, store, options)
        completion = runtime.complete(ids, SamplingParams(max_tokens=4 * BLOCK, ignore_eos=True))
        completion.drain()
        blocks = (len(ids) + 4 * BLOCK - 1) // BLOCK
        assert sum(hashed) == blocks, "recorder, policy, remote, prefill, store and pauses share one list of keys"
        whole = np.concatenate([ids, completion.tokens])[: blocks * BLOCK]
        keys = runtime.keys(whole)
        assert recorder.calls == [("prompt", keys[:10]), ("mark", keys), ("ended", 4 * BLOCK)]
        assert store.match(keys).blocks == blocks
        runtime.close()


def test_a_request_is_checked_where_it_is_made(llama: TorchEngine) -> None:
    runtime = Runtime(llama)
    assert isinstance(runtime, RuntimeProtocol)
    request = runtime.request([5] * 40, parts=(30, 0, 40, 7, 30), branches=(9,), max_kl=0.0)
    assert (request.parts, request.branches, request.max_kl) == ((7, 30), (9,), None)
    assert list(request.keys) == runtime.keys([5] * 40)
    with pytest.raises(TokenRangeError):
        runtime.request([-1])


def test_refinements_are_stopped_when_a_context_is_dropped_unreleased() -> None:
    class Coming:
        stopped = 0

        def stop(self) -> None:
            self.stopped += 1

    class Coded:
        tokens = range(BLOCK)

        class header:
            end, level = 2 * BLOCK, "kl-0.05@0123456789abcdef"

    views: Any = [Coded()]
    for taken, stopped in ((False, 1), (True, 0)):
        fetch: Any = Coming()
        record = ContextRecord(Request(tokens(40)))
        record.receive(views, fetch)
        assert list(record.received) == [1]
        if taken:
            assert record.take_refinements() is fetch
            assert record.take_refinements() is None
        gone = weakref.ref(record)
        del record
        gc.collect()
        assert gone() is None
        assert fetch.stopped == stopped
    fetch = Coming()
    ContextRecord(Request(tokens(40))).receive([], fetch)
    assert fetch.stopped == 1
