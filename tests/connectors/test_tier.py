"""vLLM's own offloading with our store as its secondary tier: its manager of tiers, and a whole engine on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.store import open_store
from support.pages import ROOT
from support.vllm_engine import ENVIRONMENT, PLACE, Vllm
from support.waiting import patient

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]

PROGRAM = Path(__file__).with_name("run_tier.py")
GUIDE = (ROOT / "docs" / "guide" / "vllm.md").read_text("utf-8")
KEYS = [f"{n:064x}{n % 2:08x}" for n in range(40)]


class Tiers:
    """vLLM's manager in the environment that has vLLM."""

    def __init__(self, store: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [str(PLACE / "bin" / "python"), str(PROGRAM), str(store), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise AssertionError("the process ended")

    def __call__(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """Kill it, as nothing of its memory may be needed."""
        self._process.kill()
        self._process.wait(patient(10))
        Path(f"/dev/shm/vllm_offload_ctxreuse_test_{self._process.pid}.mmap").unlink(missing_ok=True)

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def test_chunks_come_back_when_host_memory_gave_them_up_and_outlive_a_kill(tiny: Path, tmp_path: Path) -> None:
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {}) == ""
        assert tiers("load", KEYS[:2]) == [False, False]
        for at in range(0, 40, 8):  # there is room for 12
            assert tiers("store", KEYS[at : at + 8]) == KEYS[at : at + 8]
        assert tiers("load", [*KEYS, "ff" * 36]) == [True] * 40 + [False]
        assert tiers("empty") == 12
        assert tiers("touch", KEYS)
        counts = tiers("counts")
        assert counts["ctxreuse_vllm_tier_saved_chunks"] == 40
        assert counts["ctxreuse_vllm_tier_loaded_chunks"] >= 28
        assert not {"ctxreuse_vllm_tier_unsaved_chunks", "ctxreuse_vllm_tier_failed_chunks"} & counts.keys()
        assert counts["vllm:kv_offload_tiering_write_bytes"] == 40 * 16384
        tiers.kill()
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {}) == ""
        assert tiers("load", KEYS) == [True] * 40
        other_group = [key[:-8] + f"{1 - int(key[-8:], 16):08x}" for key in KEYS[:3]]
        assert tiers("load", other_group) == [False] * 3
        assert tiers("close")


def test_vllms_own_hashes_hold_the_salt_so_tenants_are_apart(tiny: Path, tmp_path: Path) -> None:
    tokens = list(range(100))
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {}) == ""
        mine, other, none = (tiers("hashes", tokens, salt) for salt in ("a", "b", ""))
        assert len(mine) == 6
        assert len({*mine, *other, *none}) == 18
        assert tiers("hashes", tokens, "a") == mine
        tiers("store", mine)
        tiers("empty")
        assert tiers("load", other) == [False] * 6
        assert tiers("load", none) == [False] * 6
        assert tiers("load", mine) == [True] * 6
        tiers.kill()
    with Tiers(tmp_path, tiny) as tiers:
        secret = tmp_path / "secret"
        secret.write_bytes(b"s")
        assert tiers("open", {}) == ""
        assert tiers("load", tiers("hashes", tokens, "a")) == [True] * 6
        assert tiers("close")
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {"tier": {"secret_file": str(secret)}}) == ""
        assert tiers("load", mine) == [False] * 6  # keys of another secret


def test_another_layout_type_rank_or_model_under_the_same_name_misses(tiny: Path, tmp_path: Path) -> None:
    store, changed = tmp_path / "store", tmp_path / "model"
    shutil.copytree(tiny, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    others: list[dict[str, Any]] = [
        {"layout": "BLNHC"}, {"dtype": "fp8"}, {"block": 32}, {"row": 32768}, {"tp_size": 2}, {"model": str(changed)},
    ]  # fmt: skip
    with Tiers(store, tiny) as tiers:
        assert tiers("open", {}) == ""
        tiers("store", KEYS[:4])
        for other in others:
            assert tiers("open", other) == ""
            assert tiers("load", KEYS[:4]) == [False] * 4
        assert tiers("open", {}) == ""
        assert tiers("load", KEYS[:4]) == [True] * 4
        assert "secondary tier CtxReuseTier has no setting 'pth'" in tiers("open", {"tier": {"pth": "x"}})
        assert "holds no" in tiers("open", {"model": str(tmp_path)})


def damage(store: Path, which: int) -> None:
    """Change a byte of one of the stored chunks."""
    with open_store(store, readonly=True) as opened, opened.read() as reader:
        heads = sorted(bytes(view.plane(0, "value")[:48]) for e in opened.walk() if (view := reader.peek(e.key)))
    file = store / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    for found in re.finditer(re.escape(heads[which]), bytes(data)):
        data[found.start() + 1000] ^= 0x40
    file.write_bytes(data)


@pytest.mark.parametrize("writes", [True, False])
def test_a_damaged_chunk_is_a_failed_load_and_the_others_come(tiny: Path, tmp_path: Path, writes: bool) -> None:
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {}) == ""
        tiers("store", KEYS[:8])
        assert tiers("close")
    damage(tmp_path, 3)
    with Tiers(tmp_path, tiny) as writer, Tiers(tmp_path, tiny) as beside:
        assert writer("open", {}) == ""
        tiers = writer
        if not writes:  # it cannot take the chunk out of the store, and must not try to load it for ever
            assert beside("open", {}) == ""
            tiers = beside
        came = tiers("load", KEYS[:8])
        assert sorted(came) == [False] + [True] * 7
        bad = came.index(False)
        counts = tiers("counts")
        assert counts["ctxreuse_vllm_tier_failed_chunks"] == 1
        assert counts["vllm:kv_offload_tiering_promotion_job_failures"] == 1
        if not writes:
            assert tiers("load", KEYS[bad : bad + 1]) == [False]
            tiers = writer
            assert tiers("load", KEYS[bad : bad + 1]) == [False]
        assert tiers("store", KEYS[bad : bad + 1]) == KEYS[bad : bad + 1]
        tiers("empty")
        assert tiers("load", KEYS[:8]) == [True] * 8


def test_a_full_store_evicts_and_a_second_engine_reads_beside_the_writer(tiny: Path, tmp_path: Path) -> None:
    small = {"tier": {"capacity": "400KB"}}
    with Tiers(tmp_path, tiny) as writer, Tiers(tmp_path, tiny) as beside:
        assert writer("open", small) == ""
        assert beside("open", small) == ""
        for at in range(0, 40, 8):
            writer("store", KEYS[at : at + 8])
        writer("empty")
        came = writer("load", KEYS)
        assert 8 <= sum(came) < 30
        assert beside("load", KEYS) == came
        assert beside("store", ["ee" * 32 + "00000000"]) != []
        assert beside("counts")["ctxreuse_vllm_tier_unsaved_chunks"] == 1  # another process writes
        assert writer("close")
    with open_store(tmp_path, readonly=True) as opened:
        assert opened.stats().nbytes <= 400_000


def test_vllms_manager_announces_what_comes_into_the_store_and_leaves_it(tiny: Path, tmp_path: Path) -> None:
    stored, removed = set[str](), set[str]()
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {"events": True, "tier": {"capacity": "400KB"}}) == ""
        for at in range(0, 40, 8):
            tiers("store", KEYS[at : at + 8])
            events = tiers("events")
            stored.update(events["stored"])
            removed.update(events["removed"])
        tiers("empty")
        came = tiers("load", KEYS)
        removed.update(tiers("events")["removed"])
        assert tiers("close")
    assert stored == set(KEYS)
    assert stored - removed == {key for key, there in zip(KEYS, came) if there}


def test_without_a_store_vllm_goes_on_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with Tiers(tmp_path / "file", tiny) as tiers:
        assert tiers("open", {}) == ""
        assert tiers("store", KEYS[:8]) == KEYS[:8]
        assert tiers("load", KEYS[:8]) == [True] * 8  # from host memory
        assert tiers("empty") == 12
        assert tiers("load", KEYS[:8]) == [False] * 8
        assert tiers("close")


@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations_against_a_model(tiny: Path, tmp_path: Path, seed: int) -> None:
    with Tiers(tmp_path, tiny) as tiers:
        assert tiers("open", {}) == ""
        done = tiers("many", seed, 200)
        assert isinstance(done, dict), done
        assert min(done["stored"], done["came"], done["missed"]) > 10
        assert tiers("close")


def prompts() -> list[list[int]]:
    return [[(n * n + seed) % 511 + 1 for n in range(length)] for seed, length in ((1, 700), (2, 96), (3, 97))]


def test_a_whole_engine_answers_the_same_and_finds_its_contexts_again(tiny: Path, tmp_path: Path) -> None:
    """All of vLLM's connector, scheduler and manager; only the copies to and from the GPU are host_spec's."""
    log, store = tmp_path / "log", tmp_path / "store"
    texts = re.findall(r"--kv-transfer-config '(.*?)'", GUIDE, re.DOTALL)
    text = next(found for found in texts if "CtxReuseTier" in found)
    transfer = json.loads(text.replace("/var/lib/ctxreuse/tier", str(store)))
    transfer["kv_connector_extra_config"] |= {
        "spec_name": "HostTieringSpec", "spec_module_path": "host_spec", "cpu_bytes_to_use": 3_000_000,
    }  # fmt: skip
    with Vllm(tiny, None, log) as engine:
        plain = engine.ask(*prompts())
    with Vllm(tiny, None, log, kv_transfer_config=transfer) as engine:
        first = engine.ask(*prompts())
        engine.ask(prompts()[0], salt="a")
    with Vllm(tiny, None, log, kv_transfer_config=transfer) as engine:
        again = engine.ask(*prompts())
        salted = [engine.ask(prompts()[0], salt=salt)[0]["cached"] for salt in ("b", "a")]
    for answers in (first, again):
        assert [one["ids"] for one in answers] == [one["ids"] for one in plain]
    assert [one["cached"] for one in first] == [0, 0, 0]
    assert [one["cached"] for one in again] == [672, 96, 96]  # all whole pages, that of the last token included
    assert salted == [0, 672]
