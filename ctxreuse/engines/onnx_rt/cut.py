"""A decoder's graph cut at layers: graphs that take the hidden states behind some layers, and give those behind more.

Graphs of onnxruntime-genai's builder name their nodes by layer. The first norm of a layer adds what the layer before it
computed to the hidden state, and gives the sum beside the normalised one: there they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxreuse.engines.onnx_rt.folder import DecoderFolder
from ctxreuse.errors import EngineError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["GraphCut", "cut_graph"]

#: What parts with layers are fed besides, where the graph takes it.
_FED = ("attention_mask", "position_ids")
#: Norms that add first.
_NORMS = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")


class GraphCut(NamedTuple):
    """Some layers of a graph, or what gives logits of the last hidden states.

    Attributes:
        graph: an ONNX model, whose weights are where those of the whole are.
        layers: their numbers; none: the head.
        given, made: names of what goes from one to the next.
        nbytes: of the weights of each layer, or of the head.
    """

    graph: bytes
    layers: range
    given: tuple[str, ...]
    made: tuple[str, ...]
    nbytes: tuple[int, ...]


def cut_graph(folder: DecoderFolder, depths: Sequence[int]) -> list[GraphCut]:
    """Cut a graph before layers ``depths``, ascending, and behind the last one.

    Raises EngineError, with the reason, where it cannot be cut.
    """
    try:
        import onnx
        from onnx.utils import Extractor
    except ImportError:
        raise EngineError("cutting its graph needs the package onnx", fix="Run once: pip install onnx") from None
    count = folder.decoder.num_hidden_layers
    try:
        model = onnx.load(str(folder.graph), load_external_data=False)
        _check_windows(model, folder)
        ends = [*(_hidden(model, folder, depth) for depth in depths), _last(model, folder, count)]
        given: list[tuple[str, ...]] = [("input_ids",), *ends]
        made: list[tuple[str, ...]] = [*ends, ("logits",)]
        stops = [0, *depths, count, count]
        extractor, fed = Extractor(model), [one.name for one in model.graph.input if one.name in _FED]
        sizes = _layer_bytes(model, count)
        found = []
        for (start, stop), takes, gives in zip(pairwise(stops), given, made):
            layers = range(start, stop)
            pairs = [pair for layer in layers for pair in folder.names(layer).values()]
            inputs = [*takes, *(fed if layers else ()), *(past for past, _ in pairs)]
            part = extractor.extract_model(inputs, [*gives, *(present for _, present in pairs)])
            nbytes = tuple(sizes[start:stop]) if layers else (_weight_bytes(part, part.graph.node),)
            found.append(GraphCut(part.SerializeToString(), layers, takes, gives, nbytes))
    except EngineError:
        raise
    except Exception as error:  # onnx, protobuf, files: none has a base of its own
        raise EngineError(f"its graph cannot be cut: {error}", where=str(folder.graph)) from error
    return found


def _check_windows(model: ModelProto, folder: DecoderFolder) -> None:
    if any(one.name == "local_window_size" and one.i > 0 for node in model.graph.node for one in node.attribute):
        raise EngineError("it has sliding windows, of which no exits are known to be right", where=str(folder.path))


def _hidden(model: ModelProto, folder: DecoderFolder, depth: int) -> tuple[str, ...]:
    """What a layer begins with: its normalised input, and the hidden state itself."""
    node = _norm(model, folder, f"/model/layers.{depth}/input_layernorm/")
    if len(node.output) != 4 or not node.output[3]:
        raise EngineError(f"{node.name} gives no hidden state, so its graph cannot be cut", where=str(folder.graph))
    return node.output[0], node.output[3]


def _last(model: ModelProto, folder: DecoderFolder, count: int) -> tuple[str, ...]:
    return (_norm(model, folder, f"/model/layers.{count}/final_norm_layernorm/").output[0],)


def _norm(model: ModelProto, folder: DecoderFolder, name: str) -> NodeProto:
    for node in model.graph.node:
        if node.name.startswith(name) and node.op_type in _NORMS:
            found: NodeProto = node
            return found
    raise EngineError(f"its graph has no {name}SkipLayerNorm, where it would be cut", where=str(folder.graph))


def _layer_bytes(model: ModelProto, count: int) -> list[int]:
    """Bytes of the weights of each layer."""
    nodes: list[list[Any]] = [[] for _ in range(count)]
    for node in model.graph.node:
        first, _, rest = node.name.removeprefix("/model/layers.").partition("/")
        if rest and first.isdecimal() and int(first) < count:
            nodes[int(first)].append(node)
    return [_weight_bytes(model, layer) for layer in nodes]


def _weight_bytes(model: ModelProto, nodes: Sequence[NodeProto]) -> int:
    """Bytes of what matrix products among nodes read."""
    read = {name for node in nodes if node.op_type.startswith("MatMul") for name in node.input}
    return sum(_nbytes(one) for one in model.graph.initializer if one.name in read)


def _nbytes(tensor: Any) -> int:
    for entry in tensor.external_data:
        if entry.key == "length":
            return int(entry.value)
    return len(tensor.SerializeToString())
