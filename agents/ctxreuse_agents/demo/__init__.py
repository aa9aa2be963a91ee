"""The demo: one document, several questions, a killed process, two forks and an eviction, with a table at the end."""
