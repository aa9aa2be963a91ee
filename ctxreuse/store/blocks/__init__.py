"""The block cache on disk."""
