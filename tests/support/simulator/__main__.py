"""``python -m support.simulator``: run numbered schedules of faults; one that fails is printed with its command."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from support.simulator import failing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.simulator", description=__doc__)
    parser.add_argument("what", choices=("link", "store"))
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=1)
    given = parser.parse_args()
    if given.what == "link":
        from support.simulator.link import run
    else:
        from support.simulator.store import run
    begun, kinds = time.monotonic(), Counter[str]()
    for seed in range(given.seed, given.seed + given.count):
        try:
            kinds[run(seed)] += 1
        except Exception:
            traceback.print_exc()
            print(failing(given.what, seed))
            return 1
    print(f"{given.count} schedules in {time.monotonic() - begun:.0f} s held: {dict(kinds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
