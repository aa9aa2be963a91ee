"""Several models in a daemon: named in requests, loaded on demand, unloaded when idle or when others need the room."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_edge.models import ModelName, ServedModel, ServedModels, parse_keep_alive

from ctxreuse.engines import open_engine
from ctxreuse.engines.process import ChildEngine
from ctxreuse.errors import ConfigError
from ctxreuse.runtime import Runtime
from support.tiny_gguf import write_tiny_gguf
from support.waiting import patient, until

QUESTION = {"messages": [{"role": "user", "content": "What is in the box? " * 8}], "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models."""
    folder = tmp_path_factory.mktemp("gguf")
    return [write_tiny_gguf(folder / f"{name}.gguf", seed=seed) for seed, name in enumerate("ab")]


@pytest.fixture
def opened(files: list[Path]) -> Iterator[ChildEngine]:
    """The first of them, in a process."""
    engine = open_engine(files[0], isolate=True, threads=1)
    assert isinstance(engine, ChildEngine)
    yield engine
    engine.close()


@pytest.fixture
def two(serve: Any, opened: ChildEngine, files: list[Path]) -> Any:
    """two(**settings): a daemon with both."""

    def start(**flags: Any) -> Any:
        rows = [{"model": str(files[1]), "name": "second"}]
        known = {"engine.model": str(files[0]), "engine.threads": 1, "edge.models": rows}
        return serve(engine=opened, **{**known, **flags})

    return start


def ask(edge: Any, model: str = "", **more: Any) -> dict[str, Any]:
    answer = edge.http.post("/v1/chat/completions", json=QUESTION | {"model": model} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def states(edge: Any) -> dict[str, str]:
    return {one["id"]: one["state"] for one in edge.http.get("/api/status").json()["models"]}


def sources(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]["sources"]
    return found


def test_each_request_gets_the_model_it_names(two: Any, files: list[Path]) -> None:
    edge = two()
    assert states(edge) == {"a.gguf": "up", "second": "unloaded"}
    listed = edge.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [("a.gguf", 2048), ("second", None)]
    first, second = ask(edge), ask(edge, "second")
    assert (first["model"], second["model"]) == ("a.gguf", "second")
    assert first["choices"] != second["choices"]
    assert first["system_fingerprint"] != second["system_fingerprint"]
    assert states(edge) == {"a.gguf": "up", "second": "up"}
    assert edge.http.get("/v1/models/second").json()["max_model_len"] == 2048
    for name in ("", "default", "a.gguf", str(files[0])):
        assert ask(edge, name)["choices"] == first["choices"]
    again = ask(edge, str(files[1]))
    assert again["choices"] == second["choices"]
    assert sources(again)["device"] > 64
    refused = edge.http.post("/v1/completions", json={"model": "third", "prompt": "x"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'a.gguf', 'second'" in error["message"]
    assert edge.http.get("/v1/models/third").status_code == 404


def test_of_two_models_of_which_one_fits_the_idle_one_makes_room(two: Any) -> None:
    edge = two(**{"edge.models_bytes": 1 << 20})
    first = ask(edge)
    second = ask(edge, "second")
    assert states(edge) == {"a.gguf": "unloaded", "second": "up"}
    until(lambda: edge.http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
    again = ask(edge)
    assert again["choices"] == first["choices"]
    assert sources(again).get("device", 0) == 0  # its contexts in memory are lost, what was stored is not
    assert sum(sources(again)[tier] for tier in ("host", "disk")) > 64
    assert states(edge) == {"a.gguf": "up", "second": "unloaded"}
    # While one answers, the other waits.
    body = QUESTION | {"stream": True, "max_tokens": 500, "ignore_eos": True}
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(ask(edge, "second")))
    with edge.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        waiting.start()
        until(lambda: edge.http.get("/api/status").json()["models"][1]["running"] == 1)
        assert states(edge) == {"a.gguf": "up", "second": "unloaded"}
        rest = [line for line in lines if line]
    assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 500
    waiting.join(patient(30))
    assert found[0]["choices"] == second["choices"]
    assert states(edge)["a.gguf"] == "unloaded"


def test_a_request_may_say_how_long_its_model_stays(two: Any) -> None:
    edge = two()
    first = ask(edge, keep_alive=0)
    until(lambda: states(edge)["a.gguf"] == "unloaded")
    again = ask(edge, keep_alive="5m")
    assert again["choices"] == first["choices"]
    assert states(edge)["a.gguf"] == "up"
    refused = edge.http.post("/v1/chat/completions", json=QUESTION | {"keep_alive": "soon"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")


def test_idle_models_are_unloaded_after_their_time(opened: ChildEngine) -> None:
    now = 0.0
    model = ServedModel(ModelName("a", ""), "a", lambda: Runtime(opened))
    models = ServedModels([model], keep_alive=300.0, clock=lambda: now)
    with models.using(model):
        now = 1000.0
        assert models.unload_idle() == math.inf
    assert models.unload_idle() == 300.0
    now = 1299.0
    assert models.unload_idle() == 1.0
    assert opened.state == "up"
    now = 1300.0
    ran: list[float] = []
    models.while_loaded(model, lambda: ran.append(models.unload_idle()))
    assert (ran, opened.state) == ([math.inf], "up")
    assert models.unload_idle() == math.inf
    assert opened.state == "unloaded"
    models.while_loaded(model, lambda: ran.append(0))
    assert (ran, opened.state) == ([math.inf], "unloaded")
    with models.using(model, math.inf):
        assert opened.state == "up"
    now = 1e9
    assert models.unload_idle() == math.inf
    assert opened.state == "up"


def test_words_of_keep_alive() -> None:
    found = [parse_keep_alive(value) for value in ("5m", 300, "0", 0, -1, "-1", "-1s", "1.5h")]
    assert found == [300, 300, 0, 0, math.inf, math.inf, math.inf, 5400]
    for wrong in ("soon", "", "-"):
        with pytest.raises(ConfigError):
            parse_keep_alive(wrong)


def test_two_models_of_one_name_are_refused(two: Any, files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="one name"):
        two(**{"edge.models": [{"model": str(files[0])}]})
