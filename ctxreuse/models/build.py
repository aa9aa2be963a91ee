"""Builds ONNX folders of models with onnxruntime-genai's builder, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.models import cache
from ctxreuse.models.catalog import CATALOG
from ctxreuse.models.fetch import get
from ctxreuse.models.onnx import GENAI_FILE, PRECISIONS, PROVIDERS, built_folder
from ctxreuse.models.progress import bars

__all__ = ["build"]

_NEEDS = ("torch", "transformers", "onnxruntime", "onnxruntime_genai", "onnx_ir")
_LAYER = "Reading layer "


def build(
    model: str,
    precision: str = "int4",
    *,
    provider: str = "cpu",
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """The ONNX folder of a model, built first if it is not there yet.

    Args:
        model: a known name, fetched if need be, or a Hugging Face folder.
        precision: of the weights: int4, fp16 or fp32.
        provider: what is to compute it: cpu or cuda.
        out: the folder to build; None: `onnx` in the model's own folder, where engines look for it.
        progress: show a bar on standard error.

    Raises ConfigError (unknown name, packages missing, a folder with other things in it), EngineError (the builder
    failed: a model that it does not know, no disk space).
    """
    if precision not in PRECISIONS or provider not in PROVIDERS:
        raise ConfigError(
            f"there is no precision {precision!r} for {provider!r}",
            fix=f"Use one of {', '.join(PRECISIONS)}, and one of {', '.join(PROVIDERS)}",
        )
    source = cache.path(model) if model in CATALOG else cache.resolve(model)
    folder = built_folder(source, precision, provider) if out is None else Path(out).expanduser().absolute()
    if (folder / GENAI_FILE).is_file():
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("the folder has other things in it", where=str(folder), fix="Name another with --out")
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"building an ONNX folder needs {', '.join(missing)}",
            fix="Run once: pip install 'ctxreuse[onnx-build]' (running the folder needs ctxreuse[onnx] only)",
        )
    source = get(model, progress=progress) if model in CATALOG else source
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError as error:
        raise EngineError(f"the folder cannot be written: {error}", where=str(folder), fix="Use --out") from error
    try:
        with bars(progress, bytes_=False) as bar:
            _run(source, stage, precision, provider, bar("building", _layers(source)))
        # The builder writes the tokenizer anew; with the same bytes it is known as the same.
        for pattern in ("LICENSE*", "NOTICE*", "*TERMS*", "tokenizer.json"):
            for file in source.glob(pattern):
                shutil.copy(file, stage)
        stage.chmod(0o755)
        if not (folder / GENAI_FILE).is_file():  # another process may have been quicker
            os.replace(stage, folder)
    except OSError as error:
        raise EngineError(f"the ONNX folder could not be written: {error}", where=str(folder)) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def _run(source: Path, stage: Path, precision: str, provider: str, seen: Callable[[int], None]) -> None:
    # The builder appends to float16 K and V in place only where it builds for CUDA; such a graph runs on CPUs as well.
    target = "cuda" if precision == "fp16" else provider
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(stage)]
    command += ["-p", precision, "-e", target, "-c", str(stage / "cache")]
    command += ["--extra_options", "hf_token=false", "prune_lm_head=true"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        builder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            with builder:
                assert builder.stdout is not None
                for line in builder.stdout:
                    if line.startswith(_LAYER):
                        seen(int(line.removeprefix(_LAYER)) + 1)
        finally:
            builder.kill()  # if we were interrupted
        if builder.returncode or not (stage / GENAI_FILE).is_file():
            errors.seek(0)
            said = errors.read().strip().splitlines()[-1:]
            raise EngineError(
                f"onnxruntime-genai's builder failed: {' '.join(said) or 'no message'}",
                where=str(source),
                fix="It knows models of these classes: onnxruntime_genai.models.builders",
            )
    shutil.rmtree(stage / "cache", ignore_errors=True)


def _layers(source: Path) -> int:
    config = json.loads((source / "config.json").read_text("utf-8"))
    return int(config.get("num_hidden_layers") or 1)
