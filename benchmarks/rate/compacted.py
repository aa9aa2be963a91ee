"""Attention Matching (arXiv 2602.16284): fewer rows of K and V, fitted so that what is asked of them is answered alike.

Each head of K keeps the rows that reference queries look at most (mean square of their weights). Each kept row gets a
bias on its score, by non-negative least squares, so that the kept rows' shares of the softmax add up as all rows' did;
then V of the kept rows is solved for by least squares. Reference queries are the model's own while it repeats the text
behind it (the paper's "repeat-prefill"). All heads keep as many rows, where the paper gives some more than others.

With one of our levels the rows that are kept are coded by it: all heads of a layer then keep the same tokens, as the
coder's transform is over all of them, and biases and V are fitted to the keys that come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache

from ctxreuse import kernels
from ctxreuse.codec import Codec
from ctxreuse.codec.planes import plane_coder, raw_type
from ctxreuse.codec.profile import SINKS
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.attention import install
from ctxreuse.engines.torch_hf.fidelity import Scores
from ctxreuse.identity.keys import Tokens
from ctxreuse.rope import Rotary

__all__ = ["ASK", "COMPACTIONS", "Compaction", "Compactor"]

ASK = "\n\nRepeat the text above word for word:\n\n"
_NAME = "benchmark_compacted"
#: Of the reference queries, one in so many is fitted to; steps of the fit, and how far V is held to what it was.
_QUERIES, _STEPS, _RIDGE = 2, 300, 1e-4
#: Bits of a bias, and of the place of a row that is kept.
_BIAS, _PLACE = 16, 10


class Compaction(NamedTuple):
    """What share of the rows is kept, and the level that codes them; "": floats of 16 bits."""

    share: float
    level: str = ""

    @property
    def family(self) -> str:
        """Its name, equal for all settings."""
        return "Attention Matching" + (" at our levels" if self.level else "")

    @property
    def setting(self) -> str:
        """What tells it from the others of its family."""
        return f"{self.share:.0%} of the rows" + (f", {self.level}" if self.level else "")


COMPACTIONS = (
    *(Compaction(share) for share in (0.75, 0.5, 0.25)),
    Compaction(0.5, "kl-0.01"), Compaction(0.5, "kl-0.05"), Compaction(0.25, "kl-0.01"), Compaction(0.25, "kl-0.05"),
)  # fmt: skip


class Compactor:
    """The K and V of a text's first ``coded`` tokens, and the queries that ask for them; for models that keep all
    tokens in all layers. ``tokens``: int32, the last one only as what follows; ``ask``: tokens that ask to repeat a
    text, see `ASK`. Not thread-safe."""

    def __init__(
        self, engine: TorchEngine, rotaries: dict[int, Rotary], tokens: Tokens, coded: int, ask: Tokens
    ) -> None:
        self._model, self._rotaries, self._coded, self._next = engine.model, rotaries, coded, tokens[coded:]
        self._seen: dict[int, torch.Tensor] | None = None
        self._bias: dict[int, torch.Tensor] = {}
        with torch.inference_mode(), self._attention():
            cache = DynamicCache()
            self._forward(tokens[:coded], 0, cache)
            self._planes = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
            self._exact = self._scores(self._planes)
            self._seen = {}
            self._forward(np.concatenate([ask, tokens[:coded]]), coded, cache)
            self._queries, self._seen = self._seen, None

    def measure(self, compaction: Compaction, codec: Codec) -> tuple[Fidelity, float]:
        """How far the next tokens move with the rows that are kept, and the bits of these."""
        rows, level, bits = int(compaction.share * self._coded), compaction.level, 0.0
        planes, biases = [], {}
        with torch.inference_mode(), self._attention():
            for layer, (keys, values) in enumerate(self._planes):
                kept = self._kept(layer, rows, together=bool(level))
                k = torch.stack([head[own] for head, own in zip(keys, kept)])
                if level:
                    k, used = self._coded_rows(codec, level, layer, "k", k, kept[0])
                    bits += used
                fits = [self._fitted(layer, head, own, k[head]) for head, own in enumerate(kept)]
                biases[layer], v = (torch.stack(part) for part in zip(*fits))
                if level:
                    v, used = self._coded_rows(codec, level, layer, "v", v, kept[0])
                    bits += used
                else:
                    bits += 16.0 * (k.numel() + v.numel())
                bits += _BIAS * biases[layer].numel() + _PLACE * rows * (1 if level else len(values))
                planes.append((k, v))
            self._bias = biases
            scores = self._scores(planes)
            self._bias = {}
        return scores.against(self._exact), bits

    def _asked(self, layer: int, head: int) -> torch.Tensor:
        """The reference queries of one head of K, [queries, dim]."""
        each = len(self._queries[layer]) // len(self._planes[layer][0])
        return self._queries[layer][head * each : (head + 1) * each].flatten(0, 1)[::_QUERIES]

    def _kept(self, layer: int, rows: int, *, together: bool) -> list[torch.Tensor]:
        """Which rows each head keeps; ``together``: all the same."""
        keys = self._planes[layer][0]
        looked = [_scores(self._asked(layer, head), k).softmax(-1).square().mean(0) for head, k in enumerate(keys)]
        if together:
            looked = [torch.stack(looked).sum(0)] * len(keys)
        return [one.topk(rows).indices.sort().values for one in looked]

    def _fitted(self, layer: int, head: int, kept: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Biases of the rows that one head keeps, and their V. ``k``: what is left of their keys."""
        keys, values = self._planes[layer][0][head], self._planes[layer][1][head]
        asked, rows = self._asked(layer, head), len(kept)
        whole = _scores(asked, keys)
        total = whole.logsumexp(-1, keepdim=True)
        mass = (_scores(asked, k) - total).exp()
        # Multiplicative steps keep factors above 0 (Lee and Seung 2000).
        square, wanted = mass.T @ mass, mass.sum(0)
        factors = torch.full((rows,), 1 / float(mass.sum(1).mean()))
        for _ in range(_STEPS):
            factors *= wanted / (square @ factors).clamp_min(1e-30)
        factors.clamp_(1e-6, 1e6)
        shares = mass * factors
        shares /= shares.sum(1, keepdim=True)
        ridge = _RIDGE * shares.square().sum() / rows * torch.eye(rows)
        target = shares.T @ ((whole - total).exp() @ values) + ridge @ values[kept]
        return factors.log().half().float(), torch.linalg.solve(shares.T @ shares + ridge, target)

    def _coded_rows(
        self, codec: Codec, level: str, layer: int, role: str, rows: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """What comes back of [heads, rows, dim] of tokens at places ``kept``, and the bits of their code."""
        profile = codec.profile
        assert profile is not None
        coder = plane_coder(profile, profile.number(level), layer, role, kernels.RansTables(profile.tables))
        turn = self._rotaries[layer] if role == "k" else Rotary("none")
        places = kept.numpy()
        flat = np.ascontiguousarray(turn.rotate(rows.numpy(), places, undo=True)).view(np.uint32)
        count, dim = flat.shape[1:]
        cells = [min(64, count - at) for at in range(0, count, 64)]
        # The places are not consecutive, so they are turned here and not by the coder.
        still = np.ones((count, dim // 2), np.float32), np.zeros((count, dim // 2), np.float32)
        angles = [] if coder.ropes[0] is None else [still]
        planes = kernels.KltPlanes.of([coder.native], np.array([[0, count * dim, dim, 1, len(angles) - 1]], np.int64))
        raw = raw_type("float32")
        data, spans = planes.encode(flat, "float32", cells, raw_first=SINKS, raw_dtype=raw, angles=angles)
        back = np.zeros_like(flat)
        sources = [(n, data, span, None, None, None, None) for n, span in zip(cells, spans, strict=True)]
        planes.decode(back, "float32", sources, raw, angles=angles)
        turned = turn.rotate(np.ascontiguousarray(back.view(np.float32)), places)
        return torch.from_numpy(np.ascontiguousarray(turned)), 8.0 * len(data)

    def _scores(self, planes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Scores:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(planes):
            cache.update(keys[None].clone(), values[None].clone(), layer)
        logits = self._forward(self._next[:-1], self._coded, cache)
        return Scores(logits, torch.from_numpy(self._next[1:].astype(np.int64)))

    def _forward(self, ids: Tokens, start: int, cache: DynamicCache) -> torch.Tensor:
        given = torch.from_numpy(ids.astype(np.int64))[None]
        positions = torch.arange(start, start + len(ids))[None]
        logits: torch.Tensor = self._model(
            input_ids=given, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[0]
        return logits

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Let the model attend as `_attend` does."""
        before = self._model.config._attn_implementation
        AttentionInterface.register(_NAME, self._attend)
        install(self._model, _NAME)
        try:
            yield
        finally:
            install(self._model, before)

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of q [1, H, S, D] on k, v [1, Hkv, N, D], of which the first have biases, as a text is read."""
        each, count, rows = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        if self._seen is not None:
            self._seen[module.layer_idx] = query[0]
        k, v = key[0].repeat_interleave(each, 0), value[0].repeat_interleave(each, 0)
        scores = _scores(query[0], k)
        if (bias := self._bias.get(module.layer_idx)) is not None:
            scores[:, :, : bias.shape[1]] += bias.repeat_interleave(each, 0)[:, None]
        ahead = torch.ones(count, rows, dtype=torch.bool).triu(rows - count + 1)
        shares = scores.masked_fill_(ahead, float("-inf")).softmax(-1)
        return (shares @ v).transpose(0, 1)[None].contiguous(), None


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5
