"""Engine processes that compute blocks for the node: started, connected by a socket pair, restarted when they die."""
