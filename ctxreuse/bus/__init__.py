"""The link between nodes: the protocol (wire, session, transfer), its sockets, and what is built on them."""
