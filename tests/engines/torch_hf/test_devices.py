"""Memory that numpy cannot see: contracts through staged copies, and the CUDA kernels as this CPU runs them."""

import numpy as np
import pytest
import torch

from ctxreuse.block.format import BlockView, parse
from ctxreuse.config import EngineConfig
from ctxreuse.engines.torch_hf.devices import TorchDevice, device_of
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.testing.engine import EngineContract, random_tokens
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


@pytest.mark.parametrize("name", ["abacus", "meta:x", "cuda:77"])
def test_a_device_that_torch_does_not_have_is_an_error(name):
    with pytest.raises(ConfigError, match=r"torch cannot compute on") as raised:
        device_of(name)
    assert raised.value.where == "engine.device"


def test_the_numeric_type_suits_the_device_unless_it_is_named():
    assert EngineConfig().torch_dtype == "float32"
    assert EngineConfig(device="cuda").torch_dtype == "bfloat16"
    assert EngineConfig(device="cuda", dtype="float32").torch_dtype == "float32"
    assert EngineConfig(dtype="float16").torch_dtype == "float16"


def test_int8_weights_are_for_processors(engine_of):
    with pytest.raises(ConfigError, match="int8 weights"):
        engine_of("llama", int8_weights=True, place=TorchDevice(CPU, apart=True))


def test_contexts_stay_as_they_are_where_no_kernel_could_read_them_quantised(engine_of):
    for engine, why in (
        (engine_of("llama64", place=TorchDevice(CPU, apart=True)), "need CuPy"),
        (engine_of("llama", place=TorchDevice(CPU, apart=True)), "heads of 64, 128, 256"),
    ):
        context = engine.new_context()
        engine.prefill(context, random_tokens(engine, 40))
        with pytest.raises(EngineError, match=why):
            engine.chunks.compress(context, "int8", "approx~kl-0.05")
        assert [run.level for run in context.levels] == ["exact"]


@pytest.mark.build("shim")
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_long_context_is_read_in_place_by_the_kernels(engine_of, format):
    """Many tokens, then some in one pass and one by one: near the same context as the processor keeps it."""
    shim = Shim(native_builds.shim())
    there, here = engine_of("llama64", place=TorchDevice(CPU, apart=True, launcher=shim)), engine_of("llama64")
    ids = random_tokens(there, 200)
    contexts = []
    for engine in (there, here):
        context = engine.new_context()
        engine.prefill(context, ids[:150])
        engine.chunks.compress(context, format, "approx~kl-0.05")
        contexts.append(context)
    layers = [layer.in_place for _, layer in contexts[0].arena_layers]
    assert all(type(slab.k.data) is np.ndarray for one in layers for run in one.runs.runs for slab in run.run.layers[0])
    for part in (ids[150:180], *(ids[i : i + 1] for i in range(180, 190))):
        ours, theirs = (engine.prefill(context, part) for engine, context in zip((there, here), contexts))
        assert np.abs(ours - theirs).max() <= 3e-3 * np.abs(theirs).max()
    assert all("on_device" in vars(one) for one in layers), "the kernels were not asked"


class Arriving(BlockView):
    """A block whose planes came one by one, to places of their own, as from another node."""

    __slots__ = ("places",)

    def __init__(self, whole: BlockView) -> None:
        super().__init__(whole.header, whole.layout, 0, memoryview(b""))
        self.places: dict[tuple[int, str], int] = {}

    def offset(self, layer, role):
        return self.places[layer, role]


@pytest.mark.build("shim")
@pytest.mark.parametrize("background", [True, False])
def test_coded_layers_that_arrive_one_by_one_are_read_where_they_lie(engine_of, background):
    shim = Shim(native_builds.shim())
    engine = engine_of("llama", place=TorchDevice(CPU, apart=True, launcher=shim), background=background)
    sealed, codec = TestDecodedByKernels().sealed(engine)
    whole = [parse(codec.encode(parse(data), "kl-0.05")) for data in sealed.blocks]
    views = [Arriving(view) for view in whole]

    memory, places = bytearray(7), []
    for given in whole:
        places.append({})
        for at in reversed(given.layout.index):
            places[-1][at] = len(memory)
            memory += given.plane(*at)

    def ready(layer: int) -> None:
        for view, its in zip(views, places):
            view.buffer = memoryview(bytes(memory))
            view.places |= {at: place for at, place in its.items() if at[0] == layer}

    suffix, logits = random_tokens(engine, 9, seed=1), []
    for blocks, arrives in ((whole, None), (views, ready)):
        context = engine.new_context()
        loading = engine.load(context, blocks, ready=arrives)
        logits.append(engine.prefill(context, suffix))
        loading.wait()
    assert np.array_equal(*logits)
