"""Chunks of 256 tokens under LMCache's serdes, ours and its own: bytes, divergence, time to encode and to decode.

The K and V are those that SmolLM2 has of one text of each kind (that of `codec`, 768 tokens each), in bfloat16 and as
vLLM hands them over: a row of a token has each head's K and V. LMCache's own interface runs each serde, one thread, in
the environment with LMCache; what comes back is loaded by our engine, and the next 192 tokens are scored against the
exact cache. A time is the least of three for a chunk, and the mean over chunks.

``peer`` is LMCache's fp8, the only serde of 0.5.6 that makes chunks smaller on a processor: its others encrypt, or run
on GPUs. ``CTXREUSE_VLLM`` names the environment with this package and ``lmcache`` (`make test-connectors` makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.block.levels import PACKED
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.kernels.convert import from_float32, to_float32

__all__ = ["OPTIONS", "run"]

OPTIONS = frozenset({"model"})

#: Tokens of a chunk.
_TOKENS = 256
_PEER = "fp8"
_DTYPE = "bfloat16"


def run(options: Options) -> list[Figure]:
    """Figures of each serde beside bfloat16 as it is and LMCache's own serde. Raises ConfigError, EngineError."""
    from benchmarks.rate.context import CODED, SCORED, Context
    from benchmarks.rate.texts import held_out, tokens_of
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    place, name = Path(os.environ.get("CTXREUSE_VLLM", "")), options.model or "smollm2"
    if not (place / "bin" / "lmcache").exists():
        fix = "Run make test-connectors once, and set it to the folder .venv-connectors"
        raise ConfigError("CTXREUSE_VLLM names no environment with LMCache", where=str(place), fix=fix)
    options.step(f"opening {name}")
    engine = TorchEngine.open(name)
    if engine.text is None or engine.codec.profile is None:
        raise ConfigError(f"there is no calibration profile of {name}", fix=f"Run: ctxreuse calibrate {name}")
    serdes: dict[str, dict[str, Any]] = {_PEER: {"type": "fp8"}, PACKED: {"type": "ctxreuse", "level": PACKED}}
    for info in engine.codec.levels:
        if info.lossy:
            serdes[info.name] = {"type": "ctxreuse", "model": engine.codec.digest[:16], "level": info.name}
    rotaries = TorchCalibrationModel(engine).rotaries()
    cut = [tokens_of(engine.text, text, CODED + SCORED + 1) for text in held_out().values()]
    contexts = list[Context]()
    for ids in [ids for ids in cut if ids is not None][: options.pick(1, len(cut))]:
        options.step("exact", len(contexts), len(cut))
        contexts.append(Context(engine, rotaries, ids))
    chunks = np.concatenate([_chunks(context) for context in contexts])
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        np.save(Path(folder, "chunks.npy"), chunks)
        options.step("LMCache's serdes")
        program = Path(__file__).with_name("serde_child.py")
        done = subprocess.run(
            [str(place / "bin" / "python"), "-P", str(program), folder, json.dumps(serdes)],
            env=os.environ | {"LMCACHE_TRACK_USAGE": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EngineError("LMCache's serdes ended", where=str(program), fix=done.stderr[-500:])
        times = json.loads(done.stdout.splitlines()[-1])
        back = {serde: np.load(Path(folder, f"{serde}.npy")) for serde in serdes}
    per = CODED // _TOKENS
    kls: dict[str, float] = {}
    for serde, rows in {"as it is": chunks, **back}.items():
        options.step(f"divergence of {serde}", len(kls), len(serdes) + 1)
        found = [context.fidelity(_views(context, rows[i * per :][:per])).kl for i, context in enumerate(contexts)]
        kls[serde] = float(np.mean(found))
    return _figures(times, kls, chunks[0].nbytes)


def _chunks(context: Any) -> npt.NDArray[np.uint16]:
    """Return a text's chunks, bits of bfloat16 [chunks, 1, layers, tokens, heads * 2 * dim]."""
    layers = 1 + max(plane.layer for plane in context.blocks[0].layout.planes)
    kv = [
        [np.concatenate([view.array(layer, role) for view in context.blocks], 1) for role in "kv"]
        for layer in range(layers)
    ]
    rows = np.asarray(kv, np.float32).transpose(0, 3, 2, 1, 4)  # [layers, tokens, heads, 2, dim]
    cut = rows.reshape(layers, -1, _TOKENS, rows[0, 0].size).swapaxes(0, 1)
    return np.ascontiguousarray(from_float32(np.ascontiguousarray(cut), _DTYPE)[:, None])


def _views(context: Any, chunks: npt.NDArray[np.uint16]) -> Any:
    """Return the context's blocks with the K and V of chunks."""
    planes = context.blocks[0].layout.planes
    heads, _, dim = planes[0].shape
    rows = to_float32(chunks, _DTYPE)[:, 0].swapaxes(0, 1)
    kv = rows.reshape(len(rows), -1, heads, 2, dim).transpose(0, 3, 2, 1, 4)  # [layers, 2, heads, tokens, dim]
    return context.rebuilt(lambda layer, role, plane, start: np.ascontiguousarray(kv[layer, "kv".index(role)]))


def _figures(times: dict[str, dict[str, float]], kls: dict[str, float], raw: int) -> list[Figure]:
    note = "baseline: bfloat16 as it is; peer: LMCache's fp8"
    figures = []
    for serde, own in times.items():
        peer = times[_PEER] if serde != _PEER else dict.fromkeys(own)
        figures += [
            Figure(
                metric=f"{serde}: bytes", value=own["nbytes"] / 1e3, unit="kB", baseline=raw / 1e3, better="lower",
                peer=None if peer["nbytes"] is None else peer["nbytes"] / 1e3, note=note,
            ),
            Figure(
                metric=f"{serde}: KL", value=kls[serde], unit="nats", baseline=kls["as it is"], better="lower",
                peer=kls[_PEER] if serde != _PEER else None, note=note,
            ),
        ]  # fmt: skip
        for what in ("encode", "decode"):
            value, other = own[what], peer[what]
            figures.append(
                Figure(
                    metric=f"{serde}: {what}", value=1e3 * value, unit="ms", better="lower",
                    peer=None if other is None else 1e3 * other, note="of a chunk; peer: LMCache's fp8",
                )
            )  # fmt: skip
    return figures
