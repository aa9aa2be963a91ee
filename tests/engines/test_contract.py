"""Every kind of model passes the engine contract."""

import numpy as np
import pytest

from ctxreuse.testing.engine import EngineContract, random_tokens

#: One architecture of each kind of state: full attention, windows beside it, windows only, linear attention beside it,
#: both in one layer, states only.
KINDS = ("llama", "gemma3", "mistral", "qwen3next", "falconh1", "mamba2")
OTHERS = (
    "qwen2",
    "gpt2",
    "lfm2",
    "granitemoehybrid",
    "bamba",
    "jamba",
    "nemotronh",
    "zamba2",
    "mamba",
    "olmohybrid",
    "zaya",
)


@pytest.mark.parametrize(
    "engine",
    [*KINDS, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)],
    indirect=True,
    scope="class",
)
class TestTiny(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        cls.tolerance = rounding(request.param)
        return engine_of(request.param)


def rounding(name):
    """`StepContract.tolerance` of a model: where its float32 logits are further from those in float64 than that of the
    others, two ways to compute them may be as far apart. Mamba: 2.5e-5, by the kernels of some processors."""
    return {"mamba": 4e-5}.get(name, EngineContract.tolerance)


#: What an architecture is most likely to get wrong: resuming, exporting, cropping, refusing.
SHORT = {
    "test_resumed_equals_a_whole_prefill",
    "test_export_load_export_gives_the_same_bytes",
    "test_crop_goes_back_to_where_it_was",
    "test_exports_that_do_not_exist_are_refused",
}


@pytest.mark.parametrize("engine", OTHERS, indirect=True, scope="class")
class TestOthersInShort(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, request, engine_of):
        cls.tolerance = rounding(request.param)
        return engine_of(request.param)


for name in {name for name in vars(EngineContract) if name.startswith("test_")} - SHORT:
    setattr(TestOthersInShort, name, None)  # not collected


class TestLoadInThread(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", background=True)


class TestLoadInPrefill(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", background=False)


@pytest.mark.parametrize("name", ["gemma3", "mistral"], scope="class")
class TestWholeWindows(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, name, engine_of):
        return engine_of(name, full_kv_for_windows=True)


class TestInt8Weights(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine_of):
        return engine_of("llama", int8_weights=True)

    def test_its_blocks_are_its_own_and_its_numbers_near(self, engine, engine_of):
        plain = engine_of("llama")
        assert engine.space.digest != plain.space.digest
        ids = random_tokens(engine, 50)
        exact, found = (one.prefill(one.new_context(), ids) for one in (plain, engine))
        assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()
