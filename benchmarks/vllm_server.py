"""vLLM's own OpenAI server on the CPU, of the environment that ``CTXREUSE_VLLM`` names."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.children import wait_or_kill
from ctxreuse.cpu import multiplies_bfloat16
from ctxreuse.errors import EngineError

__all__ = ["VllmServer", "free_port"]

_WAIT = 600.0


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class VllmServer:
    """A server with vLLM's prefix cache, on all cores, compiled as vLLM does it unless told. Close it.

    In bfloat16, or float32 where the processor does not multiply that: there it is three times as fast for prompts.

    Args:
        place: the environment.
        model: a Hugging Face folder; requests name it ``model``.
        log: file for what it says.
        agents: requests that it runs side by side.
        tokens: of a context at most.
    """

    def __init__(self, place: Path, model: str, log: Path, agents: int, tokens: int) -> None:
        port, dtype = free_port(), "bfloat16" if multiplies_bfloat16() else "float32"
        settings: dict[str, object] = {
            "model": model, "served-model-name": "model", "dtype": dtype, "max-model-len": tokens,
            "max-num-seqs": agents, "host": "127.0.0.1", "port": port,
        }  # fmt: skip
        arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        cores = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        program = [str(place / "bin" / "python"), "-P", "-m", "vllm.entrypoints.openai.api_server"]
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                [*program, *arguments, "--enable-prefix-caching"],
                env=os.environ | quiet | cores, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + _WAIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise EngineError("vLLM did not start", where=str(log), fix=log.read_text("utf-8")[-500:])
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urlopen(self.url + "/health", timeout=5) as found:
                return bool(found.status == 200)
        except (URLError, OSError):
            return False

    def close(self) -> None:
        """End it and its processes."""
        self._process.terminate()
        wait_or_kill(self._process, 60)

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
