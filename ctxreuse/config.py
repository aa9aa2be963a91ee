"""Settings: frozen structs, filled from defaults, then one TOML file, then ``CTXREUSE_*``, then flags.

Every value keeps its origin, so that ``ctxreuse config show --origin`` can say why it is what it is. An environment
variable names a setting by its path with double underscores: ``CTXREUSE_STORE__CAPACITY=8GB`` is ``store.capacity``.
Which settings exist, their units and what they mean stands in the structs here and nowhere else.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.units import format_bytes, parse_bytes

__all__ = ["EngineConfig", "Loaded", "Setting", "Settings", "StoreConfig", "config_path", "example", "load", "settings"]

ENV_PREFIX = "CTXREUSE_"
_UNIT = {"unit": "bytes"}


def _about(text: str, *, ge: int | None = None, size: bool = False) -> Any:
    return msgspec.Meta(description=text, ge=ge, extra=_UNIT if size else None)


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where contexts are kept and how much of them."""

    path: Annotated[str, _about("Folder of the store; empty: the user's data folder")] = ""
    capacity: Annotated[int, _about("Bytes of KV kept on disk", ge=1 << 20, size=True)] = 8_000_000_000
    host_bytes: Annotated[int, _about("Bytes of KV that may wait in memory for the disk", ge=0, size=True)] = 256 << 20
    policy: Annotated[str, _about("What is evicted first when the store is full")] = "lru"

    def folder(self) -> Path:
        """The folder of the store: ``path``, or ``store`` in the user's data folder."""
        if self.path:
            return Path(self.path).expanduser()
        import platformdirs

        return platformdirs.user_data_path("ctxreuse", appauthor=False) / "store"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model computes, and how."""

    model: Annotated[str, _about("A name that `ctxreuse model ls` knows, or a Hugging Face folder")] = "smollm2"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _about("Numeric type of weights and KV")] = "float32"
    threads: Annotated[int, _about("CPU threads of the engine; 0: one a core", ge=0)] = 0
    chunk: Annotated[int, _about("Tokens of one prefill step: more is faster and takes more memory", ge=1)] = 512


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the core, by section."""

    store: StoreConfig = StoreConfig()
    engine: EngineConfig = EngineConfig()


class Setting(NamedTuple):
    """One setting: dotted ``name``, its plain ``type``, ``default``, what it is ``about``, and its ``unit`` if any."""

    name: str
    type: Any
    default: Any
    about: str
    unit: str

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper().replace(".", "__")

    def show(self, value: Any) -> str:
        """The value as TOML that reads back as the same value."""
        if self.unit == "bytes":
            value = format_bytes(value)
        return msgspec.json.encode(value).decode()

    def read(self, raw: Any, origin: str) -> Any:
        """A checked value from TOML, environment or flag. Raises ConfigError naming the origin."""
        try:
            if self.unit == "bytes" and isinstance(raw, str):
                raw = parse_bytes(raw)
            # Text from outside TOML has no types, so "4" must do for a number; a TOML value must have its own type.
            return msgspec.convert(raw, self.type, strict=origin.startswith("file"))
        except (msgspec.ValidationError, ConfigError) as error:
            fix = error.fix if isinstance(error, ConfigError) else f"The default is {self.show(self.default)}"
            raise ConfigError(f"{self.name} cannot be {raw!r}: {error}", where=origin, fix=fix) from None


class Loaded(msgspec.Struct, frozen=True):
    """Settings as loaded, and the ``origins`` of their values by dotted name."""

    settings: Settings
    origins: dict[str, str]


def settings(schema: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a schema, in the order of its structs."""
    hints = get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        hint, name = hints[field.name], prefix + field.name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from settings(hint, f"{name}.")
            continue
        meta = next(m for m in get_args(hint) if isinstance(m, msgspec.Meta)) if get_origin(hint) is Annotated else None
        about = (meta.description if meta else None) or ""
        yield Setting(name, hint, field.default, about, (meta.extra or {}).get("unit", "") if meta else "")


def config_path(env: Mapping[str, str] = os.environ) -> Path:
    """The config file: ``CTXREUSE_CONFIG``, else ``ctxreuse/config.toml`` in the user's config folder."""
    named = env.get("CTXREUSE_CONFIG")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return platformdirs.user_config_path("ctxreuse", appauthor=False) / "config.toml"


def load(
    path: str | Path | None = None, *, env: Mapping[str, str] = os.environ, flags: Mapping[str, Any] | None = None
) -> Loaded:
    """Settings from all sources. ``flags`` are dotted names; None values are flags that were not given.

    A file named by ``path`` or ``CTXREUSE_CONFIG`` must exist; the default one need not. Raises ConfigError for an
    unknown name (with the nearest known one), a value out of range, or a file that cannot be read.
    """
    known = {setting.name: setting for setting in settings()}
    values = {name: setting.default for name, setting in known.items()}
    origins = dict.fromkeys(known, "default")
    file = Path(path).expanduser() if path else config_path(env)
    layers = [
        (f"file {file}", _file_values(file, required=bool(path or env.get("CTXREUSE_CONFIG")))),
        ("env", _env_values(env, known)),
        ("flag", {name: raw for name, raw in (flags or {}).items() if raw is not None}),
    ]
    for source, found in layers:
        for name, raw in found.items():
            setting = known.get(name)
            if setting is None:
                raise ConfigError(f"no setting is called {name!r}", where=source, fix=_nearest(name, list(known)))
            origin = f"env {setting.env}" if source == "env" else source
            values[name], origins[name] = setting.read(raw, origin), origin
    return Loaded(msgspec.convert(_nest(values), Settings), origins)


def example() -> str:
    """A config file that documents every setting, each commented out at its default; it is valid TOML."""
    lines, section = ["# Settings of ctxreuse. Sizes are written as 8GB or 512MiB.", ""], ""
    for setting in settings():
        head, _, name = setting.name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{head}]"] if len(lines) > 2 else [f"[{head}]"]
        lines += [f"# {setting.about}. ({setting.env})", f"# {name} = {setting.show(setting.default)}"]
    return "\n".join(lines) + "\n"


def _file_values(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError("the config file does not exist", where=str(file), fix="Correct its path") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=str(file)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file is not TOML: {error}", where=str(file)) from None
    return dict(_flatten(tables))


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *heads, last = name.split(".")
        table = tree
        for head in heads:
            table = table.setdefault(head, {})
        table[last] = value
    return tree


def _env_values(env: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, str]:
    single = {setting.env.replace("__", "_"): setting.env for setting in known.values()}
    found = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in single and variable != single[variable]:
            raise ConfigError(f"no setting is called {variable}", where="env", fix=f"Did you mean {single[variable]}?")
        if "__" in variable:
            found[variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")] = raw
    return found


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        # A right name in the wrong section is a common slip that edit distance does not see.
        near = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"Did you mean {near[0]}?" if near else "`ctxreuse config show` lists all settings"
