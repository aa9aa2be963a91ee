"""Logs: one record, one line; fields of the request around it; what comes from outside cannot forge a line."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from ctxreuse.daemon import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    names = ["", "uvicorn", "asyncio", "ctxreuse", "ctxreuse_agents", "ctxreuse_cloud", "ctxreuse_edge"]
    before = [(name, logging.getLogger(name).level) for name in names]
    handlers = list(logging.getLogger().handlers)
    yield
    for name, level in before:
        logging.getLogger(name).setLevel(level)
    logging.getLogger().handlers = handlers


def test_json_lines() -> None:
    out = io.StringIO()
    logs.setup("json", "debug", out)
    log = logging.getLogger("ctxreuse.test")
    with logs.fields(request_id="r1"), logs.fields(tenant="t"):
        log.debug("made %d", 5, extra={"seconds": 0.5, "odd": object})
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["time"].endswith("Z")
    assert (first["level"], first["logger"], first["message"]) == ("debug", "ctxreuse.test", "made 5")
    assert (first["request_id"], first["tenant"], first["seconds"]) == ("r1", "t", 0.5)
    assert "request_id" not in second
    assert "ValueError: a\nb" in second["error"]


def test_text_lines_cannot_be_forged() -> None:
    out = io.StringIO()
    logs.setup("text", "info", out)
    logging.getLogger("ctxreuse_edge").info("said %s", "x\n2026 error forged", extra={"name_": 'a b"\nc', "n": 1})
    (line,) = out.getvalue().splitlines()
    assert line.endswith('name_="a b\\"\\nc" n=1')
    assert " info    ctxreuse_edge said x\\n2026 error forged " in line
    logging.getLogger("ctxreuse_edge").info("GET %s", "/\x1b[2J\r\u2028\u202eé")
    *_, line = out.getvalue().split("\n")[:-1]
    assert line.endswith(r"GET /\x1b[2J\r\u2028\u202eé")


def test_libraries_are_heard_from_warnings_on() -> None:
    out = io.StringIO()
    logs.setup("text", "debug", out)
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("somebody.else").warning("trouble")
    assert out.getvalue().count("\n") == 1
    logs.setup("text", "error", out)
    logging.getLogger("ctxreuse.bus").warning("hush")
    logging.getLogger("somebody.else").error("once only")
    assert out.getvalue().count("\n") == 2


def test_fields_belong_to_their_thread() -> None:
    out = io.StringIO()
    logs.setup("text", "info", out)
    with logs.fields(request_id="mine"):
        other = threading.Thread(target=lambda: logging.getLogger("ctxreuse").info("theirs"))
        other.start()
        other.join()
    assert "request_id" not in out.getvalue()
