"""README and the pages of the site, and what stands in them to be run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: Written by hand; the generated ones open with a comment.
PAGES = [README, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.read_text().startswith("<!--"))]


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language, each text once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for text in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            found.setdefault(text, name_of(page))
    return [(page, text) for text, page in found.items()]


def commands(text: str) -> list[str]:
    """The commands of a console block, without comments."""
    return re.findall(r"^\$ (.*?) *(?:#.*)?$", text, re.MULTILINE)
