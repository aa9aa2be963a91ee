"""Claude's memory tool on a memory: its files are sessions, so they are durable, searched, forked and forgotten."""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ctxreuse.errors import CtxReuseError, SessionError
from ctxreuse.store import NewTurn
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

__all__ = ["MemoryTool"]

_ROOT = "/memories"
#: Characters of one file, and of what `view` returns.
_LONGEST, _SHOWN = 1_000_000, 100_000
_LINES = 999_999
#: Files of a listing.
_LISTED = 1000


class MemoryTool:
    """Carries out the commands of the tool ``memory``: view, create, str_replace, insert, delete, rename.

    ::

        tool = MemoryTool(memory, namespace="anna")
        tool.run(block.input)        # of a tool_use block; its text is the tool_result

    A file is a session, named by its namespace and path, whose one turn is its text; folders are what paths say. There
    are no files of the file system, so no path leads out: `..`, other roots, control characters and characters that
    look like a separator are refused. Any thread may call.
    """

    #: What the API takes in ``tools``.
    definition: Mapping[str, str] = {"type": "memory_20250818", "name": "memory"}

    def __init__(self, memory: Memory, *, namespace: str = "") -> None:
        """Use a memory, which the caller closes. ``namespace``: whose files; others cannot be reached."""
        self._memory, self._namespace = memory, namespace
        self._prefix = f"memories:{namespace}:"
        self._commands: Mapping[str, Callable[..., str]] = {
            "view": self.view,
            "create": self.create,
            "str_replace": self.str_replace,
            "insert": self.insert,
            "delete": self.delete,
            "rename": self.rename,
        }

    def run(self, command: Mapping[str, Any]) -> str:
        """Carry out a command as the model gave it; returns what the model is shown, errors included."""
        given = dict(command)
        name = given.pop("command", None)
        work = self._commands.get(name) if isinstance(name, str) else None
        if work is None:
            return f"Error: unknown command {str(name)[:60]!r}; use {', '.join(self._commands)}"
        try:
            inspect.signature(work).bind(**given)
        except TypeError:
            return f"Error: {name} was given {', '.join(sorted(map(str, given)))[:200] or 'nothing'}: wrong arguments"
        try:
            return work(**given)
        except CtxReuseError as error:
            return f"Error: {error.what}"

    def view(self, path: str, view_range: Any = None) -> str:
        """Return a file with numbers of lines, or what is in a folder, two levels deep."""
        place = _checked(path)
        found = self._find(place)
        if found is None:
            return self._listing(place)
        lines = _text(found).split("\n")
        if len(lines) > _LINES:
            raise SessionError(f"File {path} exceeds maximum line limit of {_LINES:,} lines.")
        first, last = _range(view_range, len(lines))
        shown = "\n".join(_numbered(lines[first - 1 : last], first))
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}\n[cut here; give view_range to see the rest]"
        return f"Here's the content of {path} with line numbers:\n{shown}"

    def create(self, path: str, file_text: str) -> str:
        """Create a file."""
        place = _checked(path)
        if place == _ROOT or self._below(place):
            raise SessionError(f"{path} is a directory")
        if self._find(place) is not None:
            raise SessionError(f"File {path} already exists")
        above = place.rpartition("/")[0]
        while above != _ROOT:
            if self._find(above) is not None:
                raise SessionError(f"{above} is a file, not a directory")
            above = above.rpartition("/")[0]
        _check_size(file_text)
        turns = [NewTurn("text", file_text)]
        self._memory.ledger.create(self._prefix + place, turns=turns, namespace=self._namespace)
        return f"File created successfully at: {path}"

    def str_replace(self, path: str, old_str: str, new_str: str = "") -> str:
        """Replace a text that stands once in a file."""
        first = 0

        def replaced(text: str) -> str:
            nonlocal first
            count = text.count(old_str) if old_str else 0
            if not count:
                what = f"No replacement was performed, old_str `{old_str}` did not appear verbatim in {path}."
                raise SessionError(what)
            if count > 1:
                at = [str(n) for n, line in enumerate(text.split("\n"), 1) if old_str.split("\n")[0] in line]
                what = f"No replacement was performed. Multiple occurrences of old_str `{old_str}` in lines: "
                raise SessionError(f"{what}{', '.join(at[:20])}. Please ensure it is unique")
            first = text[: text.index(old_str)].count("\n")
            return text.replace(old_str, new_str)

        if not isinstance(old_str, str) or not isinstance(new_str, str):
            raise SessionError("old_str and new_str are no texts")
        text = self._change(path, replaced)
        start = max(first - 2, 0)
        lines = text.split("\n")[start : first + new_str.count("\n") + 3]
        return "\n".join(["The memory file has been edited.", *_numbered(lines, start + 1)])

    def insert(self, path: str, insert_line: int, insert_text: str) -> str:
        """Insert lines after a line, or before the first with 0."""

        def longer(text: str) -> str:
            lines = text.split("\n")
            count = len(lines) - (lines[-1] == "")
            if type(insert_line) is not int or not 0 <= insert_line <= count:
                what = f"Invalid `insert_line` parameter: {insert_line}. It should be within the range of lines of the"
                raise SessionError(f"{what} file: [0, {count}]")
            lines.insert(insert_line, insert_text.removesuffix("\n"))
            return "\n".join(lines)

        if not isinstance(insert_text, str):
            raise SessionError("insert_text is no text")
        self._change(path, longer)
        return f"The file {path} has been edited."

    def delete(self, path: str) -> str:
        """Delete a file, or a folder and all in it. `Memory.compact` takes the texts out of the files on disk."""
        place = _checked(path)
        if place == _ROOT:
            raise SessionError(f"{_ROOT} itself cannot be deleted")
        found = self._find(place)
        every = [found] if found is not None else self._below(place)
        if not every:
            raise SessionError(f"The path {path} does not exist")
        for session in every:
            self._memory.delete(session)
        return f"Successfully deleted {path}"

    def rename(self, old_path: str, new_path: str) -> str:
        """Rename a file or a folder."""
        old, new = _checked(old_path), _checked(new_path)
        if _ROOT in (old, new) or new == old or new.startswith(old + "/"):
            raise SessionError(f"{old_path} cannot become {new_path}")
        if self._find(new) is not None or self._below(new):
            raise SessionError(f"The destination {new_path} already exists")
        found = self._find(old)
        for session in [found] if found is not None else self._below(old):
            session.rename(self._prefix + new + session.name[len(self._prefix) + len(old) :])
            found = session
        if found is None:
            raise SessionError(f"The path {old_path} does not exist")
        return f"Successfully renamed {old_path} to {new_path}"

    def _find(self, place: str) -> Session | None:
        try:
            return self._memory.session(self._prefix + place, create=False)
        except SessionError:
            return None

    def _file(self, path: str) -> Session:
        place = _checked(path)
        found = self._find(place)
        if found is None:
            what = f"The path {path} is a directory" if self._below(place) else f"The path {path} does not exist"
            raise SessionError(f"{what}. Please provide a valid path.")
        return found

    def _below(self, place: str, limit: int | None = None) -> list[Session]:
        return self._memory.sessions(limit, prefix=f"{self._prefix}{place}/")

    def _listing(self, place: str) -> str:
        found = self._below(place, _LISTED)
        if not found and place != _ROOT:
            raise SessionError(f"The path {place} does not exist. Please provide a valid path.")
        sizes: dict[str, int] = {place: 0}
        for session in found:
            size, path = len(_text(session).encode()), session.name[len(self._prefix) :]
            parts = path[len(place) + 1 :].split("/")
            sizes[place] += size
            for depth in range(1, min(len(parts), 2) + 1):
                shown = "/".join([place, *parts[:depth]])
                sizes[shown] = sizes.get(shown, 0) + size
        rows = "\n".join(f"{_size(size)}\t{path}" for path, size in sizes.items())
        head = f"Here're the files and directories up to 2 levels deep in {place}, excluding hidden items:"
        return f"{head}\n{rows}" + ("\n[there are more]" if len(found) == _LISTED else "")

    def _change(self, path: str, change: Callable[[str], str]) -> str:
        """Replace a file's text by what ``change`` makes of it, and return that."""
        core = self._file(path)._core
        with core.lock.hold():
            turns = core.turns()
            text = change(turns[0].content if turns else "")
            _check_size(text)
            if turns:
                core.edit(turns[0], text, None)
            else:
                core.extend([NewTurn("text", text)])
        return text


def _checked(path: object) -> str:
    """Return a path below ``/memories`` in its one form. Raises SessionError for any other."""
    if not isinstance(path, str) or len(path) > 300:
        raise SessionError("The path is no text of 300 characters at most")
    plain = unicodedata.normalize("NFC", path)
    parts = plain.rstrip("/").split("/")[1:]
    same = unicodedata.normalize("NFKC", plain)
    if (
        plain.rstrip("/").split("/")[:2] != ["", _ROOT[1:]]
        or any(part in ("", ".", "..") or part != part.strip() or not part.isprintable() for part in parts)
        or any(part in ("", ".", "..") for part in same.rstrip("/").split("/")[1:])
        or same.count("/") != plain.count("/")
        or any(char in plain for char in "\\%\u2044\u2215")
    ):
        raise SessionError(f"The path {path[:100]!r} is not a path below {_ROOT}")
    return plain.rstrip("/")


def _check_size(text: object) -> None:
    if not isinstance(text, str):
        raise SessionError("The text is no text")
    if len(text) > _LONGEST:
        raise SessionError(f"The file would have {len(text):,} characters, and {_LONGEST:,} are the most")


def _numbered(lines: Iterable[str], first: int) -> Iterator[str]:
    return (f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def _text(session: Session) -> str:
    turns = session.turns()
    return turns[0].content if turns else ""


def _range(given: Any, lines: int) -> tuple[int, int]:
    if given is None:
        return 1, lines
    if not isinstance(given, list | tuple) or len(given) != 2 or any(type(one) is not int for one in given):
        raise SessionError("view_range is no list of two numbers of lines")
    first, last = given[0], lines if given[1] == -1 else given[1]
    if not 1 <= first <= last or first > lines:
        raise SessionError(f"view_range {list(given)} is not in a file of {lines} lines")
    return first, min(last, lines)


def _size(size: int) -> str:
    return f"{max(size / 1024, 0.1):.1f}K" if size < 1 << 20 else f"{size / (1 << 20):.1f}M"
