"""Chunks of another cache's KV, coded by a calibration profile."""
