"""Reusing chunks at positions other than where they were computed."""
