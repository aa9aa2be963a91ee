"""Try several ideas at the price of one: fork an agent's history, compare the branches, keep the best. No model needed.

python examples/agent_forks.py
"""

from __future__ import annotations

import tempfile
import time

from ctxreuse_agents import Memory, Session

IDEAS = {"bfs": "Search level by level.", "dfs": "Go deep first.", "astar": "Let a distance estimate lead."}


def attempt(branch: Session, idea: str) -> int:
    """Stands for an agent's work in one branch; returns how good the result is."""
    branch.assistant(idea)
    branch.tool(f"tests passed: {len(idea)}", name="pytest")
    return len(idea)


def main(folder: str) -> None:
    with Memory.open(folder) as memory:
        trunk = memory.create("maze")
        trunk.system("You write maze solvers.")
        trunk.user("Find the shortest way out. " * 2000)

        started = time.perf_counter()
        branches = {name: trunk.fork(name) for name in IDEAS}
        print(f"{len(branches)} forks of a long history in {1e3 * (time.perf_counter() - started):.1f} ms")

        scores = {name: attempt(branch, IDEAS[name]) for name, branch in branches.items()}
        best = max(scores, key=scores.__getitem__)
        print(f"best branch: {best} {scores}")

        branches[best].commit()
        for name, branch in branches.items():
            diff = branch.diff(trunk)
            print(f"{name}: {len(diff.here)} turns of its own, {len(diff.there)} only in the trunk")
            memory.delete(branch)
        print(f"{memory.gc()} turns of abandoned branches removed")

        trunk.user("A wrong turn.")
        trunk.rollback(-1)
        print("found again:", [hit.snippet for hit in memory.search("distance estimate")])
        print("history:", [turn.role for turn in trunk.turns()])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
