"""`ctxreuse replay`: an answer about a trace in one command, and clear words for what is no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.cost import CostModel
from ctxreuse.lab.recorder import Recorder
from ctxreuse.store.policy import NAMES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three contexts of ten blocks, asked in turns."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 5120, "hash_ids": [*range(i % 3 * 10, i % 3 * 10 + 10)]}
        for i in range(30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_table_and_a_plot(run: Any, trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "hits.svg"
    done = run("replay", str(trace), "--capacity", "10ktok,1GB", "--token-bytes", "1KB", "--plot", str(plot))
    assert done.code == 0, done.err
    for name in ("infinite", "belady", *NAMES):
        assert name in done.out
    assert "With 1GB" in done.out
    assert "Simulation: 30 requests of trace.jsonl" in done.out
    assert "prices are a guess" in done.out
    drawn = plot.read_text()
    assert "belady" in drawn
    assert "adaptive" in drawn


def test_json(run: Any, trace: Path) -> None:
    done = run("replay", str(trace), "--capacity", "20MB", "--policy", "lru", "--token-bytes", "1KB", "--json",
               "--warm-up", "0.5", "--prefill", "1ms,0")  # fmt: skip
    body = json.loads(done.out)
    assert body["simulation"] is True
    assert body["about"]["block_bytes"] == 512_000
    assert body["about"]["requests"] == 30
    infinite, belady, lru = body["outcomes"]
    assert (infinite["first"], infinite["last"]) == (15, 30)
    assert infinite["token_hit"] == 1.0
    assert infinite["seconds_saved"] == pytest.approx(15 * 5.12)
    # 39 blocks hold all three contexts, so the plain policy needs no luck.
    assert belady["token_hit"] == lru["token_hit"] == 1.0
    assert done.err == ""


def test_capacities_by_themselves(run: Any, trace: Path) -> None:
    body = json.loads(run("replay", str(trace), "--policy", "lru", "--json").out)
    sizes = sorted({o["capacity"] for o in body["outcomes"]} - {0})
    assert len(sizes) >= 3
    assert max(sizes) <= 30 * body["about"]["block_bytes"] / 4


def test_a_recording_knows_its_sizes(run: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl", block_tokens=64, token_bytes=1000)
    for n in range(5):
        recorder.prompt([bytes([n % 2, i]) * 16 for i in range(4)], 256)
    recorder.close()
    body = json.loads(run("replay", str(tmp_path / "r.jsonl"), "--policy", "lru", "--json").out)
    assert body["about"]["block_bytes"] == 64_000
    assert body["outcomes"][0]["token_hit"] == 0.6


def test_made_up_traffic(run: Any) -> None:
    listed = run("replay", "--generate", "ls")
    assert listed.out.startswith("agents")
    ask = ("replay", "--generate", "chat", "--requests", "200", "--policy", "lru,adaptive:lru+arc", "--json")
    first, second = (json.loads(run(*ask, "--capacity", "1GB").out) for _ in range(2))
    assert [o["policy"] for o in first["outcomes"]] == ["infinite", "belady", "lru", "adaptive:lru+arc"]
    assert [o["token_hit"] for o in first["outcomes"]] == [o["token_hit"] for o in second["outcomes"]]


def test_the_size_of_a_model(run: Any, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(shape))
    ask = ("replay", str(trace), "--capacity", "1GB", "--policy", "lru", "--json", "--model")
    body = json.loads(run(*ask, str(folder)).out)
    assert body["about"]["block_bytes"] == 512 * 2 * 2 * 2 * 8 * 4
    assert "ctxreuse model get smollm2" in run(*ask, "smollm2").err
    (folder / "config.json").write_text("{}")
    assert "sizes are unknown" in run(*ask, str(folder)).err


def test_measured_costs(run: Any, trace: Path, tmp_path: Path) -> None:
    model = CostModel()
    for n in (64, 256, 1024):
        model.prefill.observe(n, 0, 0.01 * n)
    file = tmp_path / "cost.bin"
    file.write_bytes(model.dump())
    ask = ("replay", str(trace), "--capacity", "1GB", "--policy", "lru", "--json")
    body = json.loads(run(*ask, "--cost", str(file)).out)
    assert body["about"]["token_seconds"] == pytest.approx(0.01, rel=0.05)
    assert body["priced"] == "prices of cost.bin"
    # What a daemon of this device has measured is found by itself.
    own = tmp_path / "XDG_DATA_HOME" / "ctxreuse" / "store" / "cost.bin"
    own.parent.mkdir(parents=True)
    own.write_bytes(model.dump())
    assert json.loads(run(*ask).out)["priced"] == "prices as this device measured them"
    own.write_bytes(b"damaged")
    assert "guess" in json.loads(run(*ask).out)["priced"]
    assert "no prefill was measured" in run(*ask, "--cost", str(own)).err


@pytest.mark.parametrize(
    ("flags", "said", "code"),
    [
        ((), "no trace: name a file", 2),
        (("TRACE", "--generate", "chat"), "a trace file and --generate", 2),
        (("none.jsonl",), "cannot be read", 2),
        (("TRACE", "--format", "sessions"), "no session", 3),
        (("TRACE", "--format", "csv"), "no trace format 'csv'", 2),
        (("TRACE", "--policy", "lru,best"), "no eviction policy 'best'", 2),
        (("TRACE", "--capacity", "1B"), "less than a block", 2),
        (("TRACE", "--capacity", "much"), "is not a size", 2),
        (("TRACE", "--plot", "x.docx"), "no picture is called '.docx'", 2),
        (("TRACE", "--plot", "none/x.svg"), "folder does not exist", 2),
        (("TRACE", "--prefill", "fast"), "is not a duration", 2),
        (("TRACE", "--prefill", "1ms,1ns,1ns"), "no price of prefill", 2),
        (("TRACE", "--cost", "none.bin"), "costs cannot be read", 2),
        (("TRACE", "--cost", "none.bin"), "Name the cost.bin in the store of a daemon", 2),
        (("TRACE", "--token-bytes", "0"), "at least one byte", 2),
        (("TRACE", "--token-bytes", "1KB", "--block-bytes", "1KB"), "exclude each other", 2),
        (("--generate", "x"), "no traffic is called 'x'", 2),
    ],
)
def test_wrong_usage(run: Any, trace: Path, flags: tuple[str, ...], said: str, code: int) -> None:
    done = run("replay", *(str(trace) if flag == "TRACE" else flag for flag in flags))
    assert done.code == code
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_nodes_by_router(run: Any, trace: Path) -> None:
    command = ("replay", str(trace), "--nodes", "3", "--capacity", "20ktok", "--prefill", "1ms")
    done = run(*command)
    assert done.code == 0, done.err
    for name in ("bound", "price", "least-load", "longest-prefix", "random"):
        assert name in done.out
    assert "30 requests of trace.jsonl to 3 nodes that keep 20,000 tokens each" in done.out
    found = json.loads(run(*command, "--router", "price", "--json").out)
    assert [one["rule"] for one in found["outcomes"]] == ["bound", "price"]
    wrong = run(*command, "--router", "best")
    assert wrong.code != 0
    assert "there is no rule 'best'" in wrong.err
