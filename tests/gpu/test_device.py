"""The CUDA kernels on a real device against the CPU, bit for bit: the shim's comparisons on more data."""

from __future__ import annotations

import numpy as np
import pytest

from ctxreuse.cuda import CodedPlane, Launcher, Pages, decode_to_pages, statistics
from ctxreuse.cuda.copies import on_host
from ctxreuse.errors import FormatError
from support.device import Sample, compare_planes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("card", [{}, {"style": "pairs"}, {"style": "none"}, {"groups": (1, 2)}], ids=str)
@pytest.mark.parametrize("level", ["kl-0.05", "kl-0.005"])
def test_planes_equal_the_cpu(device: Launcher, dtype: str, card: dict[str, object], level: str) -> None:
    compare_planes(device, Sample(dtype, 1000, start=0, **card), level)


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_wide_transform_and_pages_of_any_order(device: Launcher, heads_first: bool) -> None:
    sample = Sample("bfloat16", 500, dim=64, start=0, spread=(300.0, 0.98))
    compare_planes(device, sample, "kl-0.005", heads_first=heads_first, page_tokens=48, row=47)


def test_hostile_streams_leave_the_device_alive(device: Launcher) -> None:
    random = np.random.default_rng(0)
    sample = Sample("float32", 200, start=0)
    card, block = sample.device(device, "kl-0.05"), sample.coded("kl-0.05")
    xp, refused = device.xp, 0
    for _ in range(300):
        layer, role = sample.planes[random.integers(len(sample.planes))]
        data = bytearray(block.plane(layer, role))
        for at in random.integers(0, len(data), 3):
            data[at] ^= 1 << random.integers(8)
        memory = xp.zeros((3, 3, 200, 16), np.float32)
        try:
            decode_to_pages(
                card, [CodedPlane(layer, role, bytes(data), Pages(memory, "float32", np.ones(1, np.int32)))]
            )
        except FormatError:
            refused += 1
        assert not on_host(memory)[[0, 2]].any()
    assert refused > 100
    compare_planes(device, sample, "kl-0.05")


def test_torch_memory_is_written_in_place(device: Launcher) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA")
    sample = Sample("float16", 100)
    memory = torch.zeros((1, 3, 100, 16), dtype=torch.float16, device="cuda")
    table = torch.zeros(1, dtype=torch.int32, device="cuda")
    coded = sample.coded("kl-0.05")
    decode_to_pages(
        sample.device(device, "kl-0.05"),
        [CodedPlane(0, "v", coded.plane(0, "v"), Pages(memory, "float16", table), 0, sample.start)],
    )
    assert bool((memory != 0).any())


def test_statistics_equal_numpy(device: Launcher) -> None:
    assert statistics.on_device()
    random = np.random.default_rng(0)
    logits = (random.standard_normal((7, 49_152)) * 5).astype(np.float32)
    ordered = np.sort(logits, 1)
    total = np.log(np.exp(logits.astype(np.float64)).sum(1))
    want = np.stack([ordered[:, -1], ordered[:, -1] - ordered[:, -2], total], 1)
    np.testing.assert_allclose(statistics.exit_scores(logits), want, rtol=1e-5)
