"""SGLang's controller, factory and base class, from its wheel, with our storage; no engine: it needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine import PLACE
from support.waiting import patient

pytestmark = [pytest.mark.connectors, pytest.mark.daemon]

PROGRAM = Path(__file__).with_name("run_sglang.py")
#: More than one batch of 128.
HASHES = [f"{n:064x}" for n in range(140)]


class Process:
    """SGLang's code in the environment that has it."""

    def __init__(self, store: Path) -> None:
        self._process = subprocess.Popen(
            [str(PLACE / "bin" / "python"), str(PROGRAM), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __call__(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(patient(10))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("settings", [{"layout": "layer_first"}, {"layout": "page_first", "v1": False}])
def test_pages_outlive_a_killed_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    with Process(tmp_path) as engine:
        assert engine("open", settings) == ""
        assert engine("query", HASHES) == 0
        assert engine("backup", HASHES, 0) == 140 * 16
        assert engine("query", [*HASHES, "ff"]) == 140 * 16
        assert engine("fetch", HASHES[:128], 150, 0) == [128, True]
        engine.kill()
    with Process(tmp_path) as engine:
        assert engine("open", settings) == ""
        assert engine("query", [*HASHES[:10], "ff", *HASHES[10:]]) == 10 * 16
        assert engine("exists", HASHES[0])
        assert not engine("exists", "ff")
        assert engine("fetch", [*HASHES[100:110], "ff", HASHES[110]], 150, 100) == [10, True]
        assert engine("close")


def test_another_layout_model_type_or_way_misses_and_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    with Process(tmp_path) as engine:
        assert engine("open", {}) == ""
        assert engine("backup", HASHES[:4], 0) == 64
        for other in ({"layout": "page_first"}, {"model_name": "other"}, {"dtype": "float8_e5m2"}):
            assert engine("open", other) == ""
            assert engine("query", HASHES[:4]) == 0
        assert engine("open", {}) == ""
        assert engine("fetch", HASHES[:4], 150, 0) == [4, True]
        assert "keeps mamba beside its KV" in engine("sidecar")
        assert engine("open", {"v1": False}) == ""  # flat tensors have another order of bytes
        assert engine("fetch", HASHES[:4], 150, 0)[0] == 0
        assert "extra config has no setting 'pth'" in engine("open", {"settings": {"pth": "x"}})
        assert "names no model" in engine("open", {"model_name": ""})


def test_ranks_have_a_store_each(tmp_path: Path) -> None:
    ranks = [{"tp_size": 2, "tp_rank": rank} for rank in range(2)]
    with Process(tmp_path) as one, Process(tmp_path) as two:
        assert [one("open", ranks[0]), two("open", ranks[1])] == ["", ""]
        assert one("backup", HASHES[:2], 0) == 32
        assert two("query", HASHES[:2]) == 0
        assert two("backup", HASHES[:2], 5) == 32
        assert two("fetch", HASHES[:2], 150, 5) == [2, True]
        # Under MLA pages are equal: the first rank saves, the other reads beside it.
        assert [one("open", ranks[0] | {"is_mla_model": True}), two("open", ranks[1] | {"is_mla_model": True})] == [
            "",
            "",
        ]
        assert one("backup", HASHES[:2], 0) == 32
        assert two("fetch", HASHES[:2], 150, 0) == [2, True]
