"""Pages are up to date, their links lead somewhere, and their numbers are those of the committed results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import PAGES, README, ROOT, name_of


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run `python docs/generate.py`:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "concepts" / "glossary.html").is_file()


def test_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def _numbers(report: dict[str, object]) -> Iterator[float]:
    """Every number of a result, and the ratios of ours to what it is compared with."""
    figures = report["figures"]
    assert isinstance(figures, list)
    for figure in figures:
        ours = figure["value"]
        yield ours
        for name in ("baseline", "peer", "bound", "bar"):
            other = figure[name]
            if other is not None:
                yield other
                if ours and other:
                    yield from (ours / other, other / ours)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_numbers_that_link_to_a_figure_are_in_its_result(page: Path) -> None:
    for text, name in re.findall(r"\[([^\]]*)\]\([^)]*figures/([\w-]+)\.md\)", page.read_text("utf-8")):
        result = ROOT / "benchmarks" / "results" / f"{name}.json"
        told = [one for one in re.findall(r"(?<![\w-])\d[\d,]*\.?\d*", text) if name not in text or one not in name]
        if told and name != "index":
            known = list(_numbers(json.loads(result.read_text("utf-8"))))
            for one in told:
                digits = len(one.partition(".")[2])
                value = float(one.replace(",", ""))
                assert any(abs(round(number, digits) - value) < 1e-9 for number in known), (
                    f"{one} is not in {name}.json"
                )
