"""Another node's blocks and moved chunks in one prompt: what comes exactly is taken so, the rest is moved."""

from __future__ import annotations

import runpy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime
from ctxreuse.store import TieredStore, open_store

HERE = Path(__file__)
S: Any = SimpleNamespace(**runpy.run_path(str(HERE.with_name("shuffled.py"))))
F: Any = SimpleNamespace(**runpy.run_path(str(HERE.with_name("scene.py"))))
HEAD = 10 * S.BLOCK


def asked(engine: TorchEngine, store: TieredStore, way: str | None, lossy: str | None) -> tuple[Any, Any, Any]:
    """A prompt whose head another node holds, and whose documents lie in the store at other positions."""
    pool = S.Pool(3, sizes=(70, 61, 40))
    before = Runtime(engine, store, gate=S.gate(engine), live_bytes=0)
    S.prefill(before, pool.ask((0, 1, 2)))
    pool.head = S.tokens(HEAD, 77)
    scene = F.Scene(engine, pool.head, way=way)
    runtime = Runtime(
        F.Timed(engine, scene.clock),
        store,
        remote=scene.remote,
        cost=scene.cost,
        clock=scene.clock.monotonic,
        rng=Random(5),
        gate=S.gate(engine),
    )
    return scene, runtime, pool.ask((2, 0, 1))


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_the_head_is_fetched_and_documents_are_moved(llama: TorchEngine, way: str) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        _, runtime, (ids, parts) = asked(llama, store, way, S.LOSSY)
        done = S.prefill(runtime, (ids, parts))
        assert done.usage.by_source["cloud"] >= 3 * S.BLOCK
        assert done.usage.moved > 130
        assert done.usage.gate == "kl-0.020 by rotate"
        assert done.live.levels[0].level == "exact"
        assert done.live.moved[0][0] >= HEAD
        # Fetched blocks are stored as the front of what follows; what was moved is not.
        keys = runtime.keys(ids)
        assert store.match(keys, S.LOSSY).tokens == HEAD
        runtime.close()
        store.check()


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_an_exact_request_fetches_and_computes(llama: TorchEngine, way: str) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        _, runtime, (ids, parts) = asked(llama, store, way, None)
        done = S.prefill(runtime, (ids, parts), None)
        assert (done.usage.moved, done.usage.gate) == (0, "")
        np.testing.assert_allclose(done.logits, llama.prefill(llama.start(), ids), atol=2e-5)
        runtime.close()


def test_a_link_that_breaks_while_documents_wait(llama: TorchEngine) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        scene, runtime, (ids, parts) = asked(llama, store, "layers", S.LOSSY)
        offering = scene.remote.fetch

        def fetch(*given: Any, **more: Any) -> Any:
            found = offering(*given, **more)
            waiting = found.wait_layer

            def wait_layer(layer: int, timeout: float) -> None:
                if layer:
                    found.stop()
                    from ctxreuse.errors import LinkDownError

                    raise LinkDownError("cut")
                waiting(layer, timeout)

            found.wait_layer = wait_layer
            return found

        scene.remote.fetch = fetch
        done = S.prefill(runtime, (ids, parts))
        assert done.usage.cached_tokens + sum(c.end - c.start for c in done.computed) == len(ids)
        assert done.usage.moved > 130
        assert "cloud" not in done.usage.by_source
        runtime.close()
