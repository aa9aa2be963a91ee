"""Every setting there is: frozen structs, one a section of the file, with what each means, its unit and its default.

One TOML file serves every command: ``ctxreuse``, ``ctxreuse-edge`` and ``ctxreuse-cloud`` read the sections they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.units import format_bytes, format_duration, format_rate, parse_bytes, parse_duration, parse_rate

__all__ = [
    "ENV_PREFIX",
    "BackendConfig",
    "BusConfig",
    "CloudConfig",
    "EdgeConfig",
    "EngineConfig",
    "LinkConfig",
    "LogConfig",
    "Setting",
    "Settings",
    "StoreConfig",
    "settings",
]

ENV_PREFIX = "CTXREUSE_"

#: How a setting with a unit is read from text and written so that it reads back the same.
_UNITS: dict[str, tuple[Callable[[str], float], Callable[[Any], str]]] = {
    "bytes": (parse_bytes, format_bytes),
    "seconds": (parse_duration, format_duration),
    "bytes/s": (parse_rate, format_rate),
}


def _about(text: str, *, ge: int | None = None, gt: int | None = None, le: int | None = None, unit: str = "") -> Any:
    bounds: dict[str, Any] = {name: value for name, value in (("ge", ge), ("gt", gt), ("le", le)) if value is not None}
    return msgspec.Meta(description=text, extra={"unit": unit} if unit else None, **bounds)


def _in_data(path: str, name: str) -> Path:
    if path:
        return Path(path).expanduser()
    import platformdirs

    return platformdirs.user_data_path("ctxreuse", appauthor=False) / name


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where contexts are kept and how much of them."""

    path: Annotated[str, _about("Folder of the store; empty: the user's data folder")] = ""
    capacity: Annotated[int, _about("Bytes of KV kept on disk", ge=1 << 20, unit="bytes")] = 8_000_000_000
    host_bytes: Annotated[int, _about("Bytes of KV that may wait in memory for the disk", ge=0, unit="bytes")] = (
        256 << 20
    )
    policy: Annotated[
        str, _about("What is evicted first: lru, lfu, s3fifo, arc, gdsf, or duel (of some of them, as duel:lru,arc)")
    ] = "duel"
    level: Annotated[
        str, _about("How KV is kept: exact, exact+rans (packed), or kl-0.01 and the like for sessions that allow it")
    ] = "exact"
    demote: Annotated[bool, _about("Pack what is cold, and code it lossily where allowed, before any is evicted")] = (
        True
    )
    replay: Annotated[
        int, _about("Tokens rather computed again than that one more state (of a window, of an SSM) is kept", ge=0)
    ] = 0

    def folder(self) -> Path:
        """The folder of the store: ``path``, or ``store`` in the user's data folder."""
        return _in_data(self.path, "store")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model computes, and how."""

    model: Annotated[str, _about("A name that `ctxreuse model ls` knows, or a Hugging Face folder")] = "smollm2"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _about("Numeric type of weights and KV")] = "float32"
    threads: Annotated[int, _about("CPU threads of the engine; 0: one a core", ge=0)] = 0
    chunk: Annotated[int, _about("Tokens of one prefill step: more is faster and takes more memory", ge=1)] = 512
    whole: Annotated[bool, _about("Keep all tokens of sliding windows: larger blocks, reuse at any position")] = False
    repair: Annotated[
        str, _about("Most that mending moved KV may compute: 10%, 64 (tokens) or 200ms; empty: what its level asks for")
    ] = ""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the daemons say on standard error."""

    format: Annotated[Literal["text", "json"], _about("Lines for people (text) or one JSON object a line")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], _about("The least severe that is written")] = "info"


class LinkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cloud that this device may ask for contexts and give its own to."""

    endpoint: Annotated[str, _about("Address of the cloud's bus, such as tcp://cloud.example:7353")]
    server_key: Annotated[str, _about("The cloud's public key or its .pub file; empty: plain, on loopback only")] = ""
    name: Annotated[str, _about("What logs and `status` call it; empty: its endpoint")] = ""


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between devices and clouds."""

    clouds: Annotated[tuple[LinkConfig, ...], _about("Clouds to ask for contexts, the preferred one first")] = ()
    key_file: Annotated[str, _about("This node's secret key (`ctxreuse keys new`); empty: plain, on loopback only")] = (
        ""
    )
    bind: Annotated[str, _about("Where a cloud listens for devices")] = "tcp://127.0.0.1:7353"
    allow_file: Annotated[str, _about("Public keys that a cloud accepts (`ctxreuse keys allow`)")] = ""
    insecure: Annotated[bool, _about("Speak plain, unencrypted TCP beyond loopback too")] = False
    heartbeat: Annotated[
        float, _about("Silence after which a peer is asked for a sign of life", gt=0, unit="seconds")
    ] = 2.0
    max_payload: Annotated[
        int, _about("Largest piece of a block in one message", ge=1 << 12, le=16 << 20, unit="bytes")
    ] = 1 << 20


class EdgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The daemon of a device, ``ctxreuse-edge serve``."""

    host: Annotated[str, _about("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _about("Port of the HTTP API; 0: any free one", ge=0, le=65535)] = 7351
    api_key_file: Annotated[str, _about("File of keys, one a line, one of which a request must bear; empty: none")] = ""
    max_waiting: Annotated[int, _about("Requests that may wait or run at once; more are told to come back", ge=1)] = 32
    max_body: Annotated[int, _about("Largest request", ge=1 << 10, unit="bytes")] = 16 << 20
    live_bytes: Annotated[
        int, _about("Memory for contexts that stay in the engine between requests", ge=0, unit="bytes")
    ] = 1 << 30
    drain: Annotated[
        float, _about("How long answers under way may take once the daemon was told to stop", ge=0, unit="seconds")
    ] = 30.0
    lossy: Annotated[
        str, _about("Worst level at which requests may reuse KV, such as kl-0.01 (less is sent); empty: exact only")
    ] = ""
    record: Annotated[
        str, _about("File to record requests in, as hashes and counts for `ctxreuse replay`; empty: off")
    ] = ""
    record_bytes: Annotated[
        int, _about("Disk that recordings may take, older ones included", ge=1 << 20, unit="bytes")
    ] = 1_000_000_000
    why: Annotated[
        Literal["text", "hashes"], _about("Kept of recent requests, to explain misses: ids of their text, or hashes")
    ] = "text"
    sync: Annotated[bool, _about("Give clouds the contexts that they lack while nothing else is to do")] = True
    sync_rate: Annotated[float, _about("Most that sync sends; 0 is no limit", ge=0, unit="bytes/s")] = 0.0


class BackendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One OpenAI-compatible server that the cloud sidecar stands in front of."""

    url: Annotated[str, _about("Where it listens, without /v1, such as http://127.0.0.1:8000")]
    name: Annotated[str, _about("What logs and metrics call it; empty: its address")] = ""
    api_key_file: Annotated[str, _about("File with the key that it wants; empty: none")] = ""
    cache_salt: Annotated[bool, _about("It keeps tenants' prefix caches apart by `cache_salt`, as vLLM does")] = False
    max_inflight: Annotated[int, _about("Requests that it may have at once; 0 is no limit", ge=0)] = 0
    health: Annotated[str, _about("Path that answers 200 while it is well; empty: /health, else /v1/models")] = ""


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sidecar of a cloud, ``ctxreuse-cloud serve``. Its bus is set in ``[bus]``."""

    host: Annotated[str, _about("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _about("Port of the HTTP API; 0: any free one", ge=0, le=65535)] = 7352
    store: Annotated[str, _about("Folder of the cloud's own store; empty: `cloud` in the user's data folder")] = ""
    store_bytes: Annotated[int, _about("Bytes of KV kept on its disk", ge=1 << 20, unit="bytes")] = 32_000_000_000
    backends: Annotated[tuple[BackendConfig, ...], _about("Servers that answer requests")] = ()
    keys_file: Annotated[
        str,
        _about(
            "Whose requests are answered (`ctxreuse-cloud tenants`); empty: all, as tenant default, on loopback only"
        ),
    ] = ""
    tenant_requests: Annotated[int, _about("Requests that one tenant may have at once; 0 is no limit", ge=0)] = 64
    attempts: Annotated[int, _about("Backends that a request is tried on at most", ge=1, le=10)] = 3
    connect: Annotated[float, _about("How long connecting to a backend may take", gt=0, unit="seconds")] = 2.0
    silence: Annotated[
        float, _about("How long a backend or a caller may be silent in an answer", gt=0, unit="seconds")
    ] = 300.0
    health: Annotated[float, _about("How often backends are looked at", gt=0, unit="seconds")] = 5.0
    prefill_workers: Annotated[int, _about("Engine processes that compute contexts for devices", ge=0, le=64)] = 1
    max_waiting: Annotated[int, _about("Requests that may wait or run at once; more are told to come back", ge=1)] = 256
    max_body: Annotated[int, _about("Largest request", ge=1 << 10, unit="bytes")] = 16 << 20
    record: Annotated[
        str, _about("File to record requests in, as hashes and counts for `ctxreuse replay`; empty: off")
    ] = ""
    record_bytes: Annotated[
        int, _about("Disk that recordings may take, older ones included", ge=1 << 20, unit="bytes")
    ] = 1_000_000_000
    drain: Annotated[
        float, _about("How long answers under way may take once the daemon was told to stop", ge=0, unit="seconds")
    ] = 30.0
    linger: Annotated[
        float, _about("How long /readyz says no before connections are refused", ge=0, unit="seconds")
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
    """One setting: dotted ``name``, its plain ``type``, ``default``, what it is ``about``, and its ``unit`` if any.

    ``rows`` is the struct of one entry where the value is a list of tables.
    """

    name: str
    type: Any
    default: Any
    about: str
    unit: str
    rows: type[msgspec.Struct] | None = None

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper().replace(".", "__")

    def show(self, value: Any) -> str:
        """The value as TOML that reads back as the same value."""
        if self.unit:
            value = _UNITS[self.unit][1](value)
        return _toml(msgspec.to_builtins(value))

    def read(self, raw: Any, origin: str) -> Any:
        """A checked value from TOML, environment or flag. Raises ConfigError naming the origin.

        Outside of TOML a list of tables is written as JSON.
        """
        typed = origin.startswith("file")
        try:
            if self.unit and isinstance(raw, str):
                raw = _UNITS[self.unit][0](raw)
            if self.rows is not None and isinstance(raw, str) and not typed:
                return msgspec.json.decode(raw, type=self.type)
            # Text from outside TOML has no types, so "4" must do for a number; a TOML value must have its own type.
            return msgspec.convert(raw, self.type, strict=typed)
        except (msgspec.MsgspecError, ConfigError) as error:
            fix = error.fix if isinstance(error, ConfigError) else f"The default is {self.show(self.default)}"
            if self.rows is not None:
                names = ", ".join(field.name for field in msgspec.structs.fields(self.rows))
                fix = f"Each entry is a table with {names}; outside of a file the list is written as JSON"
            raise ConfigError(f"{self.name} cannot be {raw!r}: {error}", where=origin, fix=fix) from None


def settings(schema: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a schema, in the order of its structs."""
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        hint, name = hints[field.name], prefix + field.name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from settings(hint, f"{name}.")
            continue
        plain, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        meta = next((m for m in metas if isinstance(m, msgspec.Meta)), msgspec.Meta())
        rows = next((t for t in get_args(plain) if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)
        yield Setting(name, hint, field.default, meta.description or "", (meta.extra or {}).get("unit", ""), rows)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return msgspec.json.encode(value).decode()
