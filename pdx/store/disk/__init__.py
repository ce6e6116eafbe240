"""The disk tier: chunks in files, their format, and a scrub."""
