"""Memory that numpy cannot see: contracts through staged copies, and the CUDA kernels as this CPU runs them."""

import pytest
import torch

from ctxreuse.engines.torch_hf.devices import TorchDevice
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.engine.chunks import EngineChunksContract
from ctxreuse.testing.engine.compressed import EngineCompressionContract
from ctxreuse.testing.engine.levels import EngineLevelsContract
from support import native_builds
from support.shim import Shim

CPU = torch.device("cpu")


@pytest.mark.parametrize("engine", ["llama", "gemma3", "mistral", "falconh1"], indirect=True, scope="class")
class TestStaged(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        return engine_of(request.param, place=TorchDevice(CPU, apart=True))


class TestStagedChunks(EngineChunksContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", place=TorchDevice(CPU, apart=True))


@pytest.mark.build("shim")
class TestDecodedByKernels(EngineLevelsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", place=TorchDevice(CPU, apart=True, launcher=Shim(native_builds.shim())))


@pytest.mark.build("shim")
class TestAttendedByKernels(EngineCompressionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama64", place=TorchDevice(CPU, apart=True, launcher=Shim(native_builds.shim())))
