"""Another node's blocks and moved chunks in one prompt: what comes exactly is taken so, the rest is moved."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore, open_store
from support.fetch_scene import Scene, Timed
from support.shuffled import BLOCK, MAX_KL, Pool, gate, prefill, tokens

HEAD = 10 * BLOCK


def asked(engine: TorchEngine, store: TieredStore, way: str | None, max_kl: float | None) -> tuple[Any, Any, Any]:
    """A prompt whose head another node holds, and whose documents lie in the store at other positions."""
    pool = Pool(3, sizes=(70, 61, 40))
    before = Runtime(engine, store, RuntimeOptions(gate=gate(engine), context_cache_bytes=0))
    prefill(before, pool.ask((0, 1, 2)))
    pool.head = tokens(HEAD, 77)
    scene = Scene(engine, pool.head, way=way)
    runtime = Runtime(
        Timed(engine, scene.clock),
        store,
        RuntimeOptions(
            remote=scene.remote, cost=scene.cost, clock=scene.clock.monotonic, rng=Random(5), gate=gate(engine)
        ),
    )
    return scene, runtime, pool.ask((2, 0, 1))


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_the_head_is_fetched_and_documents_are_moved(llama: TorchEngine, way: str) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        _, runtime, (ids, parts) = asked(llama, store, way, MAX_KL)
        done = prefill(runtime, (ids, parts))
        assert done.usage.tokens.by_source["cloud"] >= 3 * BLOCK
        assert done.usage.tokens.relocated > 130
        assert done.usage.gate_decision == "kl-0.020 by rotate"
        assert done.context.levels[0].level == "exact"
        assert done.context.relocated[0][0] >= HEAD
        # Fetched blocks are stored as the front of what follows; what was moved is not.
        keys = runtime.keys(ids)
        assert store.match(keys, MAX_KL).tokens == HEAD
        runtime.close()
        store.check()


@pytest.mark.parametrize("way", ["layers", "tail"])
def test_an_exact_request_fetches_and_computes(llama: TorchEngine, way: str) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        _, runtime, (ids, parts) = asked(llama, store, way, None)
        done = prefill(runtime, (ids, parts), None)
        assert (done.usage.tokens.relocated, done.usage.gate_decision) == (0, "")
        np.testing.assert_allclose(done.logits, llama.prefill(llama.new_context(), ids), atol=2e-5)
        runtime.close()


def test_a_link_that_breaks_while_documents_wait(llama: TorchEngine) -> None:
    with open_store(None, host_bytes=1 << 27) as store:
        scene, runtime, (ids, parts) = asked(llama, store, "layers", MAX_KL)
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
        done = prefill(runtime, (ids, parts))
        assert done.usage.cached_tokens + sum(c.end - c.start for c in done.computed) == len(ids)
        assert done.usage.tokens.relocated > 130
        assert "cloud" not in done.usage.tokens.by_source
        runtime.close()
