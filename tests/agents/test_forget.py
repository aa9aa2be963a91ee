"""A deleted session is in no file after compaction, and what its forks share stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxreuse_agents import Memory

from support.raw_files import found_in_files

SECRET = "The password of the harbour office is marmalade forty-seven. "
SHARED = "Swallows nest under our roof near a customs house each May. "


def traces(memory: Memory, *texts: str) -> list[str]:
    memory.flush()
    assert memory.runtime is not None
    text = memory.runtime.text
    assert text is not None
    ids = [text.encode(one, markers=False)[2:-2].tolist() for one in texts]
    return found_in_files(Path(memory.ledger.path), texts, ids)


def test_a_deleted_session_is_in_no_file(asked: Memory) -> None:
    base = asked.session("base")
    base.system(SHARED * 4)
    branch = base.fork("branch")
    assert branch.ask(SECRET * 2, max_tokens=4).text
    assert base.ask("Which house is it?", max_tokens=4).text
    assert traces(asked, SECRET)
    asked.delete(branch)
    asked.compact()
    assert traces(asked, SECRET) == []
    assert traces(asked, SHARED), "the search finds what was not deleted"
    again = base.ask("And the roof?", max_tokens=4)
    assert again.text
    assert again.usage.cached_tokens > 100, "the KV of what the fork shared stays"
    asked.delete(base)
    asked.compact()
    assert traces(asked, SECRET, SHARED) == []
    assert asked.ledger.stats().turns == 0


def test_a_deletion_that_a_crash_cut_short_is_completed(tmp_path: Path, engine: Any, monkeypatch: Any) -> None:
    with Memory.open(tmp_path, engine) as memory:
        session = memory.session("one")
        assert session.ask(SECRET * 2, max_tokens=4).text
        memory.flush()
        assert memory.runtime is not None
        with monkeypatch.context() as patched:
            patched.setattr(memory.runtime.eraser, "carry_out", _crash)  # type: ignore[attr-defined]
            try:
                memory.delete(session)
            except KeyboardInterrupt:
                pass
        assert memory.sessions() == []
        assert traces(memory, SECRET)
    with Memory.open(tmp_path, engine) as memory:
        assert memory.ledger.deletions() == {}
        memory.compact()
        assert traces(memory, SECRET) == []


def _crash(_: Any) -> int:
    raise KeyboardInterrupt


def test_a_memory_of_text_alone_is_compacted_too(memory: Memory) -> None:
    session = memory.session("one")
    session.user(SECRET)
    memory.delete(session)
    memory.compact()
    assert found_in_files(Path(memory.ledger.path), [SECRET]) == []
