"""What a user installs: the wheel that the project builds, unpacked and used away from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import native_builds

pytestmark = pytest.mark.build("wheel")


@pytest.fixture(scope="module")
def wheel() -> Path:
    return native_builds.wheel()


def test_one_wheel_serves_every_later_python(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_it_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "ctxreuse",
        "ctxreuse_agents",
        "ctxreuse_cloud",
        "ctxreuse_edge",
    }
    for needed in ("ctxreuse/py.typed", "ctxreuse_agents/py.typed"):
        assert needed in names
    assert any(name.startswith("ctxreuse/_native") and name.endswith(".so") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_works_away_from_the_source(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path / "site")
    code = (
        "import ctxreuse, ctxreuse_agents, sys\n"
        "from ctxreuse import kernels\n"
        f"assert ctxreuse.__file__.startswith({str(tmp_path)!r}), ctxreuse.__file__\n"
        "assert kernels.active() in kernels.available()\n"
        "with ctxreuse_agents.Memory.open('m') as memory:\n"
        "    memory.create('here').user('kept')\n"
        "with ctxreuse_agents.Memory.open('m') as memory:\n"
        "    print(memory.session('here').turns()[0].content)\n"
    )
    # -S and the packages' folders as plain paths: no .pth file, so the editable install cannot step in.
    folders = [str(tmp_path / "site"), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    env.pop("CTXREUSE_KERNELS", None)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "kept"
