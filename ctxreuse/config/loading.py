"""Load settings: defaults, then one TOML file, then ``CTXREUSE_*``, then flags; each value keeps its origin.

An environment variable names a setting by its path with double underscores: ``CTXREUSE_STORE__CAPACITY=8GB`` is
``store.capacity``.
"""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.config.schema import ENV_PREFIX, RENAMED, Setting, Settings, settings
from ctxreuse.errors import ConfigError

__all__ = ["LoadedSettings", "config_path", "example", "load"]

log = logging.getLogger(__name__)


class LoadedSettings(msgspec.Struct, frozen=True):
    """Settings, and where each value came from, by dotted name."""

    settings: Settings
    origins: dict[str, str]


def config_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return ``CTXREUSE_CONFIG``, else ``ctxreuse/config.toml`` in the user's config directory."""
    named = env.get("CTXREUSE_CONFIG")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return platformdirs.user_config_path("ctxreuse", appauthor=False) / "config.toml"


def load(
    path: str | Path | None = None, *, env: Mapping[str, str] = os.environ, flags: Mapping[str, Any] | None = None
) -> LoadedSettings:
    """Load settings from all sources.

    A file named by ``path`` or ``CTXREUSE_CONFIG`` must exist; the default one need not. A name of an earlier version
    (`RENAMED`) is read with a logged warning. ``flags``: values by dotted name; None: not given.

    Raises ConfigError for an unknown name (suggesting the nearest), an invalid value, or an unreadable file.
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
        for given, raw in found.items():
            name = RENAMED.get(given, given)
            setting = known.get(name)
            if setting is None:
                raise ConfigError(f"no setting is called {name!r}", where=source, fix=_nearest(name, list(known)))
            origin = f"env {ENV_PREFIX}{given.upper().replace('.', '__')}" if source == "env" else source
            if given != name:
                if name in found:
                    raise ConfigError(f"{given} and {name} are the same setting", where=source, fix=f"Remove {given}")
                log.warning("%s: the setting %s is called %s now; the old name will be removed", origin, given, name)
                origin += f" as {given}" if source != "env" else ""
            values[name], origins[name] = setting.read(raw, origin), origin
    return LoadedSettings(msgspec.convert(_nest(values), Settings), origins)


def example() -> str:
    """Return a TOML file that documents every setting, each commented out at its default."""
    lines, section = (
        ["# Settings of ctxreuse. Sizes are written as 8GB or 512MiB, times as 30s or 5m, rates as 1MB/s.", ""],
        "",
    )
    for setting in settings():
        head, _, name = setting.name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{head}]"] if len(lines) > 2 else [f"[{head}]"]
        lines.append(f"# {setting.about}. ({setting.env})")
        if setting.rows is not None:
            lines += [
                f"# One table [[{setting.name}]] per entry, at the end of this section:",
                *_columns(setting.rows),
            ]
        lines.append(f"# {name} = {setting.show(setting.default)}")
    return "\n".join(lines) + "\n"


def _columns(rows: type[msgspec.Struct]) -> Iterator[str]:
    for column in settings(rows):
        needed = column.default is msgspec.NODEFAULT
        yield f"#   {column.name}: {column.about}" + (" (required)" if needed else "")


def _file_values(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError("the config file does not exist", where=str(file), fix="Correct the path") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        fix = "Name a file in UTF-8 that you may read"
        raise ConfigError(f"the config file cannot be read: {error}", where=str(file), fix=fix) from None
    except tomllib.TOMLDecodeError as error:
        fix = "Correct that line; `ctxreuse config example` prints a whole file"
        raise ConfigError(f"the config file is not TOML: {error}", where=str(file), fix=fix) from None
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
    # A right name in the wrong section is a common mistake that edit distance does not find.
    near = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = near[:1] if near else difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else "`ctxreuse config show` lists all settings"
