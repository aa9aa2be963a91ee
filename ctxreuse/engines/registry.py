"""Opens engines: by model name or folder, or by the user's settings; each engine's package is imported when needed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse import models
from ctxreuse.config import EngineConfig, load
from ctxreuse.engines.base import Engine
from ctxreuse.engines.text import HFText
from ctxreuse.errors import ConfigError

if TYPE_CHECKING:
    from ctxreuse.engines.calibration import CalibrationModel
    from ctxreuse.engines.text import TextModel

__all__ = ["choose_engine", "open_draft_engine", "open_engine", "open_for_calibration", "read_text"]

#: What each engine needs beyond the core, the fastest first, and the extra that brings it.
_NEEDS = {
    "llama_cpp": ("llamacpp", ("xllamacpp", "jinja2")),
    "onnxruntime": ("onnx", ("onnxruntime", "tokenizers", "jinja2")),
    "torch": ("torch", ("torch", "transformers", "tokenizers", "safetensors", "gguf")),
}


def choose_engine(model: str, engine: str = "auto", *, library: str = "", typed: bool = False) -> str:
    """The engine that runs ``model``: the one asked for, or the fastest of those installed that can.

    A GGUF file is run by llama_cpp, an ONNX folder by onnxruntime, a Hugging Face folder by torch, a known name by any,
    onnxruntime if it was built for it.

    Args:
        model: a known name, a folder or a file.
        engine: an engine's name, or auto.
        library: the user's own library for llama_cpp, in place of the package's.
        typed: weights and KV of a chosen numeric type or on a device are asked for, which torch alone has.

    Raises ConfigError for an engine that there is not or that is not installed.
    """
    if engine not in ("auto", *_NEEDS):
        raise ConfigError(f"no such engine: {engine!r}", fix=f"Use auto, {' or '.join(_NEEDS)}")
    if engine != "auto":
        fitting = [engine]
    elif model in models.CATALOG:
        fitting = ["torch"] if typed else [name for name in _NEEDS if name != "onnxruntime" or models.built_of(model)]
    elif model.lower().endswith(".gguf"):
        fitting = ["llama_cpp"]
    else:
        fitting = ["onnxruntime" if (Path(model).expanduser() / models.GENAI_FILE).is_file() else "torch"]
    needs = []
    for name in fitting:
        missing = [one for one in _NEEDS[name][1] if find_spec(one) is None and not (library and one == "xllamacpp")]
        if not missing:
            return name
        needs.append(f"the engine {name} needs {', '.join(missing)}")
    extras = [f"pip install 'ctxreuse[{_NEEDS[name][0]}]'" for name in fitting]
    raise ConfigError(" and ".join(needs), where=model, fix="Run: " + ", or ".join(extras))


def open_engine(
    model: str | os.PathLike[str] | EngineConfig | None = None,
    *,
    reserve: int = 0,
    block_tokens: int = 64,
    isolate: bool = False,
    **settings: Any,
) -> Engine:
    """Open an engine; a known model that is not on this machine yet is downloaded.

    Args:
        model: a known name (``smollm2``), a Hugging Face or ONNX folder, a GGUF file, or the section ``engine``
            of some settings; None: that of the user's own settings (``ctxreuse config show``).
        reserve: tokens of KV memory that are allocated and touched at once.
        block_tokens: tokens a block.
        isolate: in a process of its own, see `ctxreuse.engines.process.ChildEngine`; its crash is not this process's.
        settings: fields of `EngineConfig` that replace those of ``model``, such as ``engine`` or ``threads``; for
            torch, options of `TorchEngine.open` as well. A known name with ``dtype`` or such an option is for torch.

    Raises ConfigError for an unknown name, a folder without a model, or a missing extra, as `choose_engine`.
    """
    if model is None:
        model = load().settings.engine
    config = model if isinstance(model, EngineConfig) else EngineConfig(os.fspath(model))
    if isolate:
        from ctxreuse.engines.process import open_child_engine

        return open_child_engine(config, reserve=reserve, block_tokens=block_tokens, **settings)
    known = {name: settings.pop(name) for name in config.__struct_fields__ if name in settings}
    config = msgspec.structs.replace(config, **known)
    usual = EngineConfig()
    typed = "dtype" in known or (config.dtype, config.device) != (usual.dtype, usual.device) or bool(settings)
    engine = choose_engine(config.model, config.engine, library=config.library, typed=typed)
    if engine != "torch" and settings:
        raise ConfigError(f"the engine {engine} has no settings {', '.join(settings)}", where=config.model)
    if engine == "llama_cpp":
        from ctxreuse.engines.llama_cpp.engine import LlamaEngine

        if config.model in models.CATALOG:
            config = msgspec.structs.replace(config, model=str(models.get_gguf(config.model)))
        return LlamaEngine(config, reserve=reserve, block_tokens=block_tokens)
    if engine == "onnxruntime":
        from ctxreuse.engines.onnx_rt.engine import OnnxEngine

        config = msgspec.structs.replace(config, model=str(models.find_built(config.model, config.provider)))
        return OnnxEngine(config, reserve=reserve, block_tokens=block_tokens)
    from ctxreuse.engines.torch_hf.engine import TorchEngine

    return TorchEngine.open(config, reserve=reserve, block_tokens=block_tokens, **settings)


def open_draft_engine(name: str, config: EngineConfig, *, isolate: bool = False) -> Engine | None:
    """Open the draft model ``name`` beside an engine of ``config``; "": none. Raises what `open_engine` raises, and
    ConfigError where answers are not drafted."""
    if not name:
        return None
    if config.speculate == "off":
        raise ConfigError(
            "a draft model drafts nothing while speculate is off",
            where=name,
            fix='Set speculate to "auto", or leave draft_model empty',
        )
    own = EngineConfig(name, library=config.library, threads=config.threads, chunk=config.chunk)
    return open_engine(own, isolate=isolate)


def read_text(place: Path) -> HFText | None:
    """The text model of a Hugging Face folder or a GGUF file, without an engine; None if it has none.

    Raises CtxReuseError if it cannot be read.
    """
    if place.is_file():
        from ctxreuse.engines.llama_cpp.text import read_text

        return read_text(place)
    return HFText.open(place)


def open_for_calibration(model: str | os.PathLike[str], *, threads: int = 0) -> tuple[CalibrationModel, TextModel]:
    """Open a known model or a Hugging Face folder for calibration, in float32, with its tokenizer.

    Raises ConfigError as `open_engine` does, and for a folder without a tokenizer.
    """
    engine = open_engine(model, threads=threads, engine="torch")
    if engine.text is None:
        raise ConfigError("the folder has no tokenizer.json, so no text can be read", where=str(model), fix="Add it")
    from ctxreuse.engines.torch_hf.engine import TorchEngine
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    assert isinstance(engine, TorchEngine)
    return TorchCalibrationModel(engine), engine.text
