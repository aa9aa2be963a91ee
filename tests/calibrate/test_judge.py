"""How far a model is trusted to judge steps: measured on labelled ones, kept, and refused where it is chance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.cli.app import main
from ctxreuse.engines import open_engine
from ctxreuse.engines.digit import DigitQuestion
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.judge import (
    Judged,
    JudgeProfile,
    JudgeProfileStore,
    OwnJudge,
    area_under_curve,
    best_threshold,
    likelihood,
    make_steps,
    read_steps,
)
from ctxreuse.judge.profile import read_judge_profile, write_judge_profile
from support.tiny_text import save_model, tiny_text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str]]:
    """`run("calibrate", …)` gives exit code and error output; profiles lie under tmp_path."""
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            main(args)
        return int(stopped.value.code or 0), capsys.readouterr().err

    return call


def test_area_and_threshold_are_those_of_counting_pairs() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        scores = rng.integers(0, 6, 30).astype(float)
        right = rng.random(30) < 0.5
        right[:2] = True, False
        pairs = [(good > bad) + (good == bad) / 2 for good in scores[right] for bad in scores[~right]]
        assert area_under_curve(scores.tolist(), right.tolist()) == pytest.approx(np.mean(pairs))

        def told_apart(limit: float, scores: Any = scores, right: Any = right) -> float:
            return float((scores[right] >= limit).mean() - (scores[~right] >= limit).mean())

        found = best_threshold(scores.tolist(), right.tolist())
        assert told_apart(found) == max(told_apart(limit) for limit in range(7))


def test_likelihood_is_the_mean_log_probability() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)) + 3
    assert likelihood(logits, np.array([1, 2], "<i4")) == pytest.approx((np.log(0.25) + np.log(0.8)) / 2)


def test_the_digit_is_the_expected_one_and_follows_the_chat_template() -> None:
    text = tiny_text()
    question = DigitQuestion(text)
    said = text.decode(question.ids)
    assert "Give a single digit" in said
    assert said.endswith("The digit is ")
    logits = np.full(300, -np.inf, np.float32)
    for digit, share in ((3, 0.25), (7, 0.75)):
        logits[int(text.encode(str(digit))[-1])] = np.log(share)
    assert question.score(logits) == pytest.approx(6.0)


def test_profiles_are_read_as_written_and_damage_is_named(tmp_path: Path) -> None:
    profile = JudgeProfile(b"m" * 32, {"likelihood": Judged(0.8, -1.5, 160, {"sums": 0.9})}, {"model": "tiny"})
    data = write_judge_profile(profile)
    assert read_judge_profile(data) == profile
    assert JudgeProfileStore(tmp_path).add(profile).read_bytes() == data
    for at in range(0, len(data), 7):
        with pytest.raises(FormatError, match="damaged"):
            read_judge_profile(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for wrong in (Judged(1.5, 0, 9), Judged(0.9, float("nan"), 9)):
        with pytest.raises(FormatError, match="cannot be"):
            write_judge_profile(JudgeProfile(b"m" * 32, {"digit": wrong}))


def test_generated_steps_are_half_right_and_the_same_again() -> None:
    steps = make_steps(160)
    assert steps == make_steps(160)
    assert steps != make_steps(160, seed=1)
    for kind in ("arithmetic", "extraction"):
        assert [one.right for one in steps if one.kind == kind] == [True, False] * 40
    for one in steps:
        words = one.step.rstrip(".").split()
        if one.kind == "arithmetic":
            assert (int(words[3]) + int(words[5]) == int(words[7])) == one.right
        else:
            line = next(line for line in one.question.splitlines() if line.startswith(" ".join(words[4:6])))
            assert line.endswith(words[-1]) == one.right


def test_the_command_keeps_what_it_measured_and_refuses_chance(run: Any, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", seed=3)
    code, said = run("calibrate", str(folder), "--judge", "--quick")
    assert code == 2, said
    assert "of the time, by chance it is 50 %" in said
    assert said.count("refused: under 0.7") == 2
    engine = open_engine(str(folder))
    profile = JudgeProfileStore().find(engine.space)
    assert profile is not None
    assert set(profile.judges) == {"likelihood", "digit"}
    # A task that even this model can tell: its own likeliest letters are right.
    letters = sorted(range(97, 123), key=lambda letter: -_told(engine, chr(letter)))
    labelled = tmp_path / "steps.jsonl"
    rows = [{"question": "?", "step": chr(one) * 3, "right": one in letters[:13]} for one in letters]
    labelled.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    code, said = run("calibrate", str(folder), "--judge", "--text", str(labelled))
    assert code == 0, said
    profile = JudgeProfileStore().find(engine.space)
    assert profile is not None
    assert profile.judges["likelihood"].auc == 1.0
    assert profile.judges["likelihood"].steps == 26


def _told(engine: Any, letter: str) -> float:
    from ctxreuse.engines.text import Message

    prompt = engine.text.encode(engine.text.render([Message("user", "?")], generate=True))
    step = engine.text.encode(letter * 3 + "\n\n", markers=False)
    tokens = np.concatenate([prompt, step[:-1]])
    (rows,) = engine.step([(engine.new_context(), tokens)], limit=None, rows=[len(step)])
    return likelihood(rows, step)


def test_what_cannot_be_measured_says_why(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    for content, what in (('{"question": "?"}', "line 1 is no labelled step"), ("\n[", "line 2 is no labelled step")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=what):
            read_steps(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_steps(tmp_path / "none")
    with pytest.raises(ConfigError, match="all labelled steps are right"):
        OwnJudge(lambda before, step: 1.0, [one for one in make_steps(20) if one.right])
    with pytest.raises(ConfigError, match="there is no judge"):
        OwnJudge.named("ctxreuse.nowhere:judge", make_steps(20))
    code, said = run("calibrate", "smollm2", "--judge", "--plot", "x.svg")
    assert code == 2
    assert "a judge has no plot" in said
