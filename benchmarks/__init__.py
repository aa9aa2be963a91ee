"""The project's evidence: one module a subject, each run by ``python -m benchmarks NAME`` in the repository.

A benchmark has ``run(options: Options) -> list[Figure]`` and a docstring whose first line says what it measures. To
add one, write the module and its name in SUITE. Figures of full runs lie in ``results/``. What a user measures on
their own machine is in `ctxreuse.bench`, with the harness of both.
"""

from __future__ import annotations

from ctxreuse.bench import Suite

__all__ = ["NEEDS", "SUITE"]

_NAMES = (
    "adapters", "agents", "agents_http", "answers", "api", "attend", "chunks", "codec", "cost", "cuda", "decay",
    "device", "drafts", "engine", "evict", "exits", "fair", "fetch", "forget", "fork", "import", "install", "layers",
    "lengths", "levels", "lossless", "many", "neighbours", "onnx", "order", "page", "pauses", "pipeline", "planner",
    "policy", "proxy", "qa", "rans", "recall", "refill", "remote", "resident", "restart", "restore", "resume", "router",
    "router_live", "scale", "serde", "shapes", "sidecar", "states", "steps", "suffixes", "together", "tools", "tree",
    "vllm", "wire",
)  # fmt: skip

_LEVELS, _CHUNKS = "ctxreuse calibrate smollm2", "ctxreuse calibrate smollm2 --chunks"
#: What must be run once on this machine before some of them: minutes each; `levels` measures less without.
NEEDS = {
    "codec": (_LEVELS,),
    "levels": (_LEVELS,),
    "pipeline": (_LEVELS,),
    "serde": (_LEVELS,),
    "chunks": (_LEVELS, _CHUNKS),
    "exits": ("ctxreuse calibrate smollm2 --exits",),
    "decay": (_LEVELS, _CHUNKS),
    "qa": (_LEVELS, _CHUNKS),
}

SUITE = Suite(
    "python -m benchmarks",
    {name: f"benchmarks.{'importing' if name == 'import' else name}" for name in _NAMES},
    elsewhere="Those of the installed package: ctxreuse bench ls",
)
