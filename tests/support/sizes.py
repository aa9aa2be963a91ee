"""How long modules are: ``python -m support.sizes`` (in ``tests``) prints it. A long file is a question, no error."""

from __future__ import annotations

from statistics import median, quantiles

from support.source_tree import modules

__all__ = ["main"]

_LONG = 600


def main() -> None:
    """Print the median, the 90th percentile and the files of more than 600 lines."""
    lines = sorted(module.lines for module in modules().values())
    print(
        f"{len(lines)} modules, {sum(lines):,} lines: median {median(lines):.0f}, p90 {quantiles(lines, n=10)[-1]:.0f}"
    )
    for module in modules().values():
        if module.lines > _LONG:
            print(f"  more than {_LONG}: {module} ({module.lines})")


if __name__ == "__main__":
    main()
