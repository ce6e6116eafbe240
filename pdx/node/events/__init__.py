"""Events of a node's chunks: which came into which tier, and which went."""
