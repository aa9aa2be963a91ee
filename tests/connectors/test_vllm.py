"""The real vLLM with our connector: the same tokens as without, kept over its end, apart by tenant, never wrong."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.store import open_store
from support.vllm_engine import Vllm
from support.waiting import until

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(1, 512) for _ in range(tokens)]


#: Lengths below, at, and above ends of pages of 32.
PROMPTS = [prompt(1, 700), prompt(2, 96), prompt(3, 97), prompt(4, 40), [*prompt(1, 500), *prompt(5, 60)]]


def same(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return all(
        one["ids"] == other["ids"] and all(abs(a - b) < 1e-3 for a, b in zip(one["logprobs"], other["logprobs"]))
        for one, other in zip(answers, others, strict=True)
    )


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in answers]


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What vLLM answers without a connector."""
    with Vllm(tiny, None, tmp_path_factory.mktemp("alone") / "log") as engine:
        yield engine.ask(*PROMPTS)


def stored(store: Path, blocks: int) -> bool:
    with open_store(store, readonly=True) as opened:
        return opened.stats().blocks >= blocks


def test_contexts_outlive_the_engine_and_are_apart_by_tenant(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    with Vllm(tiny, store, log) as engine:
        first = engine.ask(*PROMPTS)
        assert same(first, alone)
        until(lambda: stored(store, 30))
        assert cached(engine.ask(*PROMPTS)) == [672, 64, 96, 32, 544]
    with Vllm(tiny, store, log) as engine:
        again = engine.ask(*PROMPTS)
        assert same(again, alone)
        assert cached(again) == [672, 64, 96, 32, 544]
        # The answer is part of the next turn's prompt.
        long = engine.ask(prompt(8, 60), new=40)[0]["ids"]
        until(lambda: engine.ask([*prompt(8, 60), *long, 5])[0]["cached"] == 96)
        mine = engine.ask(PROMPTS[0], salt="a")
        assert cached(mine) == [0]
        assert same(mine, alone[:1])
        until(lambda: cached(engine.ask(PROMPTS[0], salt="a")) == [672])
        assert cached(engine.ask(PROMPTS[0], salt="b")) == [0]
        fresh = prompt(9, 800)
        before = engine.ask(fresh)
        engine.kill()
    with Vllm(tiny, store, log) as engine:
        assert same(engine.ask(*PROMPTS), alone)
        after = engine.ask(fresh)
        assert same(after, before)
        assert cached(engine.ask(*PROMPTS)) == [672, 64, 96, 32, 544]
    assert "invalid" not in log.read_text()


def test_another_page_size_or_type_misses_and_a_damaged_block_is_computed_again(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    with Vllm(tiny, store, log) as engine:
        engine.ask(*PROMPTS)
        until(lambda: stored(store, 30))
    with Vllm(tiny, store, log, block_size=64) as engine:
        other = engine.ask(*PROMPTS[:2])
        assert cached(other) == [0, 0]
        assert same(other, alone[:2])
    with Vllm(tiny, store, log, dtype="bfloat16") as engine:
        assert cached(engine.ask(*PROMPTS[:2])) == [0, 0]
    damage(store)
    with Vllm(tiny, store, log) as engine:
        found = engine.ask(*PROMPTS)
        assert same(found, alone)
        until(lambda: cached(engine.ask(PROMPTS[0])) == [672])
        assert same(engine.ask(PROMPTS[0]), alone[:1])
    assert "Recovered from KV load failure" in log.read_text()


def damage(store: Path) -> None:
    """Change a byte in V of the last layer of the third block of the first prompt."""
    with open_store(store, readonly=True) as opened:
        ids = PROMPTS[0][64:96]
        with opened.read() as reader:
            for entry in opened.walk():
                view = reader.peek(entry.key)
                if view is not None and view.tokens.tolist() == ids and entry.end == 96:
                    plane = bytes(view.plane(2, "v"))
                    if len(plane) == 2 * 32 * 32 * 4:  # float32
                        break
    file = store / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    for found in re.finditer(re.escape(plane), bytes(data)):
        data[found.start() + 200] ^= 0x40
    file.write_bytes(data)


def test_two_engines_share_a_store_and_the_second_writes_when_the_first_has_ended(
    tiny: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with Vllm(tiny, store, tmp_path / "one") as writer, Vllm(tiny, store, tmp_path / "other") as other:
        writer.ask(*PROMPTS)
        until(lambda: stored(store, 30))
        shared = other.ask(*PROMPTS)
        assert cached(shared) == [672, 64, 96, 32, 544]
        assert same(shared, alone)
        assert cached(other.ask(prompt(20, 200))) == [0]
        writer.close()
        fresh = prompt(21, 200)
        time.sleep(5)  # it tries every five seconds
        other.ask(fresh)
        until(lambda: cached(other.ask(fresh)) == [192])


def test_smollm2_in_bfloat16_answers_the_same(smollm2: Path, tmp_path: Path) -> None:
    """Half precision, pages of 128 tokens, scheduler and worker in processes of their own: vLLM's defaults here."""
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": 128, "processes": True}
    text = prompt(30, 700)
    with Vllm(smollm2, None, tmp_path / "log", **options) as engine:
        plain = engine.ask(text, new=12)
    store = tmp_path / "store"
    for _ in range(2):
        with Vllm(smollm2, store, tmp_path / "log", **options) as engine:
            found = engine.ask(text, new=12)
            assert found[0]["ids"] == plain[0]["ids"]
            until(lambda: stored(store, 5))
    assert found[0]["cached"] == 640
