"""Tokens that leave an ONNX decoder early: the contract of exits, its graph in parts, ramps made on it, and answers."""

from __future__ import annotations

import gc
import inspect
import shutil
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from ctxreuse import LLM
from ctxreuse.calibrate.exits import ExitSettings, calibrate_exits
from ctxreuse.calibrate.texts import Texts
from ctxreuse.cli.app import app
from ctxreuse.engines import open_engine
from ctxreuse.engines.onnx_rt.model import GraphPart
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.exits.profile import ExitProfileStore
from ctxreuse.models.build import build
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.testing.engine import EngineContract
from ctxreuse.testing.engine.exits import ALWAYS, ExitContract, step_of
from ctxreuse.testing.sealed import random_tokens
from support.early import early_folder, ramps_of


class Early(NamedTuple):
    """A model whose last layers change little, and its folders by precision."""

    model: Any
    folders: dict[str, Path]

    def engine(self, precision: str = "fp32", *, exits: bool = True) -> Any:
        engine = open_engine(self.folders[precision], block_tokens=16, chunk=64, threads=1)
        if exits:
            engine.use_exits(ramps_of(self.model, engine.space))  # type: ignore[attr-defined]
        return engine


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Early:
    folder = tmp_path_factory.mktemp("early")
    model = early_folder(folder)
    return Early(model, {name: build(str(folder), name, progress=False) for name in ("fp32", "int4")})


class TestExits(ExitContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, early: Early) -> Any:
        return early.engine()


class TestExitsOfInt4(ExitContract):
    #: A product of int4 weights and several rows rounds what goes in as one of a single row does, and sums otherwise.
    #: The most that was seen is 0.034, on a processor with AVX2 only; half of all logits differ by less than 1e-6.
    tolerance = 5e-2

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, early: Early) -> Any:
        return early.engine("int4")


class TestInParts(EngineContract):
    """All that an engine does, with its graph cut at ramps."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, early: Early) -> Any:
        return early.engine()


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_parts_give_the_bits_of_the_whole(early: Early, precision: str) -> None:
    whole, parts = early.engine(precision, exits=False), early.engine(precision)
    ids = random_tokens(whole, 70)
    a, b = whole.new_context(), parts.new_context()
    assert np.array_equal(whole.prefill(a, ids), parts.prefill(b, ids))
    for at in range(3):
        assert np.array_equal(whole.prefill(a, ids[at : at + 1]), parts.prefill(b, ids[at : at + 1]))


def test_the_parts_take_the_place_of_the_whole(early: Early) -> None:
    engine = early.engine(exits=False)
    (whole,) = engine._model.parts
    context = engine.new_context()
    engine.prefill(context, random_tokens(engine, 20))
    assert [part.layers for part in engine._model.parts] == [range(6)], "nobody wanted exits"
    engine.use_exits(ramps_of(early.model, engine.space))
    ranges = [range(3), range(3, 5), range(5, 6), range(6, 6)]
    assert [part.layers for part in engine._model.parts] == ranges
    gone = weakref.ref(whole)
    del whole
    gc.collect()
    assert gone() is None, "bindings of slots do not keep it"
    assert step_of(engine, context, random_tokens(engine, 1), ExitPlan((0,), {0: ALWAYS})).left == 0


def test_a_token_that_left_runs_no_later_part(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, passes, run = early.engine(), list[tuple[int, int]](), GraphPart.run

    def counted(self: GraphPart, binding: Any, given: Any, fed: Any, rows: int = 0) -> Any:
        passes.append((self.layers.start, given[0].shape[0] * given[0].shape[1]))
        return run(self, binding, given, fed, rows)

    contexts = [engine.new_context() for _ in range(3)]
    for context in contexts:
        engine.prefill(context, random_tokens(engine, 12))
    monkeypatch.setattr(GraphPart, "run", counted)
    token = random_tokens(engine, 1)
    for _ in range(2):
        engine.exit_step([(context, token, ExitPlan((0,), {0: ALWAYS})) for context in contexts])
    assert passes == [(0, 3), (0, 3)], "one pass for all, up to the ramp"
    passes.clear()
    engine.exit_step([(context, token, ExitPlan((0, 1))) for context in contexts])
    assert passes == [(0, 3), *[(3, 3)] * 3, *[(5, 3)] * 3, (6, 9)], "three rows of each context in later layers"


def test_a_failure_leaves_what_was_there(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = early.engine(), GraphPart.run
    ids = random_tokens(engine, 30, 5)
    context, whole = engine.new_context(), engine.new_context()
    engine.prefill(context, ids[:12])
    engine.prefill(whole, ids[:14])
    step_of(engine, context, ids[12:13], ExitPlan((0,), {0: ALWAYS}))

    def broken(self: GraphPart, *given: Any) -> Any:
        if self.layers.start == 5:
            raise EngineError("no memory")
        return run(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(GraphPart, "run", broken)
        with pytest.raises(EngineError, match="no memory"):
            step_of(engine, context, ids[13:14], ExitPlan())
        with pytest.raises(EngineError, match="no memory"):
            engine.crop(context, 3)
    assert context.n == 13
    assert len(step_of(engine, context, ids[13:14], ExitPlan((0, 1))).rows) == 2
    found, expected = (engine.prefill(one, ids[14:15]) for one in (context, whole))
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a folder whose graph is changed."""
    import onnx

    shutil.copytree(folder, to)
    model = onnx.load(str(to / "model.onnx"), load_external_data=False)
    change(model.graph)
    onnx.save(model, str(to / "model.onnx"))
    return to


def other_names(graph: Any) -> None:
    for node in graph.node:
        node.name = node.name.replace("input_layernorm", "norm")


def a_window(graph: Any) -> None:
    for attribute in (one for node in graph.node for one in node.attribute if one.name == "local_window_size"):
        attribute.i = 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [(other_names, r"no /model/layers\.3/input_layernorm"), (a_window, "sliding windows")],
)
def test_graphs_that_tokens_cannot_leave_say_why(
    early: Early, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    folder = changed(early.folders["fp32"], tmp_path / "changed", change)
    engine: Any = open_engine(folder, block_tokens=16, threads=1)
    assert "--engine onnxruntime" in engine.ramps, "there is no profile yet"
    profile = ramps_of(early.model, engine.space)
    with pytest.raises(EngineError, match=reason):
        engine.use_exits(profile)
    ExitProfileStore().add(profile)
    assert isinstance(engine.ramps, str)
    with pytest.raises(EngineError, match=reason):
        step_of(engine, engine.new_context(), random_tokens(engine, 1), ExitPlan())
    assert len(engine._model.parts) == 1


def test_what_else_is_missing_is_said(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = early.engine(exits=False)
    profile = ramps_of(early.model, engine.space)
    for other in ({"layers": 5}, {"width": 32}, {"ramps": ()}):
        with pytest.raises(EngineError, match="no ramps of this model"):
            early.engine(exits=False).use_exits(type(profile)(**{**as_dict(profile), **other}))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(EngineError, match="pip install onnx"):
        engine.use_exits(profile)
    assert isinstance(engine._exits, str)


def as_dict(profile: Any) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in profile.__struct_fields__}


def test_profiles_are_found_and_answers_leave_early(
    early: Early, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    engine = early.engine(exits=False)
    ExitProfileStore().add(ramps_of(early.model, engine.space))
    with LLM(early.folders["fp32"], exits=0.2, threads=1) as llm:
        assert len(llm.engine._model.parts) == 1, "nobody wanted exits yet"  # type: ignore[attr-defined]
        found = [llm.stream(f"{seed} and", max_tokens=150, ignore_eos=True) for seed in range(3)]
        for one in found:
            one.drain()
        assert sum(one.usage.tokens.exited for one in found) > 20
        assert "left the model early" in found[-1].why().text


def test_in_a_process_of_its_own_as_the_daemon_runs_it(
    early: Early, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    engine: Any = open_engine(early.folders["int4"], isolate=True, threads=1)
    try:
        ExitProfileStore().add(ramps_of(early.model, engine.space))
        runtime = Runtime(engine, None, RuntimeOptions(exits=0.2))
        greedy = SamplingParams(max_tokens=150, ignore_eos=True)
        found = [runtime.complete(random_tokens(engine, 20, seed), greedy) for seed in range(2)]
        for one in found:
            one.drain()
        assert found[1].usage.tokens.exited > 0
        runtime.close()
    finally:
        engine.close()


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_ramps_are_made_of_what_the_folder_computes(early: Early, precision: str) -> None:
    engine = early.engine(precision, exits=False)
    assert engine.text is not None
    source = inspect.getsource(textwrap)
    texts: Texts = {"calibration": {"code": [source[:9000]]}, "validation": {}, "held-out": {"code": [source[9000:]]}}
    profile = calibrate_exits(engine, texts, ExitSettings(12, 128, (3, 5), 200), lambda *_: None, {})
    assert [ramp.depth for ramp in profile.ramps] == [3, 5]
    assert all(ramp.agrees > 0.5 for ramp in profile.ramps), "its last layers change little"
    engine.use_exits(profile)
    assert len(engine.ramps) == 2
    states = engine.exit_states()
    ids = random_tokens(engine, 70)
    found, context = states.read(ids, [3, 5]), engine.new_context()
    assert found.said[-1] == engine.prefill(context, ids).argmax()
    rows = states.head_rows(np.arange(engine.space.vocab_size, dtype=np.int32))
    error = np.abs(found.last[-1] @ rows.T - engine._model.logits(found.last[-1:].view(np.uint32))[0]).max()
    assert error <= (1e-5 if precision == "fp32" else 2e-2) * np.abs(found.last[-1] @ rows.T).max()


def test_the_command_makes_ramps_for_a_folder(early: Early, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    text = tmp_path / "text.py"
    text.write_text(inspect.getsource(textwrap) * 2)
    how = ["--exits", "--quick", "--engine", "onnxruntime", "--text", str(text)]
    made = CliRunner().invoke(app, ["calibrate", str(early.folders["int4"]), *how])
    assert made.exit_code == 0, made.output
    assert isinstance(open_engine(early.folders["int4"], threads=1).ramps, tuple)  # type: ignore[attr-defined]
    for wrong in (["--engine", "onnxruntime"], ["--exits", "--engine", "llama_cpp"]):
        refused = CliRunner().invoke(app, ["calibrate", "smollm2", *wrong])
        assert "not made on the engine" in str(refused.exception)
