"""CodecContract: what every level of every codec must do, as tests to inherit from.

::

    class TestMine(CodecContract):
        def codec(self) -> Coder: return MyCodec(...)
        def blocks(self) -> list[BlockView]: return [...]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse, reseal
from ctxreuse.block.levels import EXACT, expected_kl, family, is_exact, is_joint, is_raw
from ctxreuse.codec import LevelInfo
from ctxreuse.errors import ConfigError, CtxReuseError, FormatError
from ctxreuse.identity.model import ModelSpace

__all__ = ["CodecContract", "Codes", "resealed"]

Bytes = npt.NDArray[np.uint8]


class Codes(Protocol):
    """What is tested: see `ctxreuse.codec.Codec`."""

    @property
    def space(self) -> ModelSpace: ...
    @property
    def levels(self) -> tuple[LevelInfo, ...]: ...
    def nbytes(self, level: str) -> int: ...
    def knows(self, level: str) -> bool: ...
    def encode(self, view: BlockView, level: str) -> Bytes: ...
    def decode(self, view: BlockView) -> Bytes: ...
    def fill(
        self, views: Sequence[BlockView], layer: int, role: str, target: npt.NDArray[np.generic], start: int
    ) -> None: ...


def resealed(view: BlockView, planes: dict[tuple[int, str], bytes | memoryview]) -> BlockView:
    """The block with other bytes in these planes, of the old lengths, and checksums that fit them."""
    return parse(reseal(view, planes))


class CodecContract(ABC):
    """Tests of one codec; ``blocks`` are raw blocks of its space that look like a model's."""

    #: Largest difference that a lossy level may make, as a share of the largest number of a plane.
    tolerance = 0.75
    #: By how much the bytes of a block may differ from what `nbytes` foretells, as a factor.
    estimate = 2.5

    @abstractmethod
    def codec(self) -> Codes:
        """The codec under test."""

    @abstractmethod
    def blocks(self) -> list[BlockView]:
        """Some raw blocks."""

    def _coded(self) -> Iterator[tuple[Codes, LevelInfo, BlockView, BlockView]]:
        codec = self.codec()
        for info in codec.levels:
            for view in self.blocks():
                yield codec, info, view, parse(codec.encode(view, info.name))

    def test_there_are_exact_levels_and_they_come_first(self) -> None:
        names = [info.name for info in self.codec().levels]
        assert names[0] == EXACT
        assert len(set(names)) == len(names)
        assert [info.lossy for info in self.codec().levels] == [not is_exact(name) for name in names]
        # From coarse to fine.
        lossy = [expected_kl(name) for name in names if not is_exact(name)]
        assert lossy == sorted(lossy, reverse=True)

    def test_a_round_trip_keeps_what_the_level_promises(self) -> None:
        for codec, info, view, coded in self._coded():
            assert family(coded.header.level) == info.name
            assert codec.knows(coded.header.level)
            for field in ("kind", "space", "key", "parent", "end", "tokens", "rope_at", "extra"):
                assert getattr(coded.header, field) == getattr(view.header, field), field
            again = parse(codec.decode(coded))
            assert is_raw(again.header.level)
            assert is_exact(again.header.level) is not info.lossy
            assert again.layout.planes == view.layout.planes
            for plane in view.layout.planes:
                at = plane.layer, plane.role
                if not info.lossy:
                    assert bytes(again.plane(*at)) == bytes(view.plane(*at))
                else:
                    real, near = _floats(view.array(*at)), _floats(again.array(*at))
                    assert np.isfinite(near).all()
                    assert np.abs(real - near).max() <= self.tolerance * np.abs(real).max()
            if info.lossy:
                assert expected_kl(again.header.level) == expected_kl(info.name)

    def test_encoding_and_decoding_give_the_same_bytes_each_time(self) -> None:
        for codec, info, view, coded in self._coded():
            assert codec.encode(view, info.name).tobytes() == bytes(coded.buffer)
            assert codec.decode(coded).tobytes() == codec.decode(coded).tobytes()

    def test_filling_gives_the_rows_that_decoding_gives(self) -> None:
        codec, blocks = self.codec(), self.blocks()
        size = codec.space.block_tokens
        levels = [info.name for info in codec.levels]
        mixed = [parse(codec.encode(view, levels[i % len(levels)])) for i, view in enumerate(blocks)]
        decoded = [parse(codec.decode(view)) for view in mixed]
        for plane in blocks[0].layout.planes:
            at = plane.layer, plane.role
            bits = _bits(decoded[0].array(*at))
            heads, _, dim = plane.shape
            target = np.full((heads, size * (len(blocks) + 2), dim), 0x5A, bits.dtype)
            for i, view in enumerate(mixed):
                codec.fill([view], *at, target, size * (i + 1))
            for i, view in enumerate(decoded):
                assert np.array_equal(target[:, size * (i + 1) : size * (i + 2)], _bits(view.array(*at)))
            assert (target[:, :size] == 0x5A).all()
            assert (target[:, -size:] == 0x5A).all()

    def test_sizes_are_predicted(self) -> None:
        for codec, info, _, coded in self._coded():
            predicted, real = codec.nbytes(info.name), sum(plane.nbytes for plane in coded.layout.planes)
            assert real / self.estimate <= predicted <= real * self.estimate, (
                f"{info.name}: {predicted} predicted, {real} real"
            )

    def test_coarser_levels_take_less(self) -> None:
        codec, view = self.codec(), self.blocks()[0]
        sizes = {
            info.name: sum(plane.nbytes for plane in parse(codec.encode(view, info.name)).layout.planes)
            for info in codec.levels
        }
        for joint in (False, True):
            lossy = [size for name, size in sizes.items() if not is_exact(name) and is_joint(name) is joint]
            assert lossy == sorted(lossy)
            assert all(size <= sizes[EXACT] for size in lossy)

    def test_a_changed_byte_anywhere_is_found(self) -> None:
        rng = np.random.default_rng(1)
        for _, info, _, coded in self._coded():
            data = np.frombuffer(coded.buffer, np.uint8).copy()
            head = rng.integers(0, coded.start, 12)
            inside = [
                coded.offset(plane.layer, plane.role) + at
                for plane in coded.layout.planes
                if plane.nbytes
                for at in {0, *rng.integers(0, plane.nbytes, 3).tolist(), plane.nbytes - 1}
            ]
            used = 32 + int.from_bytes(data[12:16].tobytes(), "little")
            for at in [*(int(at) for at in head if at < used), *inside]:
                data[at] ^= 1 << int(rng.integers(8))
                try:
                    view = parse(data)
                    view.verify()
                    raise AssertionError(f"{info.name}: a changed byte {at} was not found")
                except FormatError:
                    pass
                data[:] = np.frombuffer(coded.buffer, np.uint8)

    def test_hostile_streams_under_right_checksums_never_crash(self) -> None:
        rng = np.random.default_rng(2)
        codec, view = self.codec(), self.blocks()[0]
        for info in codec.levels:
            coded = parse(codec.encode(view, info.name))
            planes = [plane for plane in coded.layout.planes if plane.dtype == "uint8" and plane.nbytes]
            for trial in range(24 if planes else 0):
                plane = planes[int(rng.integers(len(planes)))]
                at = plane.layer, plane.role
                raw = bytearray(coded.plane(*at))
                if trial % 3 == 0:
                    raw[: len(raw)] = rng.bytes(len(raw))
                elif trial % 3 == 1:
                    for _ in range(4):
                        raw[int(rng.integers(min(len(raw), 64)))] = int(rng.integers(256))
                else:
                    cut = int(rng.integers(len(raw)))
                    raw[cut:] = bytes(len(raw) - cut)
                hostile = resealed(coded, {at: bytes(raw)})
                heads, size, dim = view.layout.planes[view.layout.index[at]].shape
                target = np.full((heads, 3 * size, dim), 0x5A, _bits(view.array(*at)).dtype)
                # A FormatError, or it was another valid stream.
                with suppress(FormatError):
                    codec.decode(hostile)
                with suppress(FormatError):
                    codec.fill([hostile], *at, target, size)
                # Whatever came of it, nothing was written beside the block.
                assert (target[:, :size] == 0x5A).all()
                assert (target[:, -size:] == 0x5A).all()

    def test_levels_that_are_not_there_are_refused(self) -> None:
        codec, view = self.codec(), self.blocks()[0]
        for level in ("kl-123", "q4", "", "approx", "approx~kl-0.01"):
            try:
                codec.encode(view, level)
            except ConfigError:
                continue
            raise AssertionError(f"{level!r} was encoded")

    def test_only_exact_numbers_are_encoded(self) -> None:
        """What was decoded from a lossy level, or is coded already, cannot be passed off as something better."""
        for codec, _, _, coded in self._coded():
            again = parse(codec.decode(coded))
            for source in (coded, again):
                if source.header.level == EXACT:
                    continue
                for other in codec.levels:
                    try:
                        made = parse(codec.encode(source, other.name))
                    except CtxReuseError:
                        continue
                    raise AssertionError(f"{source.header.level} became {made.header.level}")


def _floats(array: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def _bits(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
