"""Decoder layers of few rows in two calls of a kernel and one of attention, where transformers makes some forty.

A decode step of a small model is as much calls as it is computing: of 38 ms of SmolLM2 in bfloat16 on two cores, linear
layers and attention were 22, which is what a step takes now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch

from ctxreuse.engines.torch_hf.attention import NAME, attend
from ctxreuse.engines.torch_hf.bits import numbers
from ctxreuse.engines.torch_hf.linears import FewRows, most_rows, uses_kernels
from ctxreuse.engines.torch_hf.modes import setting
from ctxreuse.kernels.decoder import DecoderLayer, Norms

__all__ = ["checking_layers", "install_layers"]

#: Layers of transformers that are what the kernel computes. Others look the same and are not: some scale queries from a
#: position on that no check would try.
_KNOWN: Final = frozenset(f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"))
#: Share of what a layer adds that may differ from what its own code adds.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_checking: ContextVar[bool] = ContextVar("ctxreuse_checking_layers", default=False)


def install_layers(model: torch.nn.Module) -> None:
    """Let layers of kinds that the kernel computes use it for few rows, once `checking_layers` found that they may."""
    for module in list(model.modules()):
        kind = type(module)
        if kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.models."):
            module.__class__ = type(kind.__name__, (_FewRowsLayer, kind), {})


def checking_layers() -> AbstractContextManager[None]:
    """Inside, a forward over a few tokens and an empty cache finds out which layers the kernel computes right."""
    return setting(_checking, True)


class _Made(NamedTuple):
    """A layer as the kernel has it, and where the weights of its parts were then."""

    layer: DecoderLayer
    parts: list[FewRows]
    at: tuple[int, ...]
    heads: int
    kv_heads: int


class _FewRowsLayer(torch.nn.Module):  # type: ignore[misc]
    """A layer that was a plain one; it has the same modules."""

    _fits = False
    _made: _Made | None = None
    #: All modules inside: where each is kept, its name, itself.
    _inner: Sequence[tuple[dict[str, Any], str, torch.nn.Module]] = ()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rows = hidden_states.shape[1]
        if _checking.get():
            return self._check(hidden_states, kwargs)
        if self._fits and self._uses(hidden_states) and rows <= most_rows(self.mlp.down_proj) and self._is_whole():
            return self._run(hidden_states, **kwargs)
        return super().forward(hidden_states, **kwargs)

    def _uses(self, hidden: torch.Tensor) -> bool:
        return hidden.is_cpu and len(hidden) == 1 and not self.training and uses_kernels(hidden.dtype)

    def _is_whole(self) -> bool:
        """True if its modules are those that were checked, and no hook wants to see what goes through them."""
        for owner, name, part in self._inner:
            if owner[name] is not part or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
                return False
        return True

    def _check(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = super().forward(hidden, **kwargs)
        limit, self._fits = _TOLERANCE.get(hidden.dtype), False
        if limit is not None and hidden.is_cpu and self.self_attn.config._attn_implementation == NAME:
            try:
                got = self._run(hidden, **kwargs | {"past_key_values": None}).float()
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                return found  # its parts are others than their names say
            plain = found.float()
            # What rounding the sum of a residual and a step makes of the step is no fault of the step's.
            slack = plain.abs() * torch.finfo(hidden.dtype).eps
            wrong = ((got - plain).abs() - slack).clamp_min(0).norm()
            self._fits = bool(wrong <= limit * (plain - hidden.float()).norm())
            self._inner = [
                (owner._modules, name, part) for owner in self.modules() for name, part in owner.named_children()
            ]
        return found

    def _run(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention, rows, threads = self.self_attn, hidden_states.shape[1], torch.get_num_threads()
        layer, _, _, heads, kv_heads = self._layer()
        dim, dtype = attention.head_dim, hidden_states.dtype
        x = numbers(hidden_states.contiguous())
        cos, sin = (numbers(one.to(dtype).contiguous()) for one in position_embeddings)
        qkv = hidden_states.new_empty((heads + 2 * kv_heads) * rows * dim)
        layer.enter(x, cos, sin, numbers(qkv), rows, threads)
        own, shared = heads * dim, kv_heads * dim
        q = qkv.as_strided((1, heads, rows, dim), (own * rows, dim, own, 1))
        k = qkv.as_strided((1, kv_heads, rows, dim), (shared * rows, dim, shared, 1), own * rows)
        v = qkv.as_strided((1, kv_heads, rows, dim), (shared * rows, dim, shared, 1), (own + shared) * rows)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, attention.layer_idx)
        # Where layers differ, each has its own; Mistral's read their config's.
        kwargs["sliding_window"] = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        out, _ = attend(attention, q, k, v, attention_mask, scaling=attention.scaling, **kwargs)
        made = torch.empty_like(hidden_states)
        layer.leave(numbers(out.contiguous()), x, numbers(made), rows, threads)
        return made

    def _layer(self) -> _Made:
        if self._made is None or self._made.at != tuple([part.place() for part in self._made.parts]):
            self._made = self._make()
        return self._made

    def _make(self) -> _Made:
        attention, mlp = self.self_attn, self.mlp
        parts: list[FewRows] = [
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        ]  # fmt: skip
        after = hasattr(self, "pre_feedforward_layernorm")  # Gemma's norms of what attention and the MLP give
        norms = Norms(
            _norm(self.input_layernorm),
            _norm(getattr(attention, "q_norm", None)),
            _norm(getattr(attention, "k_norm", None)),
            _norm(self.post_attention_layernorm) if after else None,
            _norm(self.pre_feedforward_layernorm if after else self.post_attention_layernorm),
            _norm(self.post_feedforward_layernorm) if after else None,
        )
        heads, kv_heads = (part.out_features // attention.head_dim for part in parts[:2])
        layer = DecoderLayer(
            [part.weights() for part in parts],
            norms,
            eps=_eps(self.input_layernorm),
            heads=heads,
            kv_heads=kv_heads,
            dim=attention.head_dim,
            gate=_gate(mlp.act_fn),
        )
        return _Made(layer, parts, tuple(part.place() for part in parts), heads, kv_heads)


def _norm(norm: Any) -> Any:
    """What an RMS norm multiplies by: Gemma keeps it less one."""
    if norm is None:
        return None
    weight = norm.weight.detach().float()
    return (weight + 1 if type(norm).__name__.startswith("Gemma") else weight).contiguous().numpy()


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _gate(function: Any) -> str:
    """The kernel's name of an MLP's activation; ValueError if it has none."""
    x = torch.linspace(-4, 4, 33)
    known = {"silu": torch.nn.functional.silu(x), "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh")}
    for name, own in known.items():
        if (function(x) - own).abs().max() < 1e-5:
            return name
    raise ValueError(f"no kernel for {type(function).__name__}")
