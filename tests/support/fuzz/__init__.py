"""Fuzzing of all that parses bytes from disk or wire; ``python -m support.fuzz`` is the command behind `make fuzz`."""
