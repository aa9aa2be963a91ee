"""llama.cpp's C functions by ctypes: a library, and a model in it."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import struct
import weakref
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from ctxreuse.engines.llama_cpp.places import CachePlaces
from ctxreuse.engines.waits import short_waits
from ctxreuse.errors import ConfigError, EngineError

__all__ = ["FIX", "Batch", "LlamaLibrary", "LlamaModel", "find_library"]

FIX = "Install the build that was tested: pip install 'ctxreuse[llamacpp]', and leave engine.library empty"
_log = logging.getLogger(__name__)


class _Params(ctypes.Structure):
    """Parameters by value: more room than any build's structure, as fields are added at its end and in its middle."""

    _fields_ = (("raw", c_uint8 * 512),)


class Batch(ctypes.Structure):
    """Tokens to compute: addresses of arrays of ``n_tokens`` each; ``logits``: 1 where they are wanted."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p), ("n_seq_id", c_void_p),
        ("seq_id", c_void_p), ("logits", c_void_p),
    )  # fmt: skip


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
#: Result and arguments of each function.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, _LOG, c_void_p),
    "llama_model_default_params": (_Params,),
    "llama_context_default_params": (_Params,),
    "llama_model_load_from_file": (c_void_p, c_char_p, _Params),
    "llama_model_free": (None, c_void_p),
    "llama_model_n_ctx_train": (c_int32, c_void_p),
    "llama_model_n_embd": (c_int32, c_void_p),
    "llama_model_n_head": (c_int32, c_void_p),
    "llama_model_n_swa": (c_int32, c_void_p),
    "llama_model_chat_template": (c_char_p, c_void_p, c_char_p),
    "llama_model_meta_val_str": (c_int32, c_void_p, c_char_p, c_void_p, c_size_t),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_type": (c_int32, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_vocab_get_text": (c_char_p, c_void_p, c_int32),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_vocab_is_control": (c_bool, c_void_p, c_int32),
    "llama_vocab_bos": (c_int32, c_void_p),
    "llama_vocab_eos": (c_int32, c_void_p),
    "llama_vocab_get_add_bos": (c_bool, c_void_p),
    "llama_token_to_piece": (c_int32, c_void_p, c_int32, c_void_p, c_int32, c_int32, c_bool),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    "llama_detokenize": (c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    "llama_init_from_model": (c_void_p, c_void_p, _Params),
    "llama_free": (None, c_void_p),
    "llama_n_ctx": (c_uint32, c_void_p),
    "llama_n_ctx_seq": (c_uint32, c_void_p),
    "llama_n_batch": (c_uint32, c_void_p),
    "llama_n_ubatch": (c_uint32, c_void_p),
    "llama_n_seq_max": (c_uint32, c_void_p),
    "llama_set_n_threads": (None, c_void_p, c_int32, c_int32),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32),
    "llama_state_seq_get_size_ext": (c_size_t, c_void_p, c_int32, c_uint32),
    "llama_state_seq_get_data_ext": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32, c_uint32),
    "llama_state_seq_set_data_ext": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32, c_uint32),
}


def find_library(path: str) -> Path:
    """The library at ``path``, or that of the package xllamacpp if it is empty; raises ConfigError without one."""
    if path:
        found = Path(path).expanduser()
        if not found.is_file():
            raise ConfigError("engine.library is no file", where=str(found), fix="Name libllama.so, or leave it empty")
        return found
    package = importlib.util.find_spec("xllamacpp")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for item in sorted(Path(folder).glob("xllamacpp*.so")):
            return item
    raise ConfigError("the engine llama_cpp needs xllamacpp", fix="Run: pip install 'ctxreuse[llamacpp]'")


class LlamaLibrary:
    """One build of llama.cpp, loaded into this process. Raises ConfigError for one that has not what is needed."""

    def __init__(self, path: Path, *, plugins: bool) -> None:
        """``plugins``: backends lie beside the library as files of their own, as distributions ship them."""
        self.path = path
        try:
            with short_waits():
                self.calls = ctypes.CDLL(str(path))
            for name, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(self.calls, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise ConfigError(f"the library cannot be used: {error}", where=str(path), fix=FIX) from error
        #: The newest messages of severity error: why a model did not load.
        self.errors: deque[str] = deque(maxlen=4)
        self._logger = _LOG(self._heard)  # the library keeps its address
        self.calls.llama_log_set(self._logger, None)
        if plugins:
            self.calls.ggml_backend_load_all_from_path(str(path.parent).encode())
        self.calls.llama_backend_init()
        version = getattr(self.calls, "llama_version", None)
        if version is not None:
            version.restype = c_char_p
        self.version = version().decode() if version is not None else "unknown"

    @staticmethod
    @cache
    def open(path: str) -> LlamaLibrary:
        """The library of `find_library`, loaded once for each path."""
        return LlamaLibrary(find_library(path), plugins=bool(path))

    def _heard(self, severity: int, text: bytes | None, _: int | None) -> None:
        line = (text or b"").decode("utf-8", "replace").strip()
        if severity == 4 and line:
            self.errors.append(line)
        _log.debug("%s", line)

    def last_error(self) -> str:
        """The newest message of severity error, or nothing."""
        return self.errors[-1] if self.errors else "no reason given"

    def places(self) -> CachePlaces | None:
        """A record for where a context's cache lies; None for a library that cannot say."""
        try:
            return CachePlaces.of(self.calls.ggml_get_name, self.calls.ggml_get_data)
        except AttributeError:
            return None

    def params(self, cells: int, streams: int, n_batch: int, places: CachePlaces | None = None) -> _Params:
        """Parameters of a context for ``streams`` sequences, each with room for ``cells`` tokens of its own.

        ``places`` learns where the cache lies while the context computes; it must live as long.
        """
        made: _Params = self.calls.llama_context_default_params()
        struct.pack_into("<4I", made.raw, 0, streams * cells, n_batch, n_batch, streams)
        # embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified: their place differs between builds, their
        # defaults do not. Whether it was right is asked of each context.
        at = bytes(made.raw).find(b"\0\1\1\1\1\0", 64)
        if at >= 0:
            made.raw[at + 4], made.raw[at + 5] = 0, 0
            # A callback and what it is given, no one by default, before the types of K and V: float16.
            types = bytes(made.raw).rfind(struct.pack("<2I", 1, 1), 0, at)
            if places is not None and types >= 16 and not any(made.raw[types - 16 : types]):
                struct.pack_into("<2Q", made.raw, types - 16, *places.callback())
        return made


class LlamaModel:
    """A GGUF in memory; freed when nothing refers to it. Any thread may use it."""

    def __init__(self, library: LlamaLibrary, file: Path) -> None:
        """Raises EngineError if the library does not load it."""
        self.library, self.file, calls = library, file, library.calls
        library.errors.clear()
        self.handle = calls.llama_model_load_from_file(str(file).encode(), calls.llama_model_default_params())
        if not self.handle:
            raise EngineError(
                f"llama.cpp does not load the model: {library.errors[0] if library.errors else 'no reason given'}",
                where=str(file),
                fix="Use a GGUF of an architecture that this build knows, whole and unchanged",
            )
        weakref.finalize(self, calls.llama_model_free, self.handle)
        self.vocab = calls.llama_model_get_vocab(self.handle)
        self.vocab_size = int(calls.llama_vocab_n_tokens(self.vocab))

    def number(self, what: str) -> int:
        """A property such as ``n_swa``, by the name that the library's function has after ``llama_model_``."""
        return int(getattr(self.library.calls, f"llama_model_{what}")(self.handle))

    def setting(self, key: str) -> str:
        """A setting of the GGUF as text, empty without it; ``{arch}`` in the key is its architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.setting("general.architecture"))
        text = ctypes.create_string_buffer(1 << 10)
        length = self.library.calls.llama_model_meta_val_str(self.handle, key.encode(), text, len(text))
        return text.value.decode("utf-8", "replace") if length > 0 else ""
