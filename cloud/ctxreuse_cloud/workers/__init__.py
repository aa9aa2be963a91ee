"""Engine processes that compute blocks for the node: started, spoken to over a socket pair, restarted when they die."""
