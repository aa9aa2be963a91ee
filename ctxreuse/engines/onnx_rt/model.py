"""A decoder's graph in ONNX Runtime: what it is fed, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ctxreuse.dtypes import BITS, ITEM_BYTES
from ctxreuse.engines.base import Logits
from ctxreuse.engines.onnx_rt.cut import GraphCut, cut_graph
from ctxreuse.engines.onnx_rt.folder import DecoderFolder
from ctxreuse.engines.rows import Bits
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["GraphPart", "OnnxModel", "floats"]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: Our names of ONNX's types, and ONNX's numbers for them.
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}
_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}
_INT64 = 7
#: Only what ends the process is written to standard error; the rest is raised.
_SILENT = 4
#: Where the weights of a graph are that is given as bytes.
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

#: Binds K and V of a part's layers.
Binder: TypeAlias = "Callable[[GraphPart], ort.IOBinding]"


class GraphPart:
    """A session of a whole graph, of some of its layers, or of the head behind them; any thread may run it."""

    def __init__(
        self, session: Any, layers: range, given: Sequence[str] = ("input_ids",), made: Sequence[str] = ("logits",)
    ) -> None:
        """``given``, ``made``: what it takes and gives besides K, V, and what is fed by position; each must be of one
        type and width, else EngineError."""
        self.session, self.layers, self._given, self._made = session, layers, given, made
        inputs = {one.name: one for one in session.get_inputs()}
        outputs = {one.name: one for one in session.get_outputs()}
        self._fed = inputs.keys()
        self._takes = _INT64 if "input_ids" in given else _NUMBERS[_TYPES[inputs[given[0]].type]]
        kinds = {(outputs[name].type, outputs[name].shape[-1]) for name in made}
        kind, width = kinds.pop()
        if kinds or kind not in _TYPES or not isinstance(width, int):
            raise EngineError(f"a graph gives {kind} numbers of width {width} as {made[0]}, and others")
        #: The type of what it gives, and how wide that is.
        self.dtype, self.width = _TYPES[kind], width

    def run(
        self,
        binding: ort.IOBinding,
        given: npt.NDArray[Any],
        fed: Mapping[str, npt.NDArray[Any]],
        rows: int = 0,
    ) -> Bits:
        """Run it on ``given`` [given, contexts, tokens, …], contiguous, with K and V bound. Raises EngineError.

        Returns what it makes as bits, [made, contexts, tokens, width], or of that many ``rows`` in place of tokens.
        """
        for name, array in (*zip(self._given, given), *((name, fed[name]) for name in fed if name in self._fed)):
            kind = _INT64 if name in fed else self._takes
            binding.bind_input(name, "cpu", 0, kind, array.shape, array.ctypes.data)
        contexts, count = given.shape[1:3]
        found: Bits = np.empty((len(self._made), contexts, rows or count, self.width), BITS[self.dtype])
        for name, array in zip(self._made, found):
            binding.bind_output(name, "cpu", 0, _NUMBERS[self.dtype], array.shape, array.ctypes.data)
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"onnxruntime could not compute {count} tokens: {error}") from error
        return found


class OnnxModel:
    """One session, or after `split` one of each part; any thread may run it."""

    def __init__(self, folder: DecoderFolder, provider: str, threads: int) -> None:
        """Raises ConfigError (a provider that this build does not have), EngineError (a graph that does not load, or
        with inputs other than token ids, positions, and K and V)."""
        self.folder, self.device = folder, provider
        if _PROVIDERS[provider] not in ort.get_available_providers():
            raise ConfigError(
                f"this build of onnxruntime {ort.__version__} cannot use {provider}",
                fix="Run: pip uninstall onnxruntime && pip install 'ctxreuse[onnx-gpu]', or set engine.provider = cpu",
            )
        self._options = _PROVIDERS[provider], threads
        session = self._open(str(folder.graph))
        given = {one.name: one for one in session.get_inputs()}
        made = {one.name: one for one in session.get_outputs()}
        layers = range(folder.decoder.num_hidden_layers)
        #: (layer, role) and its names as input and as output.
        self.names = {(layer, role): pair for layer in layers for role, pair in folder.names(layer).items()}
        self._check_names(set(given), set(made))
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
        _, rows, self.vocab_size = made["logits"].shape
        #: Whether the graph gives logits after the last token only.
        self.last_only = rows == 1
        #: What runs one after the other; the last gives logits.
        self.parts: tuple[GraphPart, ...] = (GraphPart(session, layers),)
        self._cuts: list[GraphCut] = []
        self.version = ".".join(ort.__version__.split(".")[:2])

    def _open(self, graph: str | bytes) -> Any:
        provider, threads = self._options
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _SILENT
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others need the cores between steps
        if isinstance(graph, bytes):
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(self.folder.path))
        try:
            return ort.InferenceSession(graph, options, providers=[provider])
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise EngineError(f"onnxruntime does not load the graph: {error}", where=str(self.folder.graph)) from error

    def split(self, depths: Sequence[int]) -> list[GraphCut]:
        """Run the graph in parts from now on, which end before these layers, ascending, and behind the last one.

        They take the place of the whole: no weights are in memory twice but while they are opened. Returns what they
        were made of. Raises EngineError, with the reason, for a graph that cannot be cut; nothing is changed then.
        """
        if [part.layers.stop for part in self.parts[:-2]] != [*depths] or not self._cuts:
            cuts = cut_graph(self.folder, depths)
            self.parts = tuple(GraphPart(self._open(one.graph), one.layers, one.given, one.made) for one in cuts)
            self._cuts, self.last_only = cuts, False
        return self._cuts

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

    def names_of(self, part: GraphPart) -> list[tuple[tuple[int, str], tuple[str, str]]]:
        """As ``names``, of the layers of a part."""
        return [(at, pair) for at, pair in self.names.items() if at[0] in part.layers]

    def slot_bytes(self, capacity: int) -> dict[tuple[int, str], int]:
        """Bytes of K and V of each layer for a context of ``capacity`` tokens."""
        size = ITEM_BYTES[self.dtype]
        return {at: heads * capacity * self.dim * size for at, heads in self.heads.items()}

    def run(
        self,
        bind: Binder,
        ids: Tokens,
        starts: Sequence[int],
        wanted: int = 1,
        parts: Sequence[GraphPart] = (),
    ) -> Logits:
        """Append ``ids`` [contexts, tokens] to contexts whose K and V ``bind`` binds, from positions ``starts`` on.

        Returns the logits after the last ``wanted`` tokens of each, [contexts, wanted, vocab] (without that axis for 1;
        more than 1 only unless ``last_only``). ``parts``: those of another split. Raises EngineError.
        """
        parts, given = parts or self.parts, ids.astype(np.int64)[None]
        if len(parts) > 1:
            hidden = self._advance(parts, bind, given, starts)
            logits = self.logits(hidden[0, :, -wanted:].reshape(-1, hidden.shape[-1]))
            return logits.reshape(len(ids), wanted, -1) if wanted > 1 else logits
        rows = 1 if self.last_only else ids.shape[1]
        found = parts[0].run(bind(parts[0]), given, _by_position(given, starts), rows)[0]
        return floats(found[:, -wanted:] if wanted > 1 else found[:, -1], parts[0].dtype, copy=rows > 1)

    def advance(
        self,
        bind: Binder,
        given: npt.NDArray[Any],
        starts: Sequence[int],
        at: int,
        stop: int,
    ) -> Bits:
        """Run layers ``at`` to ``stop`` of a graph that is split there, on ids int64 [1, contexts, tokens] or what the
        layers before made. Returns what they make, [made, contexts, tokens, width]: behind the last layer what the head
        takes, else the hidden state as the last of several. Raises EngineError."""
        parts = [part for part in self.parts if at <= part.layers.start and part.layers.stop <= stop]
        return self._advance(parts, bind, given, starts)

    def _advance(
        self,
        parts: Sequence[GraphPart],
        bind: Binder,
        given: npt.NDArray[Any],
        starts: Sequence[int],
    ) -> Bits:
        fed = _by_position(given, starts)
        for part in parts:
            if part.layers:
                given = part.run(bind(part), given, fed)
        return given

    def logits(self, hidden: Bits) -> Logits:
        """Logits [n, vocab] of what `advance` made behind the last layer, [n, width]; the graph is split."""
        head = self.parts[-1]
        rows = np.ascontiguousarray(hidden)[None, :, None]  # each a context of one token, of which it gives logits
        return floats(head.run(head.session.io_binding(), rows, {})[0, :, 0], head.dtype, copy=False)


def _by_position(given: npt.NDArray[Any], starts: Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
    """What a graph is fed besides, of tokens [_, contexts, tokens, …] from positions ``starts`` on."""
    count = given.shape[2]
    ends = np.array(starts)[:, None] + count
    return {
        "attention_mask": (np.arange(ends.max()) < ends).astype(np.int64),
        "position_ids": ends - count + np.arange(count),
    }


def floats(numbers: Bits, dtype: str, *, copy: bool) -> Logits:
    """Return bits of a type as float32."""
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(dtype).astype(np.float32, copy=copy)
