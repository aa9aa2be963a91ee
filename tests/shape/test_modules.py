"""What each module says about itself: one sentence of duty, names that say what is done, listed public names."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict

from support.source_tree import ROOT, modules

# Words that name no duty: what they would hold belongs to a module with a name.
VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|misc)(_|$)|^(handle|process)_")
MANY = 14

#: Public classes of one name in several packages, where the name is each room's own word for a thing of that room.
#: This list only shrinks: a class of a new subject gets a name of its own.
SAME_NAMES = {
    "Address", "Answer", "Cancel", "Candidate", "Completion", "Context", "Draft", "Ended", "Fetch", "Fidelity",
    "Forward", "Limits", "Links", "Made", "Match", "Node", "Part", "Plan", "Plane", "Prompt", "Put", "Request",
    "Served", "Session", "Settings", "Step", "Usage", "Verdict",
}  # fmt: skip


def test_a_module_opens_with_one_sentence_of_duty() -> None:
    wrong = []
    for module in modules().values():
        first = (ast.get_docstring(module.tree) or "").split("\n\n")[0]
        if not first.rstrip().endswith((".", ":", "!", "?")):
            wrong.append(str(module))
    assert wrong == []


def test_names_say_what_is_done() -> None:
    wrong = []
    for module in modules().values():
        named = [part.removesuffix(".py") for part in module.path.relative_to(ROOT).parts]
        named += [n.name for n in ast.walk(module.tree) if isinstance(n, DEFINITIONS)]
        # Snake case of class names, so that both spellings are seen.
        wrong += [f"{module}: {n}" for n in named if VAGUE.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).lower())]
    assert wrong == []


def test_public_names_are_listed_and_real() -> None:
    wrong = []
    for module in modules().values():
        listed = listed_names(module.tree)
        if listed is None:
            if any(not name.startswith("_") for name in defined(module.tree)):
                wrong.append(f"{module}: __all__ is missing")
            continue
        unknown = set(listed) - bound(module.tree)
        if len(set(listed)) != len(listed) or (unknown and "__getattr__" not in defined(module.tree)):
            wrong.append(f"{module}: {sorted(unknown) or 'a name is listed twice'}")
    assert wrong == []


def test_a_folder_of_many_modules_hides_no_room_behind_a_prefix() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for module in modules().values():
        if not module.is_package:
            folders[str(module.path.parent.relative_to(ROOT))].append(module.path.stem)
    wrong = [
        f"{folder}: {prefix}_*"
        for folder, names in folders.items()
        if len(names) > MANY
        for prefix, count in Counter(name.partition("_")[0] for name in names).items()
        if count > 3
    ]
    assert wrong == []


def test_a_public_class_name_stands_for_one_thing() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for name, module in modules().items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    shared = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in SAME_NAMES} == {}


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def listed_names(tree: ast.Module) -> list[str] | None:
    """The names in ``__all__``, None without one."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
            and isinstance(node.value, ast.List | ast.Tuple)
        ):
            return [ast.literal_eval(item) for item in node.value.elts]
    return None


def defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, DEFINITIONS)}


def bound(tree: ast.Module) -> set[str]:
    """Names that a module's top level binds, inside `if` and `try` as well."""
    names = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
