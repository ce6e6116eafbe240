"""What a node tells others of its chunks: what came where, and what went."""
