"""A decoder's folder as onnxruntime-genai's builder makes it: graph, weights, tokenizer, ``genai_config.json``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ctxreuse import models
from ctxreuse.errors import ConfigError, EngineError, FormatError

__all__ = ["DecoderFolder"]

_CONFIG_LIMIT = 1 << 20
#: The graph, and the files beside it that may hold its weights.
_WEIGHTS = ("*.onnx", "*.onnx_data*", "*.data", "*.bin", "*.pb")
#: A table of angles that longer contexts are rotated by; K that was rotated by the other one is wrong then.
_SECOND_ANGLES = b"cos_cache_large"
_BUILD = "Build one: ctxreuse model build NAME --engine onnxruntime"


class _Window(msgspec.Struct, frozen=True):
    slide_key_value_cache: bool = False


class _Decoder(msgspec.Struct, frozen=True):
    filename: str
    head_size: int
    num_hidden_layers: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    sliding_window: _Window | None = None


class _Model(msgspec.Struct, frozen=True):
    type: str
    context_length: int
    decoder: _Decoder
    eos_token_id: int | list[int] = []


class _Search(msgspec.Struct, frozen=True):
    past_present_share_buffer: bool = False


class _Config(msgspec.Struct, frozen=True):
    model: _Model
    search: _Search = _Search()


class DecoderFolder:
    """What the engine needs to know of a folder before its graph is opened."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError (no such folder), FormatError (a broken file), EngineError (a model that cannot be kept
        as blocks)."""
        self.path = path
        file = path / models.GENAI_FILE
        if not file.is_file():
            raise ConfigError(f"no {models.GENAI_FILE} in the folder", where=str(path), fix=_BUILD)
        try:
            with open(file, "rb") as opened:
                config = msgspec.json.decode(opened.read(_CONFIG_LIMIT), type=_Config)
            config.model.decoder.inputs["past_key_names"] % 0
            config.model.decoder.outputs["present_key_names"] % 0
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the configuration of the model cannot be read: {error}", where=str(file)) from None
        self.model, self.decoder = config.model, config.model.decoder
        self.graph = path / self.decoder.filename
        if self.graph.parent != path or not self.graph.is_file():
            raise FormatError(f"the graph {self.decoder.filename!r} is not in the folder", where=str(path))
        self._check_kind(config)

    def _check_kind(self, config: _Config) -> None:
        reason = ""
        if not config.search.past_present_share_buffer:
            reason = "its attention cannot append to K and V in place"
        elif self.decoder.sliding_window is not None and self.decoder.sliding_window.slide_key_value_cache:
            reason = "its sliding windows forget K and V"
        elif _SECOND_ANGLES in self.graph.read_bytes():
            reason = "it rotates K anew once a context is long"
        if reason:
            raise EngineError(f"contexts of this model cannot be kept: {reason}", where=str(self.path), fix=_BUILD)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ids = self.model.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [ids])

    def names(self, layer: int) -> dict[str, tuple[str, str]]:
        """The graph's input and output for ``k`` and for ``v`` of a layer."""
        given, made = self.decoder.inputs, self.decoder.outputs
        return {
            role: (given[f"past_{name}_names"] % layer, made[f"present_{name}_names"] % layer)
            for role, name in (("k", "key"), ("v", "value"))
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the graph and its weights."""
        return models.weights_digest(self.path, _WEIGHTS)
