"""Fetching from other nodes: offers and fetches over all links, and the cards to read lossy blocks with."""
