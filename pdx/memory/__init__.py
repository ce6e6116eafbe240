"""Chunk memory: arenas, slots, layouts, keys, digests; no policy."""
