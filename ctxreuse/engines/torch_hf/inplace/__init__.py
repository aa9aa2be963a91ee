"""Attention over runs where they lie."""
