"""Prefixes in flight: requests that start behind what another one is computing."""
