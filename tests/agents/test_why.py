"""Sessions explain their misses: in this process, over restarts, and through a daemon; what is deleted is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory

from ctxreuse.errors import SessionError

SYSTEM = "You keep the log of a lighthouse. The lamp is lit at dusk and put out at dawn. " * 3


def test_a_session_says_what_is_new_and_what_was_forgotten(tmp_path: Path, engine: Any) -> None:
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.create("log")
        session.system(SYSTEM)
        first = session.ask("Was the lamp lit? " * 5, max_tokens=70, temperature=0.0, ignore_eos=True)
        assert first.usage.why == "new"
        assert first.text
        assert first.why().reason == "new"
        second = session.ask("And yesterday? " * 9, max_tokens=4, temperature=0.0)
        assert second.text
        found = second.why()
        assert found == session.why() == session.why(second.usage.request)
        assert found.session == session.id
        assert [part.name for part in found.parts] == ["system", "user", "assistant", "user"]
        assert found.difference is not None
        assert found.difference.kind == "grown"
        assert found.difference.request == first.usage.request
        fork = session.fork("edited", at=session.turns()[0])
        fork.user("Was the lamp out? " * 5)
        asked = fork.complete(max_tokens=2, temperature=0.0)
        other = asked.why()
        assert asked.text
        assert other.difference is not None
        assert (other.difference.part, other.difference.name) == (2, "user")
        assert other.difference.character == len("Was the lamp ")
        assert (other.difference.here[:3], other.difference.there[:3]) == ("out", "lit")
        memory.flush()
        assert session.evict()
        again = session.ask("And today?", max_tokens=2, temperature=0.0)
        assert again.usage.why == "dropped"
        assert "they were forgotten on request" in again.why().text
        again.close()


def test_it_outlives_the_process_and_goes_with_the_session(tmp_path: Path, engine: Any) -> None:
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.create("log")
        session.system(SYSTEM)
        session.ask("Was the lamp lit?", max_tokens=2, temperature=0.0).close()
        memory.create("other").user(SYSTEM)
        memory.session("other").ask("Hm?", max_tokens=2, temperature=0.0).usage  # noqa: B018
        memory.session("log").ask("Now?", max_tokens=2, temperature=0.0).usage  # noqa: B018
    with Memory.open(tmp_path / "m", engine) as memory:
        found = memory.session("log").why()
        assert found.prompt_tokens > 200
        memory.delete("log")
        assert memory.runtime is not None
        with pytest.raises(SessionError, match="no request"):
            memory.runtime.why(found.request)
        raw = (tmp_path / "m" / "requests.journal").read_bytes()
        assert memory.session("other").why().prompt_tokens > 200
        needle = engine.text.encode("lighthouse").astype("<i4").tobytes()
        assert needle in raw
        memory.gc()  # some of what was asked may have been rolled back
        assert needle not in (tmp_path / "m" / "requests.journal").read_bytes()
        assert memory.session("other").why().request
