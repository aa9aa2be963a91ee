"""Blocks as payloads: what is sent next, and assembling what arrives."""
