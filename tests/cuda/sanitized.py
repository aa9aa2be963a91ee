"""Run by test_sanitized.py under the sanitizers' runtime: kernels on sound and on hostile streams of many sizes."""

import sys
from pathlib import Path

import numpy as np

from ctxreuse.cuda import CodedPlane, Pages, decode_to_pages
from ctxreuse.errors import FormatError
from support.attention import Chunk, compare_attention
from support.device import Sample, compare_planes
from support.shim import Shim

shim = Shim(Path(sys.argv[1]))
random = np.random.default_rng(0)
compare_planes(shim, Sample("bfloat16", 20, dim=64, start=0, spread=(300.0, 0.98)), "kl-0.005", page_tokens=3)
compare_planes(shim, Sample("float32", 65, groups=(1, 2), style="pairs"), "kl-0.01", heads_first=False)
for dim in (64, 128, 256):
    hidden = np.array([0, 7, 69], np.int64)
    chunks = [Chunk(70, "int8", hidden=hidden, shift=9), Chunk(33, "int4", first=1, at=5), Chunk(19, "bf16", last=18)]
    for queries in (1, 12):
        compare_attention(shim, chunks, (6, queries, dim), 2, positions=np.arange(queries) + 20, window=30)

refused = 0
sample = Sample("float16", 70, start=0, groups=(2, 1))
card, block = sample.device(shim, "kl-0.05"), sample.coded("kl-0.05")
for turn in range(120):
    plane = bytearray(block.plane(*sample.planes[turn % 4]))
    head = 8 + 16 * 4
    plane[random.integers(head, len(plane)) if turn % 3 else random.integers(head)] ^= 1 << random.integers(8)
    pages = Pages(np.zeros((5, 3, 16, 16), np.float16), "float16", np.arange(5, dtype=np.int32))
    try:
        decode_to_pages(card, [CodedPlane(*sample.planes[turn % 4], bytes(plane), pages)])
    except FormatError:
        refused += 1
print("refused", refused)
