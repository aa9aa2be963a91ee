"""Chunks at other positions: relocation and selective recompute."""
