"""Two devices, one cloud: the cloud computes a context for the first one, the second one only fetches it.

ctxreuse-cloud serve                                        in another terminal
python examples/cloud_share.py tcp://127.0.0.1:7353         where the sidecar says that its bus listens
"""

from __future__ import annotations

import sys
import time

from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, ClientOptions
from ctxreuse.engines import open_engine
from ctxreuse.identity.keys import as_tokens, prefix_keys

HANDBOOK = "The keeper lights the lamp at dusk, winds the clockwork every four hours and writes down each ship. " * 20


def device(name: str, endpoint: str, model: str) -> int:
    """Bring the handbook into a new engine without computing it here; returns the token that follows it."""
    engine = open_engine(model)
    assert engine.text is not None
    space, tokens = engine.space, as_tokens(engine.text.encode(HANDBOOK))
    with BusClient(endpoint, ClientOptions(name=name, spaces=(space.digest,))) as cloud:
        while cloud.welcome is None:
            time.sleep(0.01)
        # Keys are made with the salt of this link: another tenant's would name other blocks.
        keys = prefix_keys(space.digest, cloud.welcome.salt, tokens[:-1], space.block_tokens)
        started = time.perf_counter()
        found = cloud.match(space.digest, keys, timeout=5)
        stored = found is not None and found.blocks == len(keys)
        request = FetchRequest(space, tokens[: len(keys) * space.block_tokens])
        coming = cloud.fetch(request, keys, compute=not stored)
        heads = coming.heads(timeout=300)  # where each block lies; layers follow one after the other

        context = engine.new_context(len(tokens))
        loading = engine.load(context, heads, ready=lambda layer: coming.wait_layer(layer, timeout=300))
        logits = engine.prefill(context, tokens[len(keys) * space.block_tokens :])
        loading.wait()
        seconds, how = time.perf_counter() - started, "stored by" if stored else "computed by"
        print(f"{name}: {len(keys)} blocks {how} the cloud, {coming.received:,} bytes in {seconds:.2f} s")
        return int(logits.argmax())


def main(endpoint: str, model: str = "smollm2") -> None:
    tokens = [device(name, endpoint, model) for name in ("first device", "second device")]
    print(f"the same next token: {tokens[0] == tokens[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
