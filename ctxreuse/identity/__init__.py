"""What a context is called: model spaces and the keys of blocks."""
