"""A Hugging Face model prepared to run contexts: opened, probed, with its forward, space and memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypedDict

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.utils.logging import disable_progress_bar

from ctxreuse import models
from ctxreuse.block.format import Layout, block_layout
from ctxreuse.cuda.blocks import DeviceBlocks
from ctxreuse.engines.base import Context, Logits, check_length, check_prompt, chunk_spans
from ctxreuse.engines.checks import check_kind
from ctxreuse.engines.torch_hf.attention import install
from ctxreuse.engines.torch_hf.cache import states
from ctxreuse.engines.torch_hf.cache.arena import Pool
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer, FullWindowLayer, WindowLayer
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.decoder import checking_layers, install_layers
from ctxreuse.engines.torch_hf.devices import TorchDevice, device_errors, device_of
from ctxreuse.engines.torch_hf.linears import install_linears
from ctxreuse.engines.torch_hf.modes import by_kernels, inference
from ctxreuse.engines.torch_hf.packed import check_attended, packed_cache, packing
from ctxreuse.engines.torch_hf.space import config_of, model_space, new_cache, weights_of
from ctxreuse.engines.user_codec import UserCodec
from ctxreuse.errors import ConfigError, CtxReuseError, EngineError, FormatError, LinkError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["Forward", "TorchModel", "first_keys", "open_model", "plain_cache"]

#: Tokens of a probe, and how many of them are the prefix.
_TOKENS, _PREFIX = 12, 8
#: Rounding moves float32 logits by about 1e-6 of their scale; Jamba, which drops its state, by 1e-3.
_TOLERANCE = 5e-5
#: Share of all logits' deviation that sums in another order move in 16 bits: up to .09 with SmolLM2 in bfloat16, where
#: tokens at positions one too low move .26 to 1.2.
_ROUNDED = 0.2


def open_model(name_or_folder: str, dtype: str, device: str = "cpu") -> tuple[Any, Path]:
    """Open a model in evaluation mode; a known name is fetched first. Returns it and its folder; raises ConfigError.

    Nothing in the folder is executed: no Python of its own, and no pickle, which ``*.bin`` files are.
    """
    if dtype not in states.DTYPES:
        raise ConfigError(f"no such type: {dtype!r}", fix=f"Use one of {', '.join(states.DTYPES)}")
    there = device_of(device)
    folder = models.get(name_or_folder) if name_or_folder in models.CATALOG else models.resolve(name_or_folder)
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ConfigError(
            "the folder has its weights as *.bin only, which are pickles; only *.safetensors are read",
            where=str(folder),
            fix="Convert it where you trust it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
        )
    disable_progress_bar()  # a folder opens in 0.1 s, and the bar would go to the standard error of a library's user
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=states.DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except CtxReuseError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            raise ConfigError(
                "the model needs Python code of its own folder, which is never run",
                where=str(folder),
                fix="Use a model that transformers knows by itself",
            ) from error
        raise ConfigError(
            f"the folder does not open as a causal language model: {reason}",
            where=str(folder),
            fix="It must hold config.json and *.safetensors of a model that transformers knows",
        ) from error
    return model.to(there).eval(), folder


class Forward:
    """Calls a model's forward with the arguments that it takes."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise EngineError(f"{type(model).__name__} is not a transformers model")
        names = inspect.signature(model.forward).parameters
        # Models of recurrent layers alone (Mamba) have another name for the same cache.
        self._cache = next((name for name in ("past_key_values", "cache_params") if name in names), "")
        if not self._cache or "input_ids" not in names:
            raise EngineError(
                "the model does not take its context as past_key_values or cache_params",
                where=type(model).__name__,
                fix="Causal language models with transformers' Cache are supported",
            )
        places = {p.device for p in model.parameters()} or {torch.device("cpu")}
        if len(places) > 1 or torch.device("meta") in places:
            found = ", ".join(sorted(map(str, places)))
            raise EngineError(f"the model is on {found}", fix="Move it to one device: model.to('cuda')")
        self._model = model
        #: Where the model computes.
        self.device = places.pop()
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        #: True if the model takes the position of each token. It is, always: Bamba restarts at 0 after a resume.
        self.takes_positions = "position_ids" in names or open_ended
        self._last_only = "logits_to_keep" in names

    def call(self, ids: torch.Tensor, at: int, cache: DynamicCache, rows: int = 1) -> torch.Tensor:
        """Run int64 ids [S] from position ``at`` on; the cache grows by them. Call inside `torch.inference_mode`.

        Returns the logits after the last token, [vocab], or after the last ``rows``, [rows, vocab]; as all of these do,
        in the host's memory.
        """
        return self._run(ids[None], torch.arange(at, at + len(ids))[None], cache, rows)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """As `call`, with a position [S] for each token."""
        return self._run(ids[None], positions[None], cache)

    def packed(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache, last: torch.Tensor
    ) -> torch.Tensor:
        """As `run`, for tokens of several contexts; logits [contexts, vocab] of the tokens ``last``."""
        last = last.to(self.device)
        kept = {"logits_to_keep": last} if self._last_only else {}
        options: dict[str, Any] = {self._cache: cache, **kept}
        given = {"input_ids": ids[None].to(self.device), "position_ids": positions[None].to(self.device)}
        out = self._model(**given, use_cache=True, **options)
        logits: torch.Tensor = (out.logits[0] if kept else out.logits[0, last]).float().cpu()
        return logits

    def each(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> None:
        """Run each token alone, as a context of its own: one entry of the cache's first axis each."""
        self._run(ids[:, None], positions[:, None], cache)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache, rows: int = 1) -> torch.Tensor:
        options: dict[str, Any] = {"logits_to_keep": rows} if self._last_only else {}
        if self.takes_positions:
            options["position_ids"] = positions.to(self.device)
        options[self._cache] = cache
        out = self._model(input_ids=ids.to(self.device), use_cache=True, **options)
        logits: torch.Tensor = out.logits[0, -rows:].float().cpu()
        return logits if rows > 1 else logits[0]


class ModelOptions(TypedDict, total=False):
    """Options of a model.

    Attributes:
        reserve: tokens of K/V memory that are allocated and touched at once.
        chunk: tokens that go through the model together in a long prefill; 512 unless given.
        block_tokens: tokens a block; 64 unless given.
        attention: None: the engine's own where the model would use torch's; else transformers' name of another.
        full_kv_for_windows: sliding-window layers keep K and V of all tokens.
        int8_weights: linear layers keep their weights as int8.
        place: None: the memory of the device that the model is on.
    """

    reserve: int
    chunk: int
    block_tokens: int
    attention: str | None
    full_kv_for_windows: bool
    int8_weights: bool
    place: TorchDevice | None


class TorchModel(UserCodec):
    """One model with everything that its contexts share. Any thread may make contexts.

    Attributes:
        module: the transformers model, in evaluation mode.
        chunk: tokens that go through the model together in a long prefill.
        linear: the model has recurrent layers.
        stepwise: tokens that follow a context must go through the model one by one.
        windows: the window of each sliding layer that keeps no more than that.
        pool: memory for K and V of contexts.
    """

    def __init__(
        self,
        module: Any,
        folder: Path | None,
        *,
        reserve: int = 0,
        chunk: int = 512,
        block_tokens: int = 64,
        attention: str | None = None,
        full_kv_for_windows: bool = False,
        int8_weights: bool = False,
        place: TorchDevice | None = None,
    ) -> None:
        """See `ModelOptions`. Raises ConfigError for impossible amounts."""
        if chunk < 1 or reserve < 0:
            raise ConfigError(
                f"chunk is {chunk}, reserve is {reserve}", fix="chunk must be 1 or more, reserve 0 or more"
            )
        self.forward = Forward(module)
        self.module, self.chunk = module.eval(), chunk
        #: The memory that K and V are in.
        self.place = TorchDevice.of(self.forward.device) if place is None else place
        if self.place.launcher is not None:
            self._encoder = DeviceBlocks(self.place.launcher)
        self._full_windows = full_kv_for_windows
        self._packs: bool | None = None
        name = install(module, attention)
        weights = weights_of(module, folder, int8=int8_weights)
        if not self.place.apart:
            install_linears(module, int8=int8_weights)
            install_layers(module)
        elif int8_weights:
            raise ConfigError(f"int8 weights are computed with on processors, not on {self.place.device}")
        self.new_cache()  # refuses kinds of layers that cannot be exported, before the model is run
        self.space = self._measure(folder, weights, name, block_tokens)
        self.layout: Layout = block_layout(self.space)
        shape = tuple((i, s.kv_heads, s.k_dim, s.v_dim) for i, s in enumerate(self.space.layers) if s.blocked)
        self.pool = Pool(shape, states.DTYPES[self.space.dtype], place=self.place)
        if reserve and shape:
            check_length(self.space, reserve)
            self.pool.reserve(reserve)
        self.windows = {i: s.window for i, s in enumerate(self.space.layers) if s.window}
        self.state_sample = self._sample()
        #: Completes rows that left the model early.
        self.complete: Callable[[TorchContext], None] | None = None

    @inference
    def _measure(self, folder: Path | None, weights: str, attention: str, block_tokens: int) -> ModelSpace:
        cache = plain_cache(self.module)
        with checking_layers():
            self.forward.call(_ids(self.module, _PREFIX), 0, cache)
        self.linear = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        self.stepwise = False
        if self.linear and not _continues(self.module, self.forward, step=False):
            if not _continues(self.module, self.forward, step=True):
                raise EngineError("the model does not continue from its own cache", where=type(self.module).__name__)
            self.stepwise = True
        return model_space(
            self.module, cache, folder, weights, attention, block_tokens, full_windows=self._full_windows
        )

    @inference
    def _sample(self) -> states.Snapshot:
        if not self.space.needs_state:  # a run of the model, which reads all weights, would find none
            return states.Snapshot(_PREFIX, {}, {})
        context = self.new_context()
        self.forward.call(_ids(self.module, _PREFIX), 0, context.cache)
        return states.capture(context.cache, _PREFIX)

    def new_cache(self) -> DynamicCache:
        """An empty cache with this package's layers."""
        return new_cache(self.module, full_windows=self._full_windows)

    def new_context(self, reserve: int = 0) -> TorchContext:
        """See `Engine.new_context`."""
        check_length(self.space, reserve)
        return TorchContext(self.new_cache(), self.pool, self.space.max_tokens, reserve)

    def own(self, context: Context) -> TorchContext:
        """The context, if it is a usable one of this engine, with all rows whole; raises EngineError."""
        own = check_kind(context, TorchContext)
        own.check_usable()
        if own.pending:
            assert self.complete is not None
            own.wait_load()
            self.complete(own)
        return own

    @property
    def packs(self) -> bool:
        """True if tokens of several contexts go through the model in one pass; found out by trying, once."""
        if self._packs is None:
            layers = self.new_cache().layers
            self._packs = (
                self.forward.takes_positions
                and all(type(layer) in (ArenaLayer, FullWindowLayer, WindowLayer) for layer in layers)
                and self._packs_well()
            )
        return self._packs

    @inference
    def _packs_well(self) -> bool:
        ids = _ids(self.module, _TOKENS).numpy().astype("<i4")
        contexts = [self.new_context(), self.new_context()]
        parts = [(ids[:at], ids[at:]) for at in (_TOKENS // 2, _PREFIX)]
        for context, (first, _) in zip(contexts, parts):
            self.prefill(context, first)
        try:
            got = self._forward_packed(contexts, [rest for _, rest in parts], [1, 1])
        except (EngineError, RuntimeError, TypeError, ValueError, IndexError):
            return False  # the model does something else with its cache or positions than those that pack
        for (first, rest), logits in zip(parts, got):
            alone = self.new_context()
            # In the same parts: in one pass bfloat16 rounds so differently that it would look like another text.
            self.prefill(alone, first)
            expected = self.prefill(alone, rest)
            if self.space.dtype == "float32":
                if not np.abs(logits - expected).max() <= _TOLERANCE * np.abs(expected).max():
                    return False
            elif not np.linalg.norm(logits - expected) <= _ROUNDED * np.linalg.norm(expected - expected.mean()):
                return False
        return True

    def prefill(self, context: TorchContext, tokens: Tokens) -> Logits:
        """See `Engine.prefill`; the context is checked."""
        start = context.n
        while True:
            run = self._next(context, tokens[context.n - start :], self.chunk)
            logits = self._run(run)
            if not run.left:
                return logits

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], limit: int, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """See `Engine.step`."""
        found: list[Logits | CtxReuseError | None] = [None] * len(batch)
        runs: dict[int, _Run] = {}
        for i, (context, tokens) in enumerate(batch):
            try:
                runs[i] = self._next(self.own(context), tokens, limit, rows[i] if rows else 1)
            except CtxReuseError as error:
                found[i] = error
        together = [i for i, run in runs.items() if run.context.loading is None]
        if len(together) > 1 and self.packs:
            try:
                for i, logits in zip(together, self._run_packed([runs[i] for i in together])):
                    found[i] = None if runs.pop(i).left else logits
            except CtxReuseError:
                pass  # each finds its own below
        for i, run in runs.items():
            try:
                logits = self._run(run)
                found[i] = None if run.left else logits
            except CtxReuseError as error:
                found[i] = error
        return found

    def _next(self, context: TorchContext, tokens: Tokens, limit: int, rows: int = 1) -> _Run:
        """What of ``tokens`` goes through the model next."""
        context.check_filled()
        ids = check_prompt(self.space, context.n, tokens)
        start, end, size = context.n, context.n + len(ids), self.space.block_tokens
        boundary = end // size * size if self.space.needs_state else 0
        cut = boundary if self.linear else 0
        _, stop = next(chunk_spans(start, end, self.chunk, cut, step=self.stepwise))
        if rows > 1:
            if self.stepwise or self.linear:
                raise EngineError("this model takes tokens one by one, so a draft cannot be checked in one pass")
            stop = end
        elif not self.stepwise:
            stop = min(stop, start + limit)
        context.reserve(end)
        context.run_start = start if context.run_start is None else context.run_start
        return _Run(context, ids[: stop - start], end - stop, boundary, end - context.run_start, rows)

    @inference
    def _run(self, run: _Run) -> Logits:
        context = run.context
        try:
            ids = torch.from_numpy(run.ids.astype(np.int64))
            # Rows in place are attended to by kernels, whose bits are not torch's: layers need not have them either.
            with device_errors(self.place), by_kernels(context.in_place is not None):
                logits = self.forward.call(ids, context.n, context.cache, run.rows)
            context.check_attended()
        except BaseException as error:
            self._undo(context, error)
            raise
        self._advance(run)
        result: Logits = logits.numpy().copy()
        return result

    @inference
    def _run_packed(self, runs: Sequence[_Run]) -> list[Logits]:
        try:
            parts = [run.ids for run in runs]
            with device_errors(self.place):
                found = self._forward_packed([run.context for run in runs], parts, [run.rows for run in runs])
        except BaseException as error:
            for run in runs:
                self._undo(run.context, error)
            raise
        for run in runs:
            self._advance(run)
        return found

    def _advance(self, run: _Run) -> None:
        """Count a run's tokens as processed, and take the snapshot that it passed."""
        context, at = run.context, run.context.n
        context.append(run.ids)
        context.finish_load()
        if at < run.boundary <= context.n:
            context.take_snapshot(run.boundary, passing=run.whole < self.space.block_tokens)
        if not run.left:
            context.run_start = None

    @inference
    def _forward_packed(
        self, contexts: Sequence[TorchContext], parts: Sequence[Tokens], rows: Sequence[int]
    ) -> list[Logits]:
        counts = [len(ids) for ids in parts]
        cache = packed_cache([context.cache for context in contexts], counts)
        positions = torch.cat([torch.arange(c.n, c.n + count) for c, count in zip(contexts, counts)])
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        with packing():
            ends = np.cumsum(counts)
            last = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, rows)])
            logits = self.forward.packed(ids, positions, cache, torch.from_numpy(last))
        check_attended(cache)
        for context in contexts:
            context.check_attended()
        found = np.split(logits.numpy(), np.cumsum(rows)[:-1])
        return [(one if count > 1 else one[0]).copy() for one, count in zip(found, rows)]

    def _undo(self, context: TorchContext, error: BaseException) -> None:
        """After a failed forward: back to where it began, or unusable where that is impossible."""
        context.abandon_load()
        context.run_start = None
        if isinstance(error, FormatError):
            context.broken = "a block that it was loaded from is corrupt"
        elif isinstance(error, LinkError):
            context.broken = "a block that it was loaded from never came"
        elif isinstance(error, EngineError) and context.loading is not None:
            context.broken = "a block that it was loaded from found no memory"
        elif self.linear:
            context.broken = f"a forward was interrupted ({type(error).__name__}) and its recurrent states are lost"
        context.truncate(context.n)
        for window in context.windows:
            window.truncate(context.n)


class _Run(NamedTuple):
    """What of a context's tokens goes through the model now; ``left`` follow later, ``whole`` go in one run together.

    ``boundary``: where the run wants a snapshot of its states; 0: nowhere. ``rows``: see `Engine.step`.
    """

    context: TorchContext
    ids: Tokens
    left: int
    boundary: int
    whole: int
    rows: int


def plain_cache(model: Any) -> DynamicCache:
    """An empty cache with transformers' own layers."""
    return DynamicCache(config=config_of(model))


class _Captured(Exception):
    """Ends a forward with what its first layer was about to keep."""

    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys


def _capture(key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise _Captured(key_states)


def first_keys(
    forward: Forward, cache: DynamicCache, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor | None:
    """K [heads, n, dim] that the first layer would keep of int64 ids [n] at ``positions`` [n]; ``cache`` is spent.

    None if the model takes no positions. Call inside `torch.inference_mode`.
    """
    if not forward.takes_positions:
        return None
    cache.layers[0].update = _capture
    try:
        forward.run(ids, positions, cache)
    except _Captured as caught:
        return caught.keys[0].cpu()
    return None


def _ids(model: Any, count: int) -> torch.Tensor:
    """Tokens from all over the vocabulary: a row of control tokens is nothing that a model knows, and any rounding
    turns what it says of them."""
    return torch.arange(1, count + 1) * 7_919 % config_of(model).vocab_size


@inference
def _continues(model: Any, forward: Forward, *, step: bool) -> bool:
    """True if tokens after a cached prefix, together or (``step``) one by one, give what they give without a cache.

    Jamba ignores its recurrent state when more than one token follows; such a model must be fed token by token.
    """
    ids = _ids(model, _TOKENS)
    whole = forward.call(ids, 0, plain_cache(model))
    cache = plain_cache(model)
    part = forward.call(ids[:_PREFIX], 0, cache)
    # Another context in between: RecurrentGemma keeps its states in the model itself, shared by all contexts.
    forward.call(ids[1:], 0, plain_cache(model))
    for at in range(_PREFIX, _TOKENS, 1 if step else _TOKENS):
        part = forward.call(ids[at : at + 1] if step else ids[at:], at, cache)
    return bool((whole - part).abs().max() <= _TOLERANCE * whole.abs().max())
