"""The daemon records its traffic, if it is told to, and answers whether or not the file can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.lab import open_trace
from ctxreuse.lab.recording import recording_head
from ctxreuse.lab.trace import END_OF_TURN

LONG = "tell me of the plan that nobody knows " * 12


def ask(edge: Any, *texts: str) -> Any:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    done = edge.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
    assert done.status_code == 200
    return done.json()


def test_a_daemon_that_records(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    edge = serve(**{"edge.record": str(file)})
    said = ask(edge, LONG)
    others = ask(edge, LONG, said["choices"][0]["message"]["content"], "go on " * 30), ask(edge, "something else " * 20)
    space = edge.node.runtime.engine.space
    edge.close()
    assert b"nobody" not in file.read_bytes()
    head = recording_head(file)
    assert (head.block_tokens, head.token_bytes) == (space.block_tokens, space.token_nbytes)
    first, second, third = open_trace(file)
    assert first.tokens > len(LONG)
    assert second.path[: len(first.path)].tolist() == first.path.tolist()
    assert (first.session, second.session, third.session) == (0, 0, 1)
    assert not set(third.path.tolist()) & set(second.path.tolist())
    answered = [body["usage"]["completion_tokens"] for body in (said, *others)]  # fewer than asked if the model ends
    assert [request.output for request in (first, second, third)] == answered
    assert all(request.busy > 0 for request in (first, second, third))
    assert all(request.stop in (0, END_OF_TURN, 3) for request in (first, second, third))


def test_it_is_off_by_default(edge: Any) -> None:
    ask(edge, "hello")
    assert edge.node.runtime.recorder is None


def test_a_disk_that_fails_fails_no_request(serve: Any, tmp_path: Path) -> None:
    edge = serve(**{"edge.record": str(tmp_path / "traffic.jsonl"), "edge.record_bytes": 1 << 20})
    recorder = edge.node.runtime.recorder

    class Full:
        """A disk without room."""

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(kept, name)

    kept, recorder._file = recorder._file, Full()
    ask(edge, LONG)
    edge.close()
    assert recorder.figures.errors >= 1


def test_a_file_that_cannot_be_made_is_said_at_once(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="recording cannot be written"):
        serve(**{"edge.record": str(tmp_path / "file" / "traffic.jsonl")})
