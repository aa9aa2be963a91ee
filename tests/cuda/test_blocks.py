"""Blocks that a device encodes are the CPU's, byte for byte, and what it cannot encode the CPU does."""

from __future__ import annotations

import pytest

from ctxreuse.block.format import parse
from ctxreuse.cuda.blocks import DeviceBlocks
from ctxreuse.errors import FormatError
from support.device import Sample
from support.shim import Shim

pytestmark = pytest.mark.build("shim")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", ["kl-0.05", "kl-0.005"])
@pytest.mark.parametrize("start", [0, 64])
def test_blocks_equal_the_cpu(shim: Shim, dtype: str, level: str, start: int) -> None:
    sample = Sample(dtype, 200, start=start)
    wanted = bytes(sample.codec.encode(sample.block, level))
    device = Counting(shim)
    sample.codec.device = device
    assert bytes(sample.codec.encode(sample.block, level)) == wanted
    assert device.encoded == 1


def test_small_blocks_and_refinements_are_encoded_on_the_cpu(shim: Shim) -> None:
    sample = Sample("float32", 200)
    wanted = (
        bytes(sample.codec.encode(sample.block, "kl-0.05")),
        bytes(sample.codec.refinement(sample.block, "kl-0.005")),
    )
    device = Counting(shim, least=1 << 30)
    sample.codec.device = device
    found = (
        bytes(sample.codec.encode(sample.block, "kl-0.05")),
        bytes(sample.codec.refinement(sample.block, "kl-0.005")),
    )
    assert found == wanted
    assert device.encoded == 0


def test_joint_levels_are_left_to_the_cpu(shim: Shim) -> None:
    sample = Sample("bfloat16", 200)
    with pytest.raises(ValueError, match="planes of several layers as one"):
        sample.device(shim, "kl-0.05-joint")
    wanted = bytes(sample.codec.encode(sample.block, "kl-0.05-joint"))
    sample.codec.device = device = Counting(shim)
    assert bytes(sample.codec.encode(sample.block, "kl-0.05-joint")) == wanted
    assert device.encoded == 0


def test_a_corrupt_plane_is_named_and_not_coded(shim: Shim) -> None:
    sample = Sample("bfloat16", 200)
    spoiled = bytearray(sample.block.buffer)
    spoiled[sample.block.offset(*sample.planes[1])] ^= 4
    sample.codec.device = DeviceBlocks(shim, least=0)
    with pytest.raises(FormatError, match="plane"):
        sample.codec.encode(parse(spoiled), "kl-0.05")


class Counting(DeviceBlocks):
    """Counts what it did not leave to the CPU."""

    def __init__(self, launcher: Shim, least: int = 0) -> None:
        super().__init__(launcher, least=least)
        self.encoded = 0

    def encode(self, *args):  # type: ignore[no-untyped-def]
        found = super().encode(*args)
        self.encoded += found is not None
        return found
