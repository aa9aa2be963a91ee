"""Doors for inference engines of others: their KV pages are loaded from a store and saved to it."""
