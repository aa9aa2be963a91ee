"""Getting blocks from another node while computing goes on."""
