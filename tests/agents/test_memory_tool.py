"""Claude's memory tool: its six commands, and paths that must not lead out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import MemoryTool

NOTES = "# Notes\nfirst\nsecond\n"


@pytest.fixture
def tool(memory: Memory) -> MemoryTool:
    return MemoryTool(memory)


def run(tool: MemoryTool, command: str, **given: Any) -> str:
    return tool.run({"command": command, **given})


def test_the_six_commands(tool: MemoryTool) -> None:
    path = "/memories/project/notes.md"
    assert run(tool, "create", path=path, file_text=NOTES) == f"File created successfully at: {path}"
    assert run(tool, "view", path=path).splitlines()[1:4] == ["     1\t# Notes", "     2\tfirst", "     3\tsecond"]
    assert run(tool, "view", path=path, view_range=[2, 2]).splitlines()[1:] == ["     2\tfirst"]
    assert "has been edited" in run(tool, "str_replace", path=path, old_str="first", new_str="1st")
    assert "has been edited" in run(tool, "insert", path=path, insert_line=1, insert_text="between\n")
    assert run(tool, "view", path=path).splitlines()[1:5] == [
        "     1\t# Notes", "     2\tbetween", "     3\t1st", "     4\tsecond",
    ]  # fmt: skip
    assert "Successfully renamed" in run(tool, "rename", old_path="/memories/project", new_path="/memories/old")
    assert "does not exist" in run(tool, "view", path=path)
    listing = run(tool, "view", path="/memories")
    assert [line.split("\t")[1] for line in listing.splitlines()[1:]] == [
        "/memories", "/memories/old", "/memories/old/notes.md",
    ]  # fmt: skip
    assert "Successfully deleted" in run(tool, "delete", path="/memories/old")
    assert len(run(tool, "view", path="/memories").splitlines()) == 2


def test_errors_say_what_the_model_can_do(tool: MemoryTool) -> None:
    path = "/memories/a"
    run(tool, "create", path=path, file_text="x\nx\n")
    assert run(tool, "create", path=path, file_text="y") == f"Error: File {path} already exists"
    assert "is a file" in run(tool, "create", path=f"{path}/b", file_text="y")
    assert "Multiple occurrences" in run(tool, "str_replace", path=path, old_str="x", new_str="y")
    assert "did not appear verbatim" in run(tool, "str_replace", path=path, old_str="z", new_str="y")
    assert "[0, 2]" in run(tool, "insert", path=path, insert_line=3, insert_text="y")
    assert "view_range" in run(tool, "view", path=path, view_range=[9, 9])
    assert run(tool, "rename", old_path=path, new_path=path).startswith("Error")
    run(tool, "create", path="/memories/c", file_text="x")
    assert "already exists" in run(tool, "rename", old_path=path, new_path="/memories/c")
    assert run(tool, "delete", path="/memories").startswith("Error")
    assert run(tool, "undo").startswith("Error: unknown command")
    assert run(tool, "view").startswith("Error: view was given nothing")
    assert run(tool, "view", path=path, more=1).startswith("Error")
    assert run(tool, "create", path="/memories/b", file_text=5).startswith("Error")
    assert run(tool, "create", path="/memories/b", file_text="\ud800").startswith("Error")
    assert run(tool, "create", path="/memories/b", file_text="x" * 1_000_001).startswith("Error")


BAD = [
    "", "/", "memories/a", "/etc/passwd", "/memories/../etc/passwd", "/memories/a/../../etc", "/memories/..",
    "/memories/./a", "/memories//a", "//memories/a", "/memoriesx/a", "/memories/a\0b", "/memories/\n", "/memories/a ",
    "/memories/ a", "/memories\\..\\a", "/memories/%2e%2e/a", "/memories/..%2fa", "C:/memories/a", "~/memories/a",
    "/memories/．．/a", "/memories/‥", "/memories／a", "/memories/a／../b", "/memories/a∕b", "/memories/a⁄b",
    "/memories/\u202egnp.exe", "/memories/" + "a" * 400, "file:///memories/a", "/Memories/a", "/memories/\ud800",
    None, 5, ["/memories/a"],
]  # fmt: skip


@pytest.mark.parametrize("path", BAD, ids=lambda path: repr(path)[:40])
def test_no_path_leads_out(tool: MemoryTool, memory: Memory, path: Any) -> None:
    assert run(tool, "create", path=path, file_text="x").startswith("Error")
    assert run(tool, "rename", old_path=path, new_path="/memories/b").startswith("Error")
    assert run(tool, "delete", path=path).startswith("Error")
    if path not in ("/", ""):
        assert run(tool, "view", path=path).startswith("Error")
    run(tool, "create", path="/memories/a", file_text="x")
    assert run(tool, "rename", old_path="/memories/a", new_path=path).startswith("Error")
    assert [one.name for one in memory.sessions()] == ["memories::/memories/a"]


def test_links_of_the_file_system_are_no_files(tool: MemoryTool, memory: Memory, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    for place in (memory.ledger.path / "memories", memory.ledger.path / "a"):
        place.symlink_to(secret)
    assert "does not exist" in run(tool, "view", path="/memories/a")
    run(tool, "create", path="/memories/a", file_text="x")
    assert secret.read_text() == "password"


def test_one_name_in_two_forms_of_unicode_is_one_file(tool: MemoryTool) -> None:
    run(tool, "create", path="/memories/caf\u00e9", file_text="x")
    assert "already exists" in run(tool, "create", path="/memories/cafe\u0301", file_text="y")


def test_namespaces_do_not_see_each_other(memory: Memory) -> None:
    anna, bert = MemoryTool(memory, namespace="anna"), MemoryTool(memory, namespace="anna/run")
    run(anna, "create", path="/memories/a", file_text="of anna")
    assert "does not exist" in run(bert, "view", path="/memories/a")
    run(bert, "create", path="/memories/a", file_text="of her run")
    assert "of anna" in run(anna, "view", path="/memories/a")
    assert [hit.turn.content for hit in memory.search("anna", namespace="anna")] == ["of anna"]
    assert [hit.turn.content for hit in memory.search("run", namespace="anna/run")] == ["of her run"]


def test_files_are_found_and_survive_and_deleted_ones_do_not(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m") as memory:
        tool = MemoryTool(memory)
        run(tool, "create", path="/memories/a", file_text="The boiler is SECRET-77 degrees.")
        run(tool, "create", path="/memories/b", file_text="stays")
        assert memory.search("boiler")[0].session.name.endswith("/memories/a")
    with Memory.open(tmp_path / "m") as memory:
        tool = MemoryTool(memory)
        assert "SECRET-77" in run(tool, "view", path="/memories/a")
        run(tool, "delete", path="/memories/a")
        memory.compact()
        assert "stays" in run(tool, "view", path="/memories/b")
    for file in (tmp_path / "m").rglob("*"):
        assert not file.is_file() or b"SECRET-77" not in file.read_bytes()


def test_edits_of_many_threads_are_all_kept(memory: Memory) -> None:
    tools = [MemoryTool(memory), MemoryTool(memory)]
    run(tools[0], "create", path="/memories/a", file_text="")

    def work(number: int) -> None:
        for line in range(10):
            run(tools[line % 2], "insert", path="/memories/a", insert_line=0, insert_text=f"{number} {line}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        sum("\t" in line and line[-1].isdigit() for line in run(tools[0], "view", path="/memories/a").splitlines())
        == 40
    )


def test_files_beside_an_engine_are_deleted_too(asked: Memory) -> None:
    tool = MemoryTool(asked)
    for name in ("a", "b"):
        run(tool, "create", path=f"/memories/{name}", file_text="the same text")
    assert asked.session("chat").ask("hi", max_tokens=4).text is not None
    assert "Successfully" in run(tool, "delete", path="/memories/a")
    assert "the same text" in run(tool, "view", path="/memories/b")
