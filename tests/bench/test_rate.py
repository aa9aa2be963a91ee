"""Rate against divergence: curves, figures with bars, the plot, texts, contexts that are loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import SUITE
from benchmarks.codec import JOINTLY, OURS, figures_of, figures_on, means
from benchmarks.picture import plot_paths
from benchmarks.rate.curve import Point, at_divergence, best_meeting
from benchmarks.rate.plot import draw
from benchmarks.rate.texts import held_out, read_texts
from ctxreuse.errors import ConfigError


def point(bits: float, kl: float, family: str = "x", setting: str = "") -> Point:
    return Point(family, setting or f"{bits:g}", bits, kl, 0.9, 0.01)


CURVE = [point(2, 0.1), point(3, 0.01), point(4, 0.001)]


def test_between_two_settings_bits_are_linear_in_log_kl() -> None:
    assert at_divergence(CURVE, math.sqrt(0.1 * 0.01)).bits == pytest.approx(2.5)
    assert at_divergence(CURVE, 0.01) == (pytest.approx(3.0), True)
    assert at_divergence(CURVE[::-1], 0.001) == (pytest.approx(4.0), True)


def test_beyond_the_ends() -> None:
    assert at_divergence(CURVE, 0.5) == (2.0, True)
    bits, measured = at_divergence(CURVE, 0.0001)
    assert bits == pytest.approx(5.0)
    assert not measured
    assert at_divergence(CURVE[:1], 0.01) == (math.inf, False)
    assert at_divergence(CURVE[:1], 0.2) == (2.0, True)


def test_ours_is_the_family_that_takes_fewer_bits_at_a_divergence() -> None:
    ours = [point(1, 0.04, OURS, "kl-0.05"), point(2, 0.01, OURS, "kl-0.01")]
    joint = [point(0.5, 0.04, JOINTLY, "kl-0.05-joint"), point(3, 0.01, JOINTLY, "kl-0.01-joint")]
    figures = {
        f.metric: f
        for f in figures_of([*joint, *ours, point(4, 0.05, "KIVI"), point(6, 0.001, "KIVI")], {0.05: 1.0, 0.01: 2.5})
    }
    assert figures["level within KL 0.05"].value == figures["at equal KL 0.05"].value == 0.5
    assert figures["level within KL 0.01"].value == figures["at equal KL 0.01"].value == 2
    assert figures["ctxreuse kl-0.05-joint"].value == 0.5


def test_the_cheapest_level_that_meets_a_divergence() -> None:
    assert best_meeting(CURVE, 0.02) == CURVE[1]
    assert best_meeting(CURVE, 0.01) == CURVE[1]
    assert best_meeting(CURVE, 0.0001) is None


def test_figures_take_the_level_that_meets_the_target_and_the_best_rival() -> None:
    ours = [point(1, 0.04, OURS, "kl-0.05"), point(1.6, 0.011, OURS, "kl-0.01"), point(2.4, 0.002, OURS, "kl-0.002")]
    rivals = [point(3, 0.12, "KIVI"), point(5, 0.003, "KIVI"), point(7, 0.0001, "int8")]
    figures = {f.metric: f for f in figures_of([*ours, *rivals], {0.046: 2.18, 0.0102: 2.0, 0.001: None})}
    coarse, middle, fine = list(figures.values())[:3]
    assert coarse.value == 1
    assert coarse.passed
    assert "kl-0.05" in coarse.note
    assert middle.value == 2.4, "kl-0.01 does not reach 0.0102 here, so the next one counts"
    assert not middle.passed
    assert "between levels" in fine.note
    assert fine.value > 2.4
    equal = figures["at equal KL 0.0102"]
    assert equal.value == pytest.approx(at_divergence(ours, 0.0102).bits)
    assert 1.6 < equal.value < 1.7
    assert equal.peer == pytest.approx(at_divergence(rivals[:2], 0.0102).bits)
    assert "peer: KIVI" in equal.note
    assert figures["at the KL of KIVI, 5"].ratio(5) == pytest.approx(5 / at_divergence(ours, 0.003).bits)
    assert figures["at the KL of KIVI, 5"].bar == 5
    assert figures["at the KL of int8, 7"].bar is None, "ours is drawn on there, which proves nothing"
    assert "top-1 90.0 %" in figures[f"{OURS} kl-0.01"].note


def test_each_level_is_shown_on_each_text_beside_the_best_rival_there() -> None:
    prose = [point(1, 0.06, OURS, "kl-0.05"), point(2, 0.004, OURS, "kl-0.01"), *CURVE, point(9, 0.001, "int8")]
    coarse, fine = figures_on("prose", prose)
    assert (coarse.metric, coarse.value) == ("kl-0.05 on prose", 1)
    assert coarse.peer == pytest.approx(at_divergence(CURVE, 0.06).bits)
    assert "1.20 of its name; peer at the same KL: x" in coarse.note
    assert "0.40 of its name" in fine.note
    code = [p._replace(bits=p.bits + 2) for p in prose]
    assert means({"prose": prose, "code": code})[0] == point(2, 0.06, OURS, "kl-0.05")


def test_the_plot_is_two_files_that_name_every_codec(tmp_path: Path) -> None:
    points = [point(1, 0.05, OURS, "kl-0.05"), point(2, 0.002, OURS, "kl-0.002"), *CURVE]
    draw(points, tmp_path / "new" / "rate.svg", (OURS, JOINTLY), "a model", (0.01,))
    svg, png = plot_paths(tmp_path / "new" / "rate")
    text = svg.read_text()
    assert all(word in text for word in (OURS, "kl-0.05", "KL 0.01", "a model"))
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    draw(points, tmp_path / "new" / "rate", (OURS, JOINTLY), "a model", (0.01,))
    assert svg.read_bytes() == first


def test_plot_paths_take_any_ending() -> None:
    for name in ("a/kl-0.5.svg", "a/kl-0.5.png"):
        assert plot_paths(Path(name)) == (Path("a/kl-0.5.svg"), Path("a/kl-0.5.png"))
    assert plot_paths(Path("kl-0.5"))[0] == Path("kl-0.5.svg")


def test_texts_are_there_and_none_is_one_that_calibration_learns_from(tmp_path: Path) -> None:
    from ctxreuse.calibrate import default_texts
    from ctxreuse.calibrate.texts import in_turn

    found = held_out()
    assert set(found) == {"prose", "chat", "code", "tables", "languages"}
    learnt = [one for part, kinds in default_texts().items() if part != "held-out" for one in in_turn(kinds)]
    for name, text in found.items():
        for at in range(0, len(text) - 400, 400):
            assert not any(text[at : at + 400] in document for document in learnt), name
    (tmp_path / "own.txt").write_text("mine")
    assert read_texts([tmp_path / "own.txt"]) == {"own.txt": "mine"}
    with pytest.raises(ConfigError):
        read_texts([tmp_path / "none.txt"])


class Same:
    """A codec that changes nothing and takes one bit a value."""

    family = setting = ""

    def code(self, values: Any, role: str, layer: int, layers: int) -> Any:
        from benchmarks.rivals import Coded

        return Coded(values.copy(), float(values.size))


class Nothing(Same):
    """Forgets everything."""

    def code(self, values: Any, role: str, layer: int, layers: int) -> Any:
        from benchmarks.rivals import Coded

        return Coded(np.zeros_like(values), 0.0)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_context_is_loaded_with_what_a_rival_made_of_it(kind: str, engine_of: Any) -> None:
    from benchmarks.rate.context import CODED, RAW_BITS, RAW_TOKENS, SCORED, Context
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    engine = engine_of(kind)
    ids = np.random.default_rng(2).integers(0, 512, CODED + SCORED + 1).astype("<i4")
    context = Context(engine, TorchCalibrationModel(engine).rotaries(), ids)
    assert context.fidelity(context.views) == (0.0, 1.0, 0.0)
    fidelity, bits = context.rival(Same())
    # K turned back and forth differs by rounding.
    assert fidelity.kl < 1e-6
    assert fidelity.top1 > 0.98
    full = sum(s.blocked for s in engine.space.layers)
    sinks = 2 * RAW_TOKENS * 32 * full  # two heads of 16, K and V
    assert bits == context.values - sinks + RAW_BITS * sinks
    worse, bits = context.rival(Nothing())
    assert worse.kl > 100 * max(fidelity.kl, 1e-7)
    assert worse.top1 < 1
    assert bits == RAW_BITS * sinks


def test_fewer_rows_answer_nearly_alike_and_all_rows_exactly(engine_of: Any) -> None:
    from benchmarks.rate.compacted import Compaction, Compactor
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    engine, coded = engine_of("llama"), 96
    ids = np.random.default_rng(3).integers(0, 512, coded + 33).astype("<i4")
    before = engine.model.config._attn_implementation
    compactor = Compactor(engine, TorchCalibrationModel(engine).rotaries(), ids, coded, ids[:8])
    values = sum(2 * coded * 32 for spec in engine.space.layers if spec.blocked)
    found = {share: compactor.measure(Compaction(share), engine.codec) for share in (1.0, 0.5, 0.1)}
    assert found[1.0][0].kl < 1e-6
    assert found[1.0][0].top1 == 1
    assert found[1.0][0].kl < found[0.5][0].kl < found[0.1][0].kl
    assert 16 * values / 2 < found[0.5][1] < 18 * values / 2
    assert engine.model.config._attn_implementation == before


def test_settings_go_to_the_benches_that_have_them() -> None:
    with pytest.raises(ConfigError, match="plot"):
        SUITE.run("tree", quick=True, plot=Path("x"))


def test_a_model_without_a_card_is_told_how_to_get_one(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ctxreuse.engines.torch_hf import TorchEngine

    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    monkeypatch.setattr(TorchEngine, "open", lambda *_, **__: engine_of("llama"))
    for name in ("codec", "pipeline"):
        with pytest.raises(ConfigError, match="calibrate"):
            SUITE.run(name, quick=True, model="any")
