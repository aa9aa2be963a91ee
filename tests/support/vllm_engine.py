"""A real vLLM in an environment of its own, driven over its standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.waiting import patient

#: The environment with vLLM: `make test-connectors` names it.
PLACE = Path(os.environ.get("CONNECTORS", ".venv-connectors"))
PROGRAM = Path(__file__).parents[1] / "connectors" / "run_vllm.py"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",  # else it computes with one core less, or more, for having a connector
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class Vllm:
    """An offline vLLM. With ``store`` it has our connector, over that folder.

    ``capacity``: of that store. ``settings``: more of the connector's, ``role``: in vLLM's words. ``processes``:
    scheduler and worker in one each, as `vllm serve` has them, not both in one that starts sooner.
    """

    def __init__(
        self,
        model: Path,
        store: Path | None,
        log: Path,
        *,
        capacity: str = "1GB",
        settings: Mapping[str, str] | None = None,
        role: str = "kv_both",
        processes: bool = False,
        **options: Any,
    ) -> None:
        chosen: dict[str, Any] = {
            "model": str(model), "dtype": "float32", "block_size": 32, "max_model_len": 1024, "max_num_seqs": 4,
            "enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True, **options,
        }  # fmt: skip
        if store is not None:
            chosen["kv_transfer_config"] = {
                "kv_connector": "CtxReuseConnector",
                "kv_role": role,
                "kv_connector_module_path": "ctxreuse_cloud.connectors.vllm",
                "kv_connector_extra_config": {"path": str(store), "capacity": capacity, **(settings or {})},
            }
        command = [str(PLACE / "bin" / "python"), str(PROGRAM), json.dumps(chosen)]
        self.log = log
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT | ({} if processes else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
                start_new_session=True,
            )
        assert self._answer() == "ready"

    def ask(
        self,
        *prompts: Sequence[int],
        salt: str = "",
        new: int = 8,
        hints: dict[str, Any] | None = None,
        whole: bool = False,
    ) -> list[dict[str, Any]]:
        """Answer prompts in one batch: ids, logprobs and cached tokens of each.

        ``hints``: an envelope of KV hints. ``whole``: also the log-probabilities of all tokens at each step.
        """
        assert self._process.stdin is not None
        wanted = [{"tokens": list(each), "salt": salt, "new": new, "hints": hints, "whole": whole} for each in prompts]
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        with open(self.log, "a") as log:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return json.loads(line[7:])
                log.write(line)
        raise AssertionError(f"vLLM ended: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """Kill all its processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it as a user would."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(patient(60))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.close()
