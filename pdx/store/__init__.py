"""The chunk store of a node: where chunks lie, which are there, which must go. No sockets here."""
