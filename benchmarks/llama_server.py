"""llama.cpp's own server (in the wheel `xllamacpp`), until standard input ends; prints its address."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """GGUF file, threads, slots, and tokens a slot."""
    # As in our engine: else its threads take the cores from each other and from all else, ten times slower where the
    # machine is busy, and no comparison would mean anything.
    os.environ |= {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000"} | os.environ
    import xllamacpp

    path, threads, slots, tokens = arguments[0], *map(int, arguments[1:])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = slots, slots * tokens
    params.port, params.hostnames = 0, ["127.0.0.1"]
    params.n_gpu_layers, params.verbosity = 0, -1
    params.use_jinja = True  # tools need the chat template
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
