"""The eviction policies that PDX has, one per file."""
