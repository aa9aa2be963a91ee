"""Which process runs which test (``-n 2``): a pytest plugin that `conftest` loads.

Tests of a group run in one process, one after another: those with a real model (that process holds it), those with
daemons, sockets and clocks (they would disturb each other), and those of one native build. Builds go on in the
background from the start, so their tests come last. A group is what a test's markers say; as markers are not known
to the process that hands out tests, those that run them write their groups to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from support import native_builds

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

__all__ = ["GROUPS", "group_of"]

GROUPS: Final = {"model": "model", "gemma": "gemma", "daemon": "alone", "timing": "alone"}
"""The group of a marker's tests, in the order in which groups begin; tests of no group follow."""

#: Fixtures that are daemons; their tests need no marker.
_DAEMONS: Final = {"cluster", "process", "serve", "sidecar"}
_groups_file = pytest.StashKey[Path]()
_build = pytest.StashKey["subprocess.Popen[bytes]"]()


def group_of(item: pytest.Item) -> str:
    """Return the build that a test needs, or the group of the first of `GROUPS` that it is marked with, or ""."""
    if build := item.get_closest_marker("build"):
        return str(build.args[0])
    return next((group for marker, group in GROUPS.items() if item.get_closest_marker(marker)), "")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _DAEMONS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("daemon")
    order = {name: at for at, name in enumerate(dict.fromkeys([*GROUPS.values(), "", *native_builds.BUILDERS]))}
    items.sort(key=lambda item: order[group_of(item)])


@pytest.hookimpl(tryfirst=True)  # the process that hands out tests is told that all are collected after this
def pytest_collection_finish(session: pytest.Session) -> None:
    if place := getattr(session.config, "workerinput", {}).get("groups"):
        groups = {item.nodeid: group for item in session.items if (group := group_of(item))}
        new = Path(f"{place}.{os.getpid()}")
        new.write_text(json.dumps(groups))
        new.replace(place)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    config: pytest.Config = node.config
    if _groups_file not in config.stash:
        config.stash[_groups_file] = Path(tempfile.mkdtemp(prefix="test-groups-")) / "groups.json"
    node.workerinput["groups"] = str(config.stash[_groups_file])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        """Each group is a unit of work, and each test of no group; units begin in the order of collection."""

        def schedule(self) -> None:
            if self.collection is None:
                self.groups: dict[str, str] = json.loads(config.stash[_groups_file].read_text())
                _begin_builds(config, list(self.groups.values()))
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.groups.get(nodeid, nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    build = config.stash.get(_build, None)
    if build is not None:
        if build.poll() is None:  # the run was stopped early
            os.killpg(build.pid, signal.SIGTERM)
        build.wait()
    if place := config.stash.get(_groups_file, None):
        place.unlink(missing_ok=True)
        place.parent.rmdir()


def _begin_builds(config: pytest.Config, groups: Sequence[str]) -> None:
    wanted = [name for name in native_builds.BUILDERS if name in groups]
    if wanted:
        command = ["nice", "-n", "19", sys.executable, "-m", "support.native_builds", *wanted]
        none = subprocess.DEVNULL  # a build that fails is built again by its test, which says why
        here = native_builds.ROOT / "tests"
        config.stash[_build] = subprocess.Popen(command, cwd=here, stdout=none, stderr=none, process_group=0)
