"""Settings: each source beats the one before, each value knows where it came from, each slip is named."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import config
from ctxreuse.config import LinkConfig, Settings, load
from ctxreuse.config import settings as known
from ctxreuse.errors import ConfigError


def write(tmp_path: Path, text: str) -> dict[str, str]:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return {"CTXREUSE_CONFIG": str(file)}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose default config file does not exist."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    return {}


def test_defaults(bare: dict[str, str]) -> None:
    loaded = load(env=bare)
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == {setting.name for setting in config.settings()}


def test_each_source_beats_the_one_before(tmp_path: Path) -> None:
    env = write(tmp_path, '[store]\ncapacity = "1GB"\npolicy = "file"\nhost_bytes = 5\n[engine]\nthreads = 1\n')
    env |= {"CTXREUSE_STORE__CAPACITY": "2GB", "CTXREUSE_STORE__POLICY": "env"}
    loaded = load(env=env, flags={"store.capacity": "3GB", "engine.model": None})
    store = loaded.settings.store
    assert (store.capacity, store.policy, store.host_bytes) == (3_000_000_000, "env", 5)
    assert loaded.settings.engine.threads == 1
    origins = loaded.origins
    assert origins["store.capacity"] == "flag"
    assert origins["store.policy"] == "env CTXREUSE_STORE__POLICY"
    assert origins["store.host_bytes"] == f"file {tmp_path / 'config.toml'}"
    assert origins["engine.model"] == "default"


def test_a_path_beats_the_environment(tmp_path: Path) -> None:
    env = write(tmp_path, "[engine]\nthreads = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("[engine]\nthreads = 2\n")
    assert load(other, env=env).settings.engine.threads == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[store]\ncapasity = 5", "store.capacity"),
        ("[engine]\ncapacity = '1GB'", "store.capacity"),
        ("[sture]\npath = 'x'", "store.path"),
        ("[weather]\nwind_south_west = 1", "config show"),
        ("store = 5", "no setting is called 'store'"),
        ("[engine]\nthreads = '4'", "cannot be '4'"),
        ("[engine]\nthreads = -1", "cannot be -1"),
        ("[engine]\ndtype = 'float8'", "cannot be 'float8'"),
        ("[store]\ncapacity = '8GX'", "unknown unit"),
        ("[store]\ncapacity = 1.5", "cannot be 1.5"),
        ("[store", "not TOML"),
    ],
)
def test_slips_in_the_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(env=write(tmp_path, text))
    assert says in str(error.value)
    assert str(tmp_path) in error.value.where
    assert error.value.fix
    assert error.value.fix not in error.value.what, "advice is given once"


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("CTXREUSE_STORE__CAPASITY", "store.capacity"),
        ("CTXREUSE_STORE_CAPACITY", "CTXREUSE_STORE__CAPACITY"),
        ("CTXREUSE_ENGINE__THREADS", "cannot be 'many'"),
    ],
)
def test_slips_in_the_environment(bare: dict[str, str], variable: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(env={variable: "many"})
    assert says in str(error.value)


def test_other_variables_are_left_alone(bare: dict[str, str]) -> None:
    assert load(env={"CTXREUSE_KERNELS": "generic", "CTXREUSE_DEBUG": "1", "PATH": "x"}).settings == Settings()


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "no.toml", env={})
    with pytest.raises(ConfigError, match="does not exist"):
        load(env={"CTXREUSE_CONFIG": str(tmp_path / "no.toml")})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, env={})


def test_unknown_flags_are_named(bare: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.model"):
        load(env=bare, flags={"engine.modell": "x"})


def test_the_example_is_the_manual(tmp_path: Path) -> None:
    text = config.example()
    assert not any(tomllib.loads(text).values())
    assert load(env=write(tmp_path, text)).settings == Settings()
    # With every comment mark in front of a setting removed, it says the defaults.
    lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
    loaded = load(env=write(tmp_path, "\n".join(lines)))
    assert loaded.settings == Settings()
    assert "default" not in loaded.origins.values()


def test_every_setting_says_what_it_is() -> None:
    for setting in config.settings():
        assert setting.about
        assert setting.env == "CTXREUSE_" + setting.name.upper().replace(".", "__")


@given(st.integers(1 << 20, 1 << 60), st.text(st.characters(codec="utf-8"), max_size=20))
def test_shown_values_are_toml_that_reads_back(size: int, text: str) -> None:
    by_name = {setting.name: setting for setting in config.settings()}
    for name, value in (("store.capacity", size), ("engine.model", text)):
        shown = by_name[name].show(value)
        if "\x7f" not in text:  # legal in JSON, must be escaped in TOML
            assert by_name[name].read(tomllib.loads(f"x = {shown}")["x"], "file x") == value


def test_the_store_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store: Any = config.StoreConfig()
    assert store.folder() == tmp_path / "ctxreuse" / "store"
    assert config.StoreConfig(path="~/x").folder() == Path("~/x").expanduser()


CLOUDS = """
[bus]
key_file = "k"
heartbeat = "500ms"

[[bus.clouds]]
endpoint = "tcp://a:1"
name = "one"

[[bus.clouds]]
endpoint = "tcp://b:2"
server_key = "x"

[edge]
sync_rate = "2MB/s"
drain = "5m"
"""


def test_lists_of_tables_durations_and_rates(tmp_path: Path) -> None:
    loaded = load(env=write(tmp_path, CLOUDS))
    bus, edge = loaded.settings.bus, loaded.settings.edge
    assert bus.clouds == (LinkConfig("tcp://a:1", name="one"), LinkConfig("tcp://b:2", "x"))
    assert (bus.heartbeat, edge.sync_rate, edge.drain) == (0.5, 2_000_000, 300)
    assert loaded.origins["bus.clouds"].startswith("file ")


def test_a_list_from_a_variable_or_a_flag(tmp_path: Path) -> None:
    env = write(tmp_path, CLOUDS) | {"CTXREUSE_BUS__CLOUDS": '[{"endpoint": "tcp://c:3"}]'}
    loaded = load(env=env)
    assert loaded.settings.bus.clouds == (LinkConfig("tcp://c:3"),)
    assert loaded.origins["bus.clouds"] == "env CTXREUSE_BUS__CLOUDS"
    flagged = load(env=env, flags={"bus.clouds": [{"endpoint": "tcp://d:4"}]})
    assert flagged.settings.bus.clouds == (LinkConfig("tcp://d:4"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[bus.clouds]]\nname = 'x'", "endpoint"),
        ("[[bus.clouds]]\nendpoint = 'x'\nkey = 'y'", "bus.clouds"),
        ("[bus]\nclouds = 'x'", "each entry is a table"),
        ("[bus]\nheartbeat = 'soon'", "is not a duration"),
        ("[bus]\nheartbeat = 0", "bus.heartbeat"),
        ("[edge]\nsync_rate = '5'", "is not a rate"),
        ("[edge]\nport = 70000", "edge.port"),
        ("[edge]\nsync = 'yes'", "edge.sync"),
    ],
)
def test_slips_in_the_sections_of_daemons(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(env=write(tmp_path, text))
    assert says in str(error.value) or says.capitalize() in str(error.value)
    with pytest.raises(ConfigError, match="JSON"):
        load(env={"CTXREUSE_CONFIG": "/dev/null", "CTXREUSE_BUS__CLOUDS": "tcp://a:1"})


def test_what_is_shown_of_all_settings_reads_back(tmp_path: Path) -> None:
    settings = load(env=write(tmp_path, CLOUDS)).settings
    values = msgspec.structs.asdict(settings)
    shown = [f"{s.name} = {s.show(getattr(values[s.name.split('.')[0]], s.name.split('.')[1]))}" for s in known()]
    assert load(env=write(tmp_path, "\n".join(shown))).settings == settings


def test_the_example_explains_the_columns_of_tables() -> None:
    text = config.example()
    assert "[[bus.clouds]]" in text
    assert "#   endpoint: " in text
    assert "(required)" in text


def test_old_names_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = write(tmp_path, "[engine]\nwhole = true\n") | {"CTXREUSE_STORE__DEMOTE": "false"}
    loaded = load(env=env, flags={"edge.live_bytes": "5GB"})
    found = loaded.settings
    assert (found.engine.full_kv_for_windows, found.store.recompress, found.edge.context_cache_bytes) == (
        True,
        False,
        5_000_000_000,
    )
    assert loaded.origins["engine.full_kv_for_windows"] == f"file {tmp_path / 'config.toml'} as engine.whole"
    assert loaded.origins["store.recompress"] == "env CTXREUSE_STORE__DEMOTE"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "engine.whole is called engine.full_kv_for_windows now" in caplog.text


def test_an_old_and_a_new_name_in_one_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same setting"):
        load(env=write(tmp_path, "[engine]\nwhole = true\nfull_kv_for_windows = false\n"))
