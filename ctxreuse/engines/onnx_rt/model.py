"""A decoder's graph in ONNX Runtime: what it is fed, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from ctxreuse.dtypes import BITS, ITEM_BYTES
from ctxreuse.engines.base import Logits
from ctxreuse.engines.onnx_rt.folder import DecoderFolder
from ctxreuse.engines.rows import Bits
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["OnnxModel"]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: Our names of ONNX's types, and ONNX's numbers for them.
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}
_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}
_INT64 = 7
#: Only what ends the process is written to standard error; the rest is raised.
_SILENT = 4


class OnnxModel:
    """One session; any thread may run it."""

    def __init__(self, folder: DecoderFolder, provider: str, threads: int) -> None:
        """Raises ConfigError (a provider that this build does not have), EngineError (a graph that does not load, or
        with inputs other than token ids, positions, and K and V)."""
        self.folder, self.device = folder, provider
        if _PROVIDERS[provider] not in ort.get_available_providers():
            raise ConfigError(
                f"this build of onnxruntime {ort.__version__} cannot use {provider}",
                fix="Run: pip uninstall onnxruntime && pip install 'ctxreuse[onnx-gpu]', or set engine.provider = cpu",
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _SILENT
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others need the cores between steps
        try:
            self.session = ort.InferenceSession(str(folder.graph), options, providers=[_PROVIDERS[provider]])
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise EngineError(f"onnxruntime does not load the graph: {error}", where=str(folder.graph)) from error
        given = {one.name: one for one in self.session.get_inputs()}
        made = {one.name: one for one in self.session.get_outputs()}
        layers = range(folder.decoder.num_hidden_layers)
        #: (layer, role) and its names as input and as output.
        self.names = {(layer, role): pair for layer in layers for role, pair in folder.names(layer).items()}
        self._check_names(set(given), set(made))
        self._positions = "position_ids" in given
        types = {given[past].type for past, _ in self.names.values()}
        if len(types) > 1 or not types <= _TYPES.keys():
            raise EngineError(
                f"K and V are kept as {sorted(types)}", where=str(folder.path), fix="Build without kv_cache"
            )
        self.dtype = _TYPES[types.pop()]
        self.number = _NUMBERS[self.dtype]
        #: Whether a pass takes several contexts.
        self.batches = provider == "cpu" and not isinstance(given["input_ids"].shape[0], int)
        self.heads = {at: int(given[past].shape[1]) for at, (past, _) in self.names.items()}
        self.dim = folder.decoder.head_size
        self._logits_type = _TYPES[made["logits"].type]
        _, rows, self.vocab_size = made["logits"].shape
        #: Whether the graph gives logits after the last token only.
        self.last_only = rows == 1
        self.version = ".".join(ort.__version__.split(".")[:2])

    def _check_names(self, given: set[str], made: set[str]) -> None:
        kept = {name for pair in self.names.values() for name in pair}
        missing = (kept | {"input_ids", "attention_mask", "logits"}) - given - made
        others = given - kept - {"input_ids", "attention_mask", "position_ids"}
        if missing or others:
            raise EngineError(
                f"contexts of this model cannot be kept: its graph has no {sorted(missing)[:3]}"
                if missing
                else f"contexts of this model cannot be kept: its graph also needs {sorted(others)[:3]}",
                where=str(self.folder.graph),
                fix="Models with recurrent or convolution layers, images or speech need engine = torch",
            )

    def slot_bytes(self, capacity: int) -> dict[tuple[int, str], int]:
        """Bytes of K and V of each layer for a context of ``capacity`` tokens."""
        size = ITEM_BYTES[self.dtype]
        return {at: heads * capacity * self.dim * size for at, heads in self.heads.items()}

    def run(self, binding: ort.IOBinding, ids: Tokens, starts: Sequence[int], wanted: int = 1) -> Logits:
        """Append ``ids`` [contexts, tokens] to contexts whose K and V are bound, from positions ``starts`` on.

        Returns the logits after the last ``wanted`` tokens of each, [contexts, wanted, vocab] (without that axis for 1;
        more than 1 only unless ``last_only``). Raises EngineError.
        """
        contexts, count = ids.shape
        ends = np.array(starts)[:, None] + count
        fed = {"input_ids": ids.astype(np.int64), "attention_mask": (np.arange(ends.max()) < ends).astype(np.int64)}
        if self._positions:
            fed["position_ids"] = ends - count + np.arange(count)
        for name, array in fed.items():
            binding.bind_input(name, "cpu", 0, _INT64, array.shape, array.ctypes.data)
        rows = 1 if self.last_only else count
        found = np.empty((contexts, rows, self.vocab_size), BITS[self._logits_type])
        binding.bind_output("logits", "cpu", 0, _NUMBERS[self._logits_type], found.shape, found.ctypes.data)
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"onnxruntime could not compute {count} tokens: {error}") from error
        last = found[:, -wanted:] if wanted > 1 else found[:, -1]
        return _floats(last, self._logits_type, copy=rows > 1)


def _floats(numbers: Bits, dtype: str, *, copy: bool) -> Logits:
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(dtype).astype(np.float32, copy=copy)
