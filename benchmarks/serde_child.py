"""LMCache's serdes over chunks in a file: ``python serde_child.py FOLDER SERDES`` in an environment that has LMCache.

Reads chunks.npy in the folder, bits of bfloat16, and writes what each serde makes of it and back, NAME.npy. Its last
line is JSON: mean bytes and seconds of a chunk by name.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["main"]

_ROUNDS = 3


def main(folder: Path, serdes: dict[str, dict[str, Any]]) -> None:
    """Run all serdes over all chunks."""
    import ctxreuse_cloud.connectors.lmcache  # noqa: F401  which registers ours
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    def memory(shape: Any, dtype: Any, data: Any = None) -> Any:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.zeros(nbytes, dtype=torch.uint8) if data is None else torch.from_numpy(data)
        about = MemoryObjMetadata(
            torch.Size(shape), dtype, 0, nbytes, 1, fmt=MemoryFormat.KV_2LTD, shapes=[torch.Size(shape)], dtypes=[dtype]
        )
        return TensorMemoryObj(raw, about, None)

    def timed(submit: Callable[..., int], fd: int, query: Callable[[int], bool | None], *objects: Any) -> float:
        begun = time.perf_counter()
        task = submit(*([each] for each in objects))
        select.select([fd], [], [])
        seconds = time.perf_counter() - begun
        consume_fd(fd)
        assert query(task) is True
        return seconds

    chunks, found = np.load(folder / "chunks.npy"), {}
    for name, settings in serdes.items():
        serde = create_serde_processor(
            SerdeConfig(settings["type"], {key: value for key, value in settings.items() if key != "type"})
        )
        back, sizes, seconds = np.empty_like(chunks), [], []
        for number, chunk in enumerate(chunks):
            key = ObjectKey(number.to_bytes(32, "big"), "model", 0)
            source = memory(chunk.shape, torch.bfloat16, chunk.reshape(-1).view(np.uint8))
            room = serde.estimate_serialized_size(MemoryLayoutDesc([torch.Size(chunk.shape)], [torch.bfloat16]))
            times = []
            for _ in range(_ROUNDS):
                coded, whole = memory((room,), torch.uint8), memory(chunk.shape, torch.bfloat16)
                encode = timed(
                    serde.submit_serialize,
                    serde.get_serialize_event_fd(),
                    serde.query_serialize_result,
                    source,
                    coded,
                    key,
                )
                decode = timed(
                    serde.submit_deserialize, serde.get_deserialize_event_fd(), serde.query_deserialize_result,
                    coded, whole, key,
                )  # fmt: skip
                times.append((encode, decode))
            sizes.append(coded.get_size())
            seconds.append(np.min(times, axis=0))
            back[number] = np.frombuffer(memoryview(whole.byte_array).cast("B"), np.uint16).reshape(chunk.shape)
        serde.close()
        np.save(folder / f"{name}.npy", back)
        encode, decode = np.mean(seconds, axis=0).tolist()
        found[name] = {"nbytes": float(np.mean(sizes)), "encode": encode, "decode": decode}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
