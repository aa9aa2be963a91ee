"""`ctxreuse calibrate` and `ctxreuse codec`: from a model folder to a stored profile, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.cli.app import main
from ctxreuse.codec import ProfileStore, read_profile
from ctxreuse.reuse import read_chunk_profile


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """`run("codec", "ls")` gives exit code, output and error output; profiles lie under tmp_path."""
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(args)
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def folder(tmp_path: Path, engine_of: Any, text: Any) -> Path:
    """A Hugging Face folder with a tiny model and its tokenizer."""
    path = tmp_path / "tiny-model"
    engine_of("llama").model.save_pretrained(path)
    text._tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_from_a_folder_to_a_card(run: Any, folder: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text(" ".join(str(i * i) for i in range(4000)))
    plot, out = tmp_path / "rate.svg", tmp_path / "copy.card"
    arguments = (
        "--text",
        str(words),
        "--windows",
        "3",
        "--levels",
        "0.05+0.01,0.05-joint",
        "--plot",
        str(plot),
        "--out",
        str(out),
    )
    code, printed, error = run("calibrate", str(folder), *arguments)
    assert code == 0, error
    path = Path(printed.strip())
    assert path.is_relative_to(ProfileStore().folder)
    assert path.read_bytes() == out.read_bytes()
    profile = read_profile(out.read_bytes())
    assert profile.notes["text"] == "words.txt"
    assert profile.notes["windows"].startswith("3/1/1 of 768+192")
    drawn = plot.read_text()
    assert "<svg" in drawn
    # A curve of its own, if this little text was enough for a joint level.
    assert (", joint" in drawn) == any(level.joint for level in profile.levels)
    for level in profile.levels:
        assert level.info.name in error
        assert level.info.bits > 0

    code, listed, _ = run("codec", "ls")
    assert code == 0
    assert path.stem in listed
    assert "tiny-model" in listed
    code, shown, _ = run("codec", "show", path.stem[:6])
    assert code == 0
    assert "kl-0.01" in shown
    assert all(f"{level.kinds['words.txt'].kl:.4f} words.txt" in shown for level in profile.levels)
    code, _, error = run("codec", "show", "ffff0000")
    assert code == 2
    assert "0 profiles" in error
    # A damaged file is no card.
    path.write_bytes(path.read_bytes()[:-1])
    assert path.stem not in run("codec", "ls")[1]


def test_chunks_from_a_folder_to_a_card(run: Any, folder: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text(" ".join(str(i * i) for i in range(6000)))
    plot, out = tmp_path / "chunks.svg", tmp_path / "copy.measured"
    arguments = ("--chunks", "--quick", "--text", str(words), "--plot", str(plot), "--out", str(out))
    code, printed, error = run("calibrate", str(folder), *arguments)
    assert code == 0, error
    path = Path(printed.strip())
    assert path.is_relative_to(ProfileStore().folder)
    profile = read_chunk_profile(out.read_bytes())
    assert path.read_bytes() == out.read_bytes()
    assert profile.notes["text"] == "words.txt"
    assert profile.notes["scenes"] == "5 of 4 x 128, next 128"
    assert "<svg" in plot.read_text()
    for one in profile.measured:
        assert one.policy in error
        assert f"{one.kl:.4f}" in error


def test_chunks_of_a_sliding_window_model_point_to_whole(run: Any, tmp_path: Path, engine_of: Any, text: Any) -> None:
    model, words = tmp_path / "windows", tmp_path / "words.txt"
    engine_of("gemma3").model.save_pretrained(model)
    text._tokenizer.save(str(model / "tokenizer.json"))
    words.write_text(" ".join(str(i * i) for i in range(6000)))
    told = {}
    for options in ((), ("--whole",)):
        code, printed, told[options] = run(
            "calibrate", str(model), "--chunks", "--quick", "--text", str(words), *options
        )
        assert code == 0, told[options]
        kept = read_chunk_profile(Path(printed.strip()).read_bytes())
        assert ("not possible" in kept.notes) == (not options), "only rotation works on states"
    assert "With --whole" in told[()]
    assert "--whole" not in told["--whole",]


def test_what_cannot_be_calibrated(run: Any, folder: Path, tmp_path: Path) -> None:
    code, _, error = run("calibrate", "no-such-model")
    assert code == 2
    assert "neither a known model nor a folder" in error
    assert run("calibrate", str(folder), "--levels", "2")[0] == 2
    short = tmp_path / "short.txt"
    short.write_text("too little")
    code, _, error = run("calibrate", str(folder), "--text", str(short))
    assert code == 2
    assert "too short" in error
    (folder / "tokenizer.json").unlink()
    code, _, error = run("calibrate", str(folder))
    assert code == 2
    assert "no tokenizer.json" in error


def test_plots_need_a_known_kind(tmp_path: Path) -> None:
    from ctxreuse.calibrate.plot import draw
    from ctxreuse.errors import ConfigError

    curves = {"ours": [(1.0, 0.05), (2.0, 0.01)], "theirs": [(3.0, 0.05), (0.5, 0.0)]}
    draw(curves, "rates", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw(curves, "rates", tmp_path / "a.svg")
    draw(curves, "rates", tmp_path / "b.svg")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(curves, "rates", tmp_path / "a.nothing")
