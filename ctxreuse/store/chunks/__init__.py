"""Where chunks lie, found by content."""
