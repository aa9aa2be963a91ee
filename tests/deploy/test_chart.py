"""The Helm chart: what it renders is what Kubernetes, vLLM and the sidecar understand, and the sidecar runs with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ctxreuse.config import load

ROOT = Path(__file__).parents[2]
CHART = ROOT / "cloud" / "deploy" / "helm"
HELM = os.environ["HELM"]
NEEDED = {"keys": {"existingSecret": "ctxreuse-keys"}, "vllm": {"model": "/models/llama"}}
BUS = {"bus": {"enabled": True, "existingSecret": "ctxreuse-bus"}}
VALUES: dict[str, dict[str, Any]] = {
    "least": {},
    "bus": BUS,
    "processors": {
        "vllm": {
            "replicas": 1,
            "image": {"repository": "ctxreuse-vllm", "tag": "cpu"},
            "connector": {"enabled": True, "capacity": "100GB"},
            "resources": {"requests": {"cpu": "8", "memory": "32Gi"}},
            "servedName": "llama",
            "args": ["--dtype=bfloat16"],
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "storage": {"className": "fast"},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "llm", "operator": "Exists"}],
        }
    },
    "monitored": {
        "keys": {"adminSecret": "ctxreuse-admin"},
        "serviceMonitor": {
            "enabled": True, "labels": {"release": "prometheus"}, "keySecret": {"name": "scraper", "key": "key"},
        },
    },
    "others": {
        "vllm": {"enabled": False},
        "backends": [
            {"url": "http://llama:8080", "name": "llama", "max_inflight": 8, "cache_salt": False},
            {"url": "https://api.example", "api_key_file": "/etc/ctxreuse/keys/theirs"},
        ],
        "sidecar": {
            "settings": {
                "cloud.tenant_requests": 16, "cloud.backend_tokens": 25_000_000, "cloud.router": "affinity",
                "cloud.silence": 7.5, "log.level": "debug",
            },
        },
        "imagePullSecrets": [{"name": "registry"}],
    },
}  # fmt: skip


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def helm(tmp_path: Path, command: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    line = [HELM, *command.split(), str(CHART), "-f", str(file)]
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    return subprocess.run(line, capture_output=True, text=True, check=False, env=home)


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """render(values, …) -> the objects."""

    def start(*values: dict[str, Any]) -> list[dict[str, Any]]:
        done = helm(tmp_path, "template test --namespace llm", merged(NEEDED, *values))
        assert done.returncode == 0, done.stderr
        return [one for one in yaml.safe_load_all(done.stdout) if one]

    return start


def one(objects: list[dict[str, Any]], kind: str, end: str = "") -> dict[str, Any]:
    (found,) = (thing for thing in objects if thing["kind"] == kind and thing["metadata"]["name"].endswith(end))
    return found


def settings_of(objects: list[dict[str, Any]], tmp_path: Path) -> Any:
    """What the sidecar reads: the file, and the variables of its container."""
    file = tmp_path / "cloud.toml"
    file.write_text(one(objects, "ConfigMap")["data"]["cloud.toml"])
    (container,) = one(objects, "StatefulSet", "ctxreuse-cloud")["spec"]["template"]["spec"]["containers"]
    return load(file, env={variable["name"]: variable["value"] for variable in container.get("env", [])}).settings


@pytest.mark.parametrize("name", VALUES)
def test_lint(tmp_path: Path, name: str) -> None:
    done = helm(tmp_path, "lint --strict", merged(NEEDED, VALUES[name]))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kubernetes", ["1.25", "1.31", "1.37"])
@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_knows_each_field(render: Any, name: str, kubernetes: str) -> None:
    for thing in render(VALUES[name]):
        if thing["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(thing, kubernetes, strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_parts_find_each_other(render: Any, name: str) -> None:
    objects = render(VALUES[name])
    pods = [thing["spec"]["template"] for thing in objects if thing["kind"] == "StatefulSet"]
    ports = [{port["name"] for one in pod["spec"]["containers"] for port in one["ports"]} for pod in pods]
    for thing in objects:
        if thing["kind"] == "Service":
            chosen = thing["spec"]["selector"].items()
            (number,) = (n for n, pod in enumerate(pods) if chosen <= pod["metadata"]["labels"].items())
            assert {port["targetPort"] for port in thing["spec"]["ports"]} <= ports[number]
        elif thing["kind"] == "StatefulSet":
            chosen = thing["spec"]["selector"]["matchLabels"].items()
            assert chosen <= thing["spec"]["template"]["metadata"]["labels"].items()
            assert one(objects, "Service", thing["spec"]["serviceName"].removeprefix("test-"))
            mounted = {m["name"] for c in thing["spec"]["template"]["spec"]["containers"] for m in c["volumeMounts"]}
            volumes = {v["name"] for v in thing["spec"]["template"]["spec"]["volumes"]}
            assert mounted == volumes | {claim["metadata"]["name"] for claim in thing["spec"]["volumeClaimTemplates"]}


def test_each_replica_is_a_backend(render: Any, tmp_path: Path) -> None:
    objects = render({"vllm": {"replicas": 3}})
    backends = settings_of(objects, tmp_path).cloud.backends
    vllm = one(objects, "StatefulSet", "-vllm")
    assert [backend.url for backend in backends] == [
        f"http://{vllm['metadata']['name']}-{n}.{vllm['spec']['serviceName']}:8000" for n in range(3)
    ]
    assert all(backend.cache_salt and backend.kv_events.endswith(":5557") for backend in backends)
    assert settings_of(render({"vllm": {"events": False}}), tmp_path).cloud.backends[0].kv_events == ""


def test_settings(render: Any, tmp_path: Path) -> None:
    found = settings_of(render(VALUES["others"]), tmp_path)
    assert (found.cloud.tenant_requests, found.cloud.backend_tokens, found.cloud.silence) == (16, 25_000_000, 7.5)
    assert (found.cloud.router, found.log.level, found.cloud.prefill_workers) == ("affinity", "debug", 0)
    llama, theirs = found.cloud.backends
    assert (llama.name, llama.max_inflight, theirs.api_key_file) == ("llama", 8, "/etc/ctxreuse/keys/theirs")
    found = settings_of(render(BUS), tmp_path)
    assert (found.bus.bind, found.cloud.prefill_workers) == ("tcp://0.0.0.0:7353", 1)
    assert found.bus.key_file == "/etc/ctxreuse/bus/cloud.key"


def test_arguments_of_vllm(render: Any) -> None:
    (container,) = one(render(VALUES["processors"]), "StatefulSet", "-vllm")["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    events, transfer = (json.loads(arguments[arguments.index(f"--kv-{x}-config") + 1]) for x in ("events", "transfer"))
    assert events["endpoint"] == "tcp://*:5557"
    assert transfer["kv_connector_module_path"] == "ctxreuse_cloud.connectors.vllm"
    assert transfer["kv_connector_extra_config"] == {"path": "/models/ctxreuse", "capacity": "100GB"}
    assert arguments[-1] == "--dtype=bfloat16"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"vllm": {"replica": 2}}, "replica"),
        ({"vllm": {"replicas": 0}}, "replicas"),
        ({"sidecar": {"storage": {"store": "40"}}}, "store"),
        ({"sidecar": {"settings": {"edge.port": 1}}}, "edge.port"),
        ({"backends": [{"name": "x"}]}, "url"),
        ({"keys": {"existingSecret": ""}}, "tenants add"),
        ({"vllm": {"model": ""}}, "vllm.model is empty"),
        ({"vllm": {"enabled": False}}, "nothing behind the sidecar"),
        ({"bus": {"enabled": True}}, "bus.existingSecret is empty"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    done = helm(tmp_path, "template test", merged(NEEDED, values))
    assert done.returncode != 0
    assert says in done.stderr


@contextmanager
def running(line: list[str], tmp_path: Path) -> Iterator[str]:
    """The sidecar's address, while it runs."""
    ready = tmp_path / "ready"
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with subprocess.Popen([*line, "--ready-file", str(ready)], env=env) as child:
        try:
            end = time.monotonic() + 120
            while not ready.exists():
                assert child.poll() is None, "the sidecar ended"
                assert time.monotonic() < end, "the sidecar is not ready"
                time.sleep(0.1)
            yield json.loads(ready.read_text())["url"]
        finally:
            child.terminate()
            child.wait(60)


def asked(url: str) -> int:
    """The status of the answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_sidecar_runs_with_the_rendered_settings_and_answers_the_probes(render: Any, tmp_path: Path) -> None:
    """But for addresses and folders, which are those of a pod."""
    objects = render(VALUES["monitored"])
    text = one(objects, "ConfigMap")["data"]["cloud.toml"]
    text = (
        text.replace("0.0.0.0", "127.0.0.1").replace("port = 7352", "port = 0").replace("/etc/ctxreuse", str(tmp_path))
    )
    file = tmp_path / "cloud.toml"
    file.write_text(re.sub(r"^\[cloud\]$", f'[cloud]\nstore = "{tmp_path}/store"', text, flags=re.MULTILINE))
    (tmp_path / "admin").mkdir()
    (tmp_path / "admin" / "admin").write_text("0" * 32)
    program = [str(Path(os.sys.executable).with_name("ctxreuse-cloud")), "--config", str(file)]  # type: ignore[attr-defined]
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run([*program, "tenants", "add", "me"], check=True, env=env, stdout=subprocess.DEVNULL)
    (container,) = one(objects, "StatefulSet", "ctxreuse-cloud")["spec"]["template"]["spec"]["containers"]
    with running([*program, "serve", "--bus", "tcp://127.0.0.1:0"], tmp_path) as url:
        for probe, status in (
            ("livenessProbe", {200}),
            ("startupProbe", {200}),
            ("readinessProbe", {200, 503}),
        ):  # no backend is there
            assert asked(url + container[probe]["httpGet"]["path"]) in status
