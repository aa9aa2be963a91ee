"""The node that serves, asks and gives: what stands between the link and the store."""
