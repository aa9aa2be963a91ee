"""Attention with grouped heads for Hugging Face models: K and V are not repeated, the mask is made once a forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ctxreuse.cpu import cpu_features
from ctxreuse.engines.torch_hf.bits import numbers
from ctxreuse.engines.torch_hf.chunks.scatter import Scatter, active, by_position
from ctxreuse.engines.torch_hf.inplace.attention import call_of
from ctxreuse.engines.torch_hf.linears import computes_all, uses_kernels
from ctxreuse.engines.torch_hf.packed import WINDOW, is_packing, packed_keys, seen
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attention import MOST_DIM, Part, Plane, attend_name
from ctxreuse.kernels.attention import attend as attend_rows
from ctxreuse.kernels.decode import attend_each

__all__ = ["NAME", "install"]

NAME = "ctxreuse_gqa"

# What changes the scores; such layers go through transformers' own function.
_SPECIAL = ("position_bias", "softcap", "cache", "s_aux")
#: Of one query on a device. Without cuDNN's, which makes a plan for each number of keys, so one a token: on an H200 a
#: token of a 3B model behind 8,192 others took 107 ms with it and takes 27. Of more queries with a mask, torch has no
#: other that groups heads, and repeating K and V took 4 to 9 times as long.
_DECODE: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NAMES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention of q [1, H, S, D] on k, v [1, Hkv, N, D] -> [1, S, H, D].

    transformers repeats K and V for every query head of a group whenever there is a mask: for 32 queries on 2,048
    keys (9/3 heads, float32, 2 cores) that took 4.4 ms a layer, this takes 1.2 ms, and the result has the same bits,
    as torch's CPU kernel computes head by head either way.

    K of a context with attached runs is marked; such a call reads the runs in place. So is K of several contexts, each
    of which is attended to by its own part of the queries.
    """
    packed = packed_keys(key)
    if packed is not None:
        if kwargs.get("position_bias") is not None:
            raise EngineError("the model's attention adds a bias by position, so its contexts run one by one")

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return attend(module, q, k, v, mask, scaling, **kwargs)[0]

        plain = all(kwargs.get(name) is None for name in _SPECIAL)
        return packed.attend(one, query, partial(_attend_each, scaling) if plain else None), None
    in_place, scatter = call_of(key), active()
    if scatter is not None and scatter.scores is not None:
        seen = key if in_place is None else in_place.keys().to(query.device)
        scatter.scores.add(scatter.rows, query, seen, attention_mask, scaling, kwargs.get("softcap"))
    if in_place is not None:
        special = {name: kwargs.get(name) for name in (*_SPECIAL, "sliding_window")}
        return in_place.attend(query, attention_mask, scaling, special), None
    if any(kwargs.get(name) is not None for name in _SPECIAL):
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    if query.shape[0] == query.shape[2] == 1 and attention_mask is None and scatter is None:
        out = _attend_each(scaling, query[:, :, 0], [(key, value)])
        if out is not None:
            return out[None], None
    is_causal = kwargs.get("is_causal")
    wanted = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if query.shape[0] == 1 and (attention_mask is not None or wanted):
        out = _attend_slice(scaling, query, key, value, attention_mask, scatter)
        if out is not None:
            return out, None
    if scatter is not None and attention_mask is not None and query.dtype == torch.float32 and query.is_cpu:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return scatter.blockwise.attend(query, key, value, attention_mask, scale), None
    with nullcontext() if query.is_cpu or query.shape[2] > 1 else sdpa_kernel(_DECODE):
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=kwargs.get("dropout", 0.0),
            scale=scaling,
            # torch aligns is_causal at the top left; the mask is left out only where that is the same (no past, S = 1).
            is_causal=bool(wanted) and attention_mask is None and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def _attend_each(
    scaling: float | None, query: torch.Tensor, contexts: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor | None:
    """Attention of one query of each context, q [contexts, H, D] on k, v [1, Hkv, n, D] -> the same shape.

    By the project's kernel, as torch's takes 11 times as long for one query in bfloat16. None where that cannot.
    """
    if not query.is_cpu:
        return None
    k, v = contexts[0]
    kind, width = _NAMES.get(k.dtype), query.shape[2]
    fits = kind is not None and query.dtype in _NAMES and k.shape[3] == v.shape[3] == width <= MOST_DIM
    if not fits or any(t.stride(3) != 1 for pair in contexts for t in pair) or not uses_kernels(query.dtype):
        return None
    assert kind is not None
    query = query.contiguous()
    out = torch.empty_like(query)
    keys, values = ([numbers(t[0]) for t in of] for of in zip(*contexts))
    scale = width**-0.5 if scaling is None else scaling
    threads = torch.get_num_threads()
    attend_each(numbers(query), numbers(out), _NAMES[query.dtype], keys, values, kind, scale=scale, threads=threads)
    return out


@cache
def _has_tiles() -> bool:
    """True if torch multiplies bfloat16 by AMX, which the project's kernels do not use.

    Known by the processor's features, not by measuring both: a machine gives the same bits each time.
    """
    return "amx_bf16" in cpu_features()


def _attend_slice(
    scaling: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scatter: Scatter | None,
) -> torch.Tensor | None:
    """Attention of S tokens, the last of a context or scattered, q [1, H, S, D] on k, v [1, Hkv, N, D] -> [1, S, H, D].

    By the project's kernel, which computes no score that the mask would hide: on an EPYC, of 512 tokens behind 1,024
    others, 10 ms a layer and thread where torch takes 26; with AVX2 alone 30 and 35; with AVX512-BF16 5.1 and 22, in
    float32 there 7.8 and 20. None where that cannot, with masks that hide anything but later tokens and those before a
    window, where float32 has torch's bits, without AVX2, and with AMX; and of scattered tokens in float32 where torch
    computes what is around it: the kernel's threads would wait for torch's, which go on turning after each product.
    """
    if _has_tiles() or attend_name(query.shape[3]) not in ("avx512", "avx2"):
        return None
    tokens, keys, width = query.shape[2], key.shape[2], query.shape[3]
    window = getattr(mask, WINDOW, None) if mask is not None else (0 if tokens == keys else None)
    kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(query.dtype)
    if window is None or kind is None or not query.is_cpu or not uses_kernels(query.dtype):
        return None
    if scatter is not None and kind == "fp32" and not computes_all(torch.float32):
        return None
    if key.dtype != query.dtype or not key.shape[3] == value.shape[3] == width <= MOST_DIM:
        return None
    if key.stride(3) != 1 or value.stride(3) != 1:
        return None
    k, v = (Plane(kind, numbers(one[0]).view(np.uint16 if kind == "bf16" else np.float32)) for one in (key, value))
    first, hidden, positions = 0, None, np.arange(keys - tokens, keys)
    if scatter is not None:
        first, positions = scatter.end - keys, scatter.rows.numpy()
        hidden = None if scatter.seen is None else (~scatter.seen[first:]).nonzero().flatten().numpy()
    found = attend_rows(
        query[0].float().numpy(),
        [Part(k, v, at=first, hidden=hidden)],
        positions=positions,
        scale=scaling,
        window=window or None,
        threads=torch.get_num_threads(),
        rounded=kind == "bf16",
    )
    return torch.from_numpy(found.o).to(query.dtype).transpose(0, 1)[None].contiguous()


def mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """transformers' boolean mask as an additive one, made once a forward: torch would convert it in every layer.

    In a scattered forward, tokens see by their positions. In a packed one each context gets a mask of its own.
    """
    if is_packing():
        return None
    scatter = active()
    if scatter is not None:
        kwargs |= {"q_offset": 0, "allow_is_causal_skip": False}
        kwargs["mask_function"] = by_position(scatter, kwargs["mask_function"])
    allowed = sdpa_mask(*args, dtype=dtype, **kwargs)
    if allowed is None or allowed.dtype != torch.bool:
        return allowed
    if allowed.shape[2] == 1 and allowed.all():
        return None  # a window that is whole: all that its layer keeps is seen
    made = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    if len(allowed) == 1 and (scatter is not None or dtype == torch.bfloat16) and allowed.is_cpu and not _has_tiles():
        for window in (0, kwargs.get("local_size") or 0):
            if torch.equal(allowed[0, 0], _plain(allowed.shape[2], allowed.shape[3], window or None, scatter)):
                setattr(made, WINDOW, window)
                break
    return made


def _plain(queries: int, keys: int, window: int | None, scatter: Scatter | None) -> torch.Tensor:
    """A mask [queries, keys] that hides later tokens only, those before a window, and what a scattered forward does."""
    if scatter is None:
        return seen(torch.arange(keys - queries, keys), 0, keys, window)
    first = scatter.end - keys
    found = seen(scatter.rows, first, scatter.end, window)
    return found if scatter.seen is None else found & scatter.seen[first:]


def install(model: Any, implementation: str | None) -> str:
    """Choose the attention of a model and return the name that goes into its space.

    None: this module's wherever the model would use torch's (``sdpa``), else what the model has. A name of transformers
    (``sdpa``, ``eager``) is set as it is.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    current = model.config._attn_implementation
    chosen = implementation or (NAME if current == "sdpa" else current)
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "_attn_implementation", None) == current:
            config._attn_implementation = chosen
    model.config._attn_implementation = chosen
    # Same bits as sdpa in float32, so blocks are exchangeable between the two; in bfloat16 they are within rounding, as
    # those of other slices and processors are.
    return "sdpa" if chosen == NAME else str(chosen)
