"""Compute a context once; then keep, fork, move and reuse it."""
