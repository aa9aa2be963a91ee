"""All settings: one frozen struct per section of the config file, with description, unit and default of each value.

``ctxreuse``, ``ctxreuse-edge`` and ``ctxreuse-cloud`` share one TOML file; each reads the sections it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.units import format_bytes, format_duration, format_rate, parse_bytes, parse_duration, parse_rate

__all__ = [
    "ENV_PREFIX",
    "RENAMED",
    "BackendConfig",
    "BusConfig",
    "CloudConfig",
    "EdgeConfig",
    "EngineConfig",
    "LinkConfig",
    "LogConfig",
    "ModelConfig",
    "Setting",
    "Settings",
    "StoreConfig",
    "TakesHints",
    "TlsConfig",
    "settings",
]

ENV_PREFIX = "CTXREUSE_"

#: Settings by the names of version 0.1.0, which are still read for one version, with a warning.
RENAMED = {
    "edge.live_bytes": "edge.context_cache_bytes",
    "edge.lossy": "edge.max_kl",
    "edge.why": "edge.request_log",
    "engine.repair": "engine.recompute_budget",
    "engine.whole": "engine.full_kv_for_windows",
    "store.demote": "store.recompress",
}

#: Parser and formatter of each unit; what the formatter writes, the parser reads back unchanged.
_UNITS: dict[str, tuple[Callable[[str], float], Callable[[Any], str]]] = {
    "bytes": (parse_bytes, format_bytes),
    "seconds": (parse_duration, format_duration),
    "bytes/s": (parse_rate, format_rate),
}


#: Engines that a setting may name.
EngineName: TypeAlias = Literal["auto", "torch", "llama_cpp", "onnxruntime"]
#: KV hints that a backend is sent.
TakesHints: TypeAlias = Literal["none", "pass", "make"]


def _about(
    text: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None, unit: str = ""
) -> Any:
    bounds: dict[str, Any] = {name: value for name, value in (("ge", ge), ("gt", gt), ("le", le)) if value is not None}
    return msgspec.Meta(description=text, extra={"unit": unit} if unit else None, **bounds)


def _in_data(path: str, name: str) -> Path:
    if path:
        return Path(path).expanduser()
    import platformdirs

    return platformdirs.user_data_path("ctxreuse", appauthor=False) / name


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store: where KV and sessions are kept, and how much."""

    path: Annotated[str, _about("Folder of the store; empty: a folder in the user's data directory")] = ""
    capacity: Annotated[int, _about("KV on disk at most", ge=1 << 20, unit="bytes")] = 8_000_000_000
    host_bytes: Annotated[int, _about("KV in memory that waits to be written to disk, at most", ge=0, unit="bytes")] = (
        256 << 20
    )
    policy: Annotated[
        str,
        _about("Eviction policy: lru, lfu, s3fifo, arc, gdsf, hazard, pauses, or adaptive (also as adaptive:lru,arc)"),
    ] = "adaptive"
    level: Annotated[
        str, _about("Encoding of stored KV: exact, exact+rans (lossless compression), or a lossy level such as kl-0.01")
    ] = "exact"
    recompress: Annotated[
        bool, _about("Compress cold KV, lossily where sessions allow it, before anything is evicted")
    ] = True
    replay: Annotated[
        int, _about("Tokens that may be recomputed rather than storing one more state (SSM, sliding window)", ge=0)
    ] = 0

    def folder(self) -> Path:
        """The folder of the store: ``path``, or ``store`` in the user's data folder."""
        return _in_data(self.path, "store")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine: which model it runs, and how."""

    model: Annotated[
        str, _about("Model name (see `ctxreuse model ls`), Hugging Face folder, ONNX folder, or GGUF file")
    ] = "smollm2"
    engine: Annotated[
        EngineName,
        _about(
            "What runs the model; auto: the fastest that is installed and can: llama_cpp for a GGUF file or a known "
            "name, onnxruntime for an ONNX folder, torch for a Hugging Face folder or another `dtype`"
        ),
    ] = "auto"
    provider: Annotated[Literal["cpu", "cuda"], _about("What onnxruntime computes on")] = "cpu"
    library: Annotated[
        str, _about("Another libllama.so for the engine llama_cpp; empty: that of the package xllamacpp")
    ] = ""
    kv_bytes: Annotated[
        int,
        _about(
            "Memory for the KV of contexts that compute, llama_cpp; 0: a quarter of the machine's", ge=0, unit="bytes"
        ),
    ] = 0
    device: Annotated[str, _about("Where torch computes: cpu, or cuda (cuda:1 …); another than cpu asks for torch")] = (
        "cpu"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _about(
            "Numeric type of weights and KV in torch; auto: bfloat16 on a device, float32 on processors; llama_cpp: "
            "the file's, float16 KV; onnxruntime: the folder's"
        ),
    ] = "auto"
    threads: Annotated[
        int,
        _about(
            "CPU threads of the engine; 0: one per core. They spin shortly while they wait for each other, unless "
            "OMP_WAIT_POLICY or GOMP_SPINCOUNT is set",
            ge=0,
        ),
    ] = 0
    stall: Annotated[
        float,
        _about(
            "How long a piece of one prompt may make other answers wait for their next token (three of their steps in "
            "any case): with more, prompts are computed sooner beside answers",
            ge=0,
            le=60,
            unit="seconds",
        ),
    ] = 0.2
    chunk: Annotated[int, _about("Tokens per prefill step: more is faster and needs more memory", ge=1)] = 512
    full_kv_for_windows: Annotated[
        bool, _about("Keep the KV of all tokens in sliding-window layers: larger blocks, reusable at any position")
    ] = False
    int8_weights: Annotated[
        bool,
        _about(
            "Weights of linear layers as int8, torch: a quarter of float32 to read for a token; blocks of their own"
        ),
    ] = False
    speculate: Annotated[
        Literal["auto", "off"],
        _about(
            "Draft answers from what was said before, and check drafts in one pass: auto, where that is faster; off"
        ),
    ] = "off"
    draft_model: Annotated[
        str,
        _about(
            "A smaller model of the same tokenizer that drafts answers too, where `speculate` is auto: a GGUF file, a "
            "model name or a folder; empty: none"
        ),
    ] = ""
    exits: Annotated[
        float,
        _about(
            "Share of an answer's tokens that may differ from the model's own, such as 0.01, so that tokens leave the "
            "model early (torch and onnxruntime, after `ctxreuse calibrate NAME --exits`); 0: none",
            ge=0,
            le=0.2,
        ),
    ] = 0.0
    recompute_budget: Annotated[
        str, _about("Recomputation of relocated KV at most: 10%, 64 (tokens) or 200ms; empty: as the level requires")
    ] = ""

    @property
    def torch_dtype(self) -> str:
        """The numeric type that torch computes in: what `dtype` says, or what suits `device`."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs of the daemons, on standard error."""

    format: Annotated[Literal["text", "json"], _about("text, or json: one object per line")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], _about("Lowest severity that is logged")] = "info"


class LinkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cloud that this device fetches contexts from and sends its own to."""

    endpoint: Annotated[str, _about("Address of the cloud's bus, such as tcp://cloud.example:7353")]
    server_key: Annotated[
        str, _about("Public key of the cloud, or its .pub file; empty: unencrypted, loopback only")
    ] = ""
    name: Annotated[str, _about("Name in logs and `status`; empty: its endpoint")] = ""


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between devices and clouds."""

    clouds: Annotated[tuple[LinkConfig, ...], _about("Clouds to fetch contexts from, in order of preference")] = ()
    key_file: Annotated[
        str, _about("Secret key of this node (`ctxreuse keys add`); empty: unencrypted, loopback only")
    ] = ""
    bind: Annotated[str, _about("Address on which a cloud listens for devices")] = "tcp://127.0.0.1:7353"
    allow_file: Annotated[str, _about("List of public keys that a cloud accepts (`ctxreuse keys allow`)")] = ""
    insecure: Annotated[bool, _about("Allow unencrypted TCP beyond loopback")] = False
    heartbeat: Annotated[float, _about("Silence after which a peer is pinged", gt=0, unit="seconds")] = 2.0
    max_payload: Annotated[int, _about("Largest payload of one message", ge=1 << 12, le=16 << 20, unit="bytes")] = (
        4 << 20
    )


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One more model of a device's daemon."""

    model: Annotated[str, _about("Model name, Hugging Face or ONNX folder, or GGUF file")]
    name: Annotated[str, _about("Name in the API; empty: that of the model or its file")] = ""
    engine: Annotated[EngineName, _about("What runs the model")] = "auto"


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS of a daemon's HTTP API; the files are read again when they change."""

    tls_certificate: Annotated[
        str, _about("PEM file of its certificate, then of those that issued it: serves HTTPS; empty: HTTP")
    ] = ""
    tls_key: Annotated[str, _about("PEM file of the certificate's key; empty: it is in the certificate's file")] = ""


class EdgeConfig(TlsConfig, frozen=True, forbid_unknown_fields=True):
    """The daemon of a device, ``ctxreuse-edge serve``."""

    host: Annotated[str, _about("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _about("Port of the HTTP API; 0: any free one", ge=0, le=65535)] = 7351
    api_key_file: Annotated[
        str,
        _about("File of API keys (`ctxreuse-edge keys`, or one per line), one of which is required; empty: none"),
    ] = ""
    allowed_hosts: Annotated[
        str,
        _about("Hosts besides loopback and edge.host that requests may name if no key is required: a.lan, b.lan"),
    ] = ""
    insecure: Annotated[
        bool, _about("Listen beyond loopback without API keys: anyone who reaches the address may use the daemon")
    ] = False
    admin_token_file: Annotated[
        str, _about("File of tokens that open status and explanations from other machines; empty: from this one only")
    ] = ""
    max_waiting: Annotated[
        int,
        _about("Requests queued or running at once; more, and those over the share of a key: 429", ge=1),
    ] = 128
    max_body: Annotated[int, _about("Largest request body", ge=1 << 10, unit="bytes")] = 16 << 20
    max_bodies: Annotated[
        int, _about("Memory for bodies of requests under way; a key's at most half of what is left", unit="bytes")
    ] = 128 << 20
    receive: Annotated[
        float, _about("Time for the headers of a request to arrive, then for its body", gt=0, unit="seconds")
    ] = 30.0
    context_cache_bytes: Annotated[
        int, _about("Memory for contexts that stay in the engine between requests", ge=0, unit="bytes")
    ] = 1 << 30
    isolate: Annotated[
        bool, _about("Run the engine in a process of its own: if it crashes, running answers end, not the daemon")
    ] = True
    models: Annotated[
        tuple[ModelConfig, ...], _about("Models besides engine.model, each loaded when a request names it")
    ] = ()
    models_bytes: Annotated[
        int, _about("Memory for loaded models together; 0: unlimited. Idle ones make room", ge=0, unit="bytes")
    ] = 0
    keep_alive: Annotated[
        str, _about("Time after its last request for which a model stays loaded: 5m; 0: not at all; -1: for ever")
    ] = "-1"
    keep_responses: Annotated[
        str, _about("Time for which responses of /v1/responses are stored, unless they are pinned: 30d; -1: for ever")
    ] = "30d"
    drain: Annotated[float, _about("Time for running requests to finish after a stop signal", ge=0, unit="seconds")] = (
        30.0
    )
    max_kl: Annotated[
        str, _about("Largest KL of reused KV, in nats a token, for requests that set none: 0.01; empty: exact only")
    ] = ""
    document_order: Annotated[
        Literal["given", "cached", "ranked"],
        _about(
            "Order of documents (all text parts of the last message but its last) for requests that set none; cached: "
            "what is cached first; ranked: the same, and the model is told the order given"
        ),
    ] = "given"
    tools: Annotated[
        Literal["auto", "hermes", "llama3", "mistral", "mistral-args", "gemma", "generic"],
        _about("How models write calls of tools; auto: as their chat template says"),
    ] = "auto"
    record: Annotated[
        str, _about("Record requests to this file, as hashes and counts, for `ctxreuse replay`; empty: off")
    ] = ""
    record_bytes: Annotated[
        int, _about("Disk space of all recordings, older ones included", ge=1 << 20, unit="bytes")
    ] = 1_000_000_000
    request_log: Annotated[
        Literal["text", "hashes"], _about("Recent requests, kept to explain misses: as token ids (text) or as hashes")
    ] = "text"
    page_texts: Annotated[
        bool, _about("Show the ends of prompts and turns on the daemon's page, to those who may see the page")
    ] = False
    retention: Annotated[
        str, _about("Age at which contexts not used since, and logged requests, are deleted: 30d; empty: never")
    ] = ""
    verify: Annotated[
        Literal["auto", "steps", "off"],
        _about(
            "Whose model answers; auto: that of a cloud, if it has this model's tokenizer, with drafts from here, and "
            "this one where the cloud cannot; steps: this one, and a cloud's judges each step and writes anew what it "
            "does not accept; off: always this one"
        ),
    ] = "off"
    step_judge: Annotated[
        str,
        _about(
            "Who judges steps: the cloud's model by likelihood or digit, see `ctxreuse calibrate --judge`; "
            "or a function here, as package.module:function"
        ),
    ] = "likelihood"
    step_threshold: Annotated[
        str, _about("Score from which on a step is accepted; empty: as the judge's calibration says")
    ] = ""
    step_tokens: Annotated[int, _about("Tokens of a step at most; a blank line ends it before", ge=1, le=128)] = 64
    step_cases: Annotated[
        str, _about("File of labelled steps that a function of step_judge is measured on; empty: generated ones")
    ] = ""
    sync: Annotated[bool, _about("Send clouds the contexts they miss, while the device is idle")] = True
    sync_rate: Annotated[float, _about("Bandwidth of sync at most; 0: unlimited", ge=0, unit="bytes/s")] = 0.0


class BackendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One OpenAI-compatible server that the cloud sidecar stands in front of."""

    url: Annotated[str, _about("Address without /v1, such as http://127.0.0.1:8000")]
    name: Annotated[str, _about("Name in logs and metrics; empty: its address")] = ""
    api_key_file: Annotated[str, _about("File with its API key; empty: none")] = ""
    cache_salt: Annotated[bool, _about("It separates the prefix caches of tenants by `cache_salt`, as vLLM does")] = (
        False
    )
    kv_events: Annotated[
        str,
        _about(
            "Where it publishes KV events, tcp://HOST:PORT; with @ before it, the address on this machine that it "
            "sends them to; empty: none"
        ),
    ] = ""
    kv_replay: Annotated[str, _about("Where missed KV events are asked for, tcp://HOST:PORT; empty: nowhere")] = ""
    kv_hints: Annotated[
        TakesHints,
        _about(
            "KV hints that it is sent with requests, as the field `kv_hints`; pass: of callers on their own context; "
            "make: also that a context waits for a tool"
        ),
    ] = "none"
    max_inflight: Annotated[int, _about("Requests at once; 0: unlimited", ge=0)] = 0
    health: Annotated[str, _about("Path that answers 200 while it is healthy; empty: /health, else /v1/models")] = ""


class CloudConfig(TlsConfig, frozen=True, forbid_unknown_fields=True):
    """The sidecar of a cloud, ``ctxreuse-cloud serve``. Its bus is set in ``[bus]``."""

    host: Annotated[str, _about("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _about("Port of the HTTP API; 0: any free one", ge=0, le=65535)] = 7352
    store: Annotated[str, _about("Folder of the cloud's store; empty: `cloud` in the user's data directory")] = ""
    store_bytes: Annotated[int, _about("KV on its disk at most", ge=1 << 20, unit="bytes")] = 32_000_000_000
    backends: Annotated[tuple[BackendConfig, ...], _about("Inference servers behind the proxy")] = ()
    keys_file: Annotated[
        str, _about("API keys (`ctxreuse-cloud tenants`); empty: no key is required, on loopback only")
    ] = ""
    tenant_requests: Annotated[int, _about("Requests of one tenant at once; 0: unlimited", ge=0)] = 64
    attempts: Annotated[int, _about("Backends that a request is tried on, at most", ge=1, le=10)] = 3
    router: Annotated[
        Literal["price", "affinity"],
        _about(
            "Which backend gets a request; price: where its first token and the work done again cost least; affinity: "
            "always the same for one beginning, while it is not overloaded"
        ),
    ] = "price"
    backend_tokens: Annotated[
        int, _about('Tokens of KV that each backend keeps, about, for the router "price"', ge=1)
    ] = 1_000_000
    connect: Annotated[float, _about("Timeout for connecting to a backend", gt=0, unit="seconds")] = 2.0
    silence: Annotated[
        float, _about("Timeout without progress of an answer, from the backend or to the caller", gt=0, unit="seconds")
    ] = 300.0
    health: Annotated[float, _about("Interval of health checks of backends", gt=0, unit="seconds")] = 5.0
    prefill_workers: Annotated[int, _about("Engine processes that compute contexts for devices", ge=0, le=64)] = 1
    admin_token_file: Annotated[
        str, _about("File of tokens that open status and explanations from other machines; empty: from this one only")
    ] = ""
    max_waiting: Annotated[int, _about("Requests running at once; more are refused with 429", ge=1)] = 256
    max_body: Annotated[int, _about("Largest request body", ge=1 << 10, unit="bytes")] = 16 << 20
    max_bodies: Annotated[
        int,
        _about("Memory for bodies of requests under way; a tenant's at most half of what is left", unit="bytes"),
    ] = 512 << 20
    receive: Annotated[
        float, _about("Time for the headers of a request to arrive, then for its body", gt=0, unit="seconds")
    ] = 30.0
    record: Annotated[
        str, _about("Record requests to this file, as hashes and counts, for `ctxreuse replay`; empty: off")
    ] = ""
    record_bytes: Annotated[
        int, _about("Disk space of all recordings, older ones included", ge=1 << 20, unit="bytes")
    ] = 1_000_000_000
    drain: Annotated[float, _about("Time for running requests to finish after a stop signal", ge=0, unit="seconds")] = (
        30.0
    )
    linger: Annotated[
        float, _about("Time between /readyz answering 503 and connections being refused", ge=0, unit="seconds")
    ] = 0.0

    def folder(self) -> Path:
        """The folder of the cloud's store."""
        return _in_data(self.store, "cloud")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings, by section."""

    store: StoreConfig = StoreConfig()
    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()
    bus: BusConfig = BusConfig()
    edge: EdgeConfig = EdgeConfig()
    cloud: CloudConfig = CloudConfig()


class Setting(NamedTuple):
    """One setting: dotted name, type, default, description, and unit ("" if none).

    ``rows``: struct of an entry where the value is a list of tables.
    """

    name: str
    type: Any
    default: Any
    about: str
    unit: str
    rows: type[msgspec.Struct] | None = None

    @property
    def env(self) -> str:
        """Environment variable that sets it."""
        return ENV_PREFIX + self.name.upper().replace(".", "__")

    def show(self, value: Any) -> str:
        """Format a value as TOML that reads back as the same value."""
        if self.unit:
            value = _UNITS[self.unit][1](value)
        return _toml(msgspec.to_builtins(value))

    def read(self, raw: Any, origin: str) -> Any:
        """Parse and check a value from TOML, environment or flag, where lists of tables are JSON unless in TOML.

        Raises ConfigError, naming the origin.
        """
        typed = origin.startswith("file")
        try:
            if self.unit and isinstance(raw, str):
                raw = _UNITS[self.unit][0](raw)
            if self.rows is not None and isinstance(raw, str) and not typed:
                return msgspec.json.decode(raw, type=self.type)
            # Outside TOML text has no types, so "4" is accepted for a number; a TOML value must have the right type.
            return msgspec.convert(raw, self.type, strict=typed)
        except (msgspec.MsgspecError, ConfigError) as error:
            why, fix = str(error), f"The default is {self.show(self.default)}"
            if isinstance(error, ConfigError):
                why, fix = error.what, error.fix
            if self.rows is not None:
                names = ", ".join(field.name for field in msgspec.structs.fields(self.rows))
                fix = f"Each entry is a table with {names}; outside of a file the list is written as JSON"
            raise ConfigError(f"{self.name} cannot be {raw!r}: {why}", where=origin, fix=fix) from None


@cache  # working it out takes 5 ms, and fields of a schema never change
def settings(schema: type[msgspec.Struct] = Settings, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a schema, in order."""
    found: list[Setting] = []
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        hint, name = hints[field.name], prefix + field.name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += settings(hint, f"{name}.")
            continue
        plain, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        meta = next((m for m in metas if isinstance(m, msgspec.Meta)), msgspec.Meta())
        rows = next((t for t in get_args(plain) if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)
        about, unit = meta.description or "", (meta.extra or {}).get("unit", "")
        found.append(Setting(name, hint, field.default, about, unit, rows))
    return tuple(found)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return msgspec.json.encode(value).decode()
