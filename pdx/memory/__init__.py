"""Where chunks lie: arenas, slots, layouts, keys."""
