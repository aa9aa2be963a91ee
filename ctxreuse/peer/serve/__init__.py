"""What a cloud node does for its peers: match, send, receive, prefill."""
