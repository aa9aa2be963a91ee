"""Every setting of version 0.1.0 can still be given by its name of then, in a file, the environment or a flag."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ctxreuse.config import Settings, load

DATA = Path(__file__).with_name("data") / "settings"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text("utf-8"))
DEPLOYED: dict[str, dict[str, Any]] = json.loads((DATA / "deployed.json").read_text("utf-8"))

#: Defaults that have another name now. A type that suits the device is float32 where there was no other device.
NEW_VALUES = {
    ("edge.max_waiting", "32"): 128,
    ("store.policy", "duel"): "adaptive",
    ("engine.dtype", "float32"): "auto",
    ("bus.max_payload", "1048576"): 4 << 20,
}


def flat(settings: Settings) -> dict[str, Any]:
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    return {f"{section}.{name}": value for section, table in plain.items() for name, value in table.items()}


def read(**given: Any) -> dict[str, Any]:
    """All values as loaded; an old name may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return flat(load(given.pop("path", None), **({"env": {}} | given)).settings)


def changed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not the default."""
    usual = read()
    return {name: value for name, value in found.items() if value != usual[name]}


@pytest.mark.parametrize("name", EXPECTED)
def test_one_at_a_time(name: str, tmp_path: Path) -> None:
    """A name of then sets one setting, whatever it is called now, to the same value from every source."""
    known = EXPECTED[name]
    section, _, last = name.partition(".")
    file = tmp_path / "config.toml"
    file.write_text(f"[{section}]\n{last} = {known['toml']}\n", "utf-8")
    found = [read(path=file), read(env={known["env"]: known["raw"]}), read(flags={name: known["raw"]})]
    assert found[0] == found[1] == found[2]
    assert list(changed(found[0]).values()) == [known["value"]]


def test_all_at_once() -> None:
    found = changed(read(path=DATA / "all.toml"))
    assert len(found) == len(EXPECTED)
    assert sorted(map(str, found.values())) == sorted(str(known["value"]) for known in EXPECTED.values())


@pytest.mark.parametrize("face", DEPLOYED)
def test_deployed(face: str) -> None:
    """The files that were meant to be copied and edited."""
    found = changed(read(path=DATA / f"{face}.toml"))
    assert sorted(map(str, found.values())) == sorted(map(str, DEPLOYED[face].values()))


def test_defaults() -> None:
    """What a user left unsaid still means the same."""
    usual = read()
    for name, known in EXPECTED.items():
        if name in usual:
            assert usual[name] == NEW_VALUES.get((name, str(known["default"])), known["default"]), name
