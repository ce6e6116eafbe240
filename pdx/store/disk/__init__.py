"""Chunks in files: the disk tier, the form of a file, and a scrub."""
