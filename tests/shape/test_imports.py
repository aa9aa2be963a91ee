"""Who imports whom, beyond what import-linter reads: types counted, and nothing in the wheel that nobody imports."""

from __future__ import annotations

from support.source_tree import FACES, PACKAGES, PROJECT, ROOT, circles, importers, modules

#: Modules that are begun by their name.
ENTRY_POINTS = {
    "ctxreuse.bench.kernels",
    "ctxreuse.bench.link",
    "ctxreuse.bench.replay",
    "ctxreuse.bench.reuse",
    "ctxreuse.bench.store",
    "ctxreuse_cloud.connectors.lmcache",
    "ctxreuse_cloud.connectors.sglang",
    "ctxreuse_cloud.connectors.vllm",
    "ctxreuse_cloud.connectors.vllm_tier",
    "ctxreuse_cloud.worker",
}


def test_modules_form_no_circle_with_imports_for_types_counted() -> None:
    assert [sorted(circle) for circle in circles()] == []


def test_each_module_of_the_wheel_has_an_importer_in_the_wheel() -> None:
    contracts = "ctxreuse.testing."
    unused = [
        name
        for name, by in importers().items()
        if not by
        and not modules()[name].is_package
        and not name.startswith(contracts)
        and not name.endswith("__main__")
    ]
    assert sorted(set(unused) - ENTRY_POINTS) == []


def test_every_face_that_exists_is_under_the_rules() -> None:
    faces = [package for folder, package in FACES.items() if (ROOT / folder / package / "__init__.py").exists()]
    rules = PROJECT["tool"]["importlinter"]
    assert set(rules["root_packages"]) == {"ctxreuse", *faces}
    core = next(rule for rule in rules["contracts"] if rule["name"] == "the core never imports a face")
    assert set(core["forbidden_modules"]) == set(faces)
    apart = [set(rule["modules"]) for rule in rules["contracts"] if rule["type"] == "independence"]
    assert len(faces) < 2 or set(faces) in apart
    assert set(PACKAGES) == {"ctxreuse", *faces}
    assert set(PROJECT["tool"]["mypy"]["packages"]) >= {"ctxreuse", *faces}


def test_every_layer_is_named() -> None:
    layers = next(rule for rule in PROJECT["tool"]["importlinter"]["contracts"] if rule["type"] == "layers")
    parts = {part.strip() for layer in layers["layers"] for part in layer.split("|")}
    entries = (ROOT / "ctxreuse").iterdir()
    found = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    # A name in brackets may be absent.
    assert (
        {part for part in parts if not part.startswith("(")} <= found - {"__init__"} <= {p.strip("()") for p in parts}
    )


def test_folders_of_faces_are_no_packages() -> None:
    # A top-level package `agents` would shadow the OpenAI Agents SDK, whose import name that is.
    for folder in FACES:
        assert not (ROOT / folder / "__init__.py").exists()


def test_packages_are_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").is_file()
