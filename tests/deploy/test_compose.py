"""The Compose files: Compose's own schema knows each field, and the sidecar's settings fit them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxreuse.config import load

DEPLOY = Path(__file__).parents[2] / "cloud" / "deploy"


class Reading(yaml.SafeLoader):
    """With `!reset`, which takes a field of the file before away."""


Reading.add_constructor("!reset", lambda loader, node: None)


def read(name: str) -> dict[str, Any]:
    return yaml.load((DEPLOY / name).read_text(), Reading)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_compose_knows_each_field(tmp_path: Path, name: str) -> None:
    file = tmp_path / "compose.json"
    file.write_text(json.dumps(read(name)))
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_files_that_are_named_exist() -> None:
    for name in ("compose.yaml", "compose.cpu.yaml"):
        for service in read(name)["services"].values():
            build = service.get("build")
            assert build is None or (DEPLOY / build["context"] / build["dockerfile"]).is_file()
            for volume in service.get("volumes", []):
                if volume.startswith("./"):
                    assert (DEPLOY / volume.split(":")[0]).is_file()


def test_the_sidecar_finds_vllm_and_its_events() -> None:
    services = read("compose.yaml")["services"]
    (backend,) = load(DEPLOY / "compose.toml", env={}).settings.cloud.backends
    command = services["vllm"]["command"]
    events = json.loads(command[command.index("--kv-events-config") + 1])
    assert backend.url == "http://vllm:" + next(one for one in command if "--port" in one).split("=")[1]
    assert [backend.kv_events[-4:], backend.kv_replay[-4:]] == [events[x][-4:] for x in ("endpoint", "replay_endpoint")]


def test_the_processors_file_adds_the_connector_alone() -> None:
    first, second = (read(name)["services"]["vllm"]["command"] for name in ("compose.yaml", "compose.cpu.yaml"))
    assert second[: len(first)] == first
    transfer = json.loads(second[len(first) + 1])
    kept = re.search(r"(/[\w/]+)$", transfer["kv_connector_extra_config"]["path"])
    assert kept is not None
    assert any(
        kept[1].startswith(volume.split(":")[1] + "/") for volume in read("compose.yaml")["services"]["vllm"]["volumes"]
    )
